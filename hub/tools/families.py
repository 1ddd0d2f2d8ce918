"""Which models without classes convert, distil and come back unchanged: each family of timm at a tiny size.

    python hub/tools/families.py hub/families.json

For each model: converted exactly (one phase per block), its embedding equals the original's to 1e-4, also after saving
and loading; converted to one shared block, the loss step by step and that of the unrolled trajectory fall within twelve
updates on random images. The towers of open_clip and transformers are tried through timm and back in their programs.
"""
import argparse
import copy
import json
import tempfile
from pathlib import Path

import timm
import torch

from timm_odevit import (
    StepwiseTask,
    TrajectoryDistillationTask,
    convert_,
    fit,
    from_open_clip,
    from_transformers,
    put_tower_,
    save_pretrained,
)
from timm_odevit.convert.block_kinds import find_sites

VIT = dict(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=4, num_classes=0)
NATIVE = {key: value for key, value in VIT.items() if key != 'img_size'}
WINDOWS = dict(VIT, window_size=2, global_attn_indexes=(1, 3), neck_chans=8)
FAMILIES = {
    'DINO, MAE, I-JEPA, AugReg-21k': ('vit_small_patch16_224', VIT),
    'DINOv2, with registers': ('vit_small_patch14_reg4_dinov2', VIT),
    'DINOv3': ('vit_small_patch16_dinov3', VIT),
    'EUPE': ('vit_small_patch16_dinov3_qkvb', VIT),
    'DeiT-3': ('deit3_small_patch16_224', VIT),
    'CLIP, as timm has it': ('vit_base_patch16_clip_224', VIT),
    'SigLIP, SigLIP 2': ('vit_base_patch16_siglip_224', VIT),
    'SigLIP of PaliGemma': ('vit_base_patch16_siglip_gap_224', VIT),
    'SigLIP 2, NaFlex': ('naflexvit_base_patch16_siglip', NATIVE),
    'TIPSv2': ('vit_base_patch14_reg1_tipsv2', VIT),
    'AIMv2': ('aimv2_large_patch14_224', VIT),
    'BEiT-3': ('beit3_base_patch16_224', VIT),
    'EVA-02, EVA-CLIP': ('eva02_small_patch14_224', VIT),
    'InternViT': ('vit_intern300m_patch14_448', VIT),
    'C-RADIO': ('vit_base_patch16_radio_v3', VIT),
    'Perception Encoder': ('vit_pe_spatial_base_patch16_512', VIT),
    'Sapiens-2': ('vit_base_patch16_sapiens2', dict(VIT, num_heads=4, num_kv_heads=(4, 2, 2, 4))),
    'LingBot': ('vit_base_patch16_lingbot', VIT),
    'SAM': ('samvit_base_patch16', WINDOWS),
    'Qwen3-VL, Qwen3.5': ('qwen3_vit_88m', dict(VIT, img_size=64)),
    'DeepSeek-OCR': ('deepseek_vit_412m', dict(VIT, img_size=48)),
    'Gemma 4': ('gemma4_vit_167m', dict(NATIVE, img_size=48, head_dim=16, intermediate_size=64)),
}


def open_clip_tower(timms):
    import open_clip
    vision = dict(timm_model_name='vit_tiny_patch16_224', image_size=224, timm_pool='', timm_proj='linear',
                  timm_model_pretrained=False) if timms else dict(
                      layers=4, width=32, head_width=16, patch_size=8, image_size=32)
    return open_clip.CLIP(16, vision, dict(context_length=8, vocab_size=99, width=16, heads=2, layers=1)).eval()


def transformers_tower(kind):
    import transformers
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    config = getattr(transformers, f'{kind}Config')(
        vision_config=dict(sizes, image_size=32, patch_size=8), text_config=dict(sizes, vocab_size=99))
    return getattr(transformers, f'{kind}Model')(config).eval()


PROGRAMS = {
    'open_clip, its own tower': (lambda: open_clip_tower(False), from_open_clip),
    'open_clip, a tower of timm': (lambda: open_clip_tower(True), lambda program: program.visual.trunk),
    'transformers, CLIP': (lambda: transformers_tower('CLIP'), from_transformers),
    'transformers, SigLIP': (lambda: transformers_tower('Siglip'), from_transformers),
}


def embedding(model, images):
    with torch.no_grad():
        if hasattr(model, 'encode_image'):
            return model.encode_image(images)
        if hasattr(model, 'get_image_features'):
            return model.get_image_features(images).pooler_output
        return model(images)


def differ(a, b):
    return float((a - b).abs().max() / b.abs().max())


def falls(task, batch, **options):
    first = task(*batch)['loss'].item()
    fit(task, [batch], epochs=12, weight_decay=0., progress=False, **options)
    return task(*batch)['loss'].item() < first


def pixels(model):
    host = find_sites(model)[0].host
    sizes = getattr(getattr(host, 'patch_embed', None), 'img_size', None)
    if sizes is None and isinstance(getattr(host, 'patch_size', None), tuple):
        sizes = tuple(6 * side for side in host.patch_size)
    return sizes or timm.data.resolve_model_data_config(model)['input_size'][1:]


def shaken(model):
    """No norm, bias or LayerScale as it was made: those of a trained model are not."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tried(model):
    """What works for one model; an exception's first line where something does not."""
    images = torch.randn(8, 3, *pixels(model))
    batch = (images, torch.zeros(8, dtype=torch.long))
    found = {}

    def attempt(name, what):
        try:
            found[name] = what()
        except Exception as e:
            found[name] = f'{type(e).__name__}: {str(e).splitlines()[0][:200]}'
    depth = len(find_sites(model)[0].blocks)
    method = 'lie_trotter'

    def converted(**how):
        nonlocal method
        student = copy.deepcopy(model).requires_grad_(True)
        try:
            convert_(student, method=method, **how)
        except ValueError as e:
            if 'splits a block' not in str(e):
                raise
            method = 'euler'
            convert_(student, method=method, **how)
        return student

    def exact():
        student = converted(phases=depth)
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(student, folder)
            again = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
        return max(differ(embedding(m, images), embedding(model, images)) for m in (student, again))
    attempt('round trip', exact)
    attempt('stepwise', lambda: falls(
        StepwiseTask(converted(), copy.deepcopy(model), verbose=False), batch, lr=1e-3))
    attempt('unrolled', lambda: falls(
        TrajectoryDistillationTask(converted(), copy.deepcopy(model), verbose=False), batch, lr=1e-3))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('out', type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family, (name, kwargs) in FAMILIES.items():
        torch.manual_seed(0)
        try:
            model = shaken(timm.create_model(name, **kwargs).eval())
        except Exception as e:
            rows.append({'family': family, 'model': name, 'built': f'{type(e).__name__}: {str(e)[:200]}'})
        else:
            rows.append({'family': family, 'model': name, **tried(model)})
        print(rows[-1], flush=True)
    for family, (build, tower_of) in PROGRAMS.items():
        torch.manual_seed(0)
        program = shaken(build())
        tower = copy.deepcopy(tower_of(program))
        row = {'family': family, 'model': type(tower).__name__, **tried(tower)}
        images = torch.randn(2, 3, *pixels(tower))
        expected = embedding(program, images)
        convert_(tower, phases=len(tower.blocks))
        if 'timm' in family:
            program.visual.trunk = tower
        else:
            put_tower_(program, tower)
        rows.append({**row, 'in its program': differ(embedding(program, images), expected)})
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps(rows, indent=2) + '\n')


if __name__ == '__main__':
    main()
