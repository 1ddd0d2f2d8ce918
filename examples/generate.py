"""Write the tables of these pages that follow from the code: settings, recipes, methods, models and their sizes.

    python examples/generate.py            print them
    python examples/generate.py --write    put them between their marks
"""
import re
import sys
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

import timm

from timm_odevit import FitConfig, LossConfig, OdeConfig, Recipe, choose_size
from timm_odevit.convert.planning import convertibility, predict_parameters
from timm_odevit.data.batches import DataConfig
from timm_odevit.hooks import on_meta
from timm_odevit.ode.blocks import count_parameters
from timm_odevit.ode.methods import METHODS
from timm_odevit.training.recipe import FOLDER, PARTS, Stage, builtin_recipes

HERE = Path(__file__).parent
SETTINGS, MODELS, EMBEDDINGS = HERE / 'settings.md', HERE / 'models.md', HERE / 'embeddings.md'

# a model of each family
FAMILIES = {
    'ViT; DINO, MAE and I-JEPA': 'vit_small_patch16_224',
    'DeiT, distilled too': 'deit_tiny_distilled_patch16_224',
    'DeiT-3': 'deit3_small_patch16_224',
    'DINOv2, with registers': 'vit_small_patch14_reg4_dinov2',
    'CLIP': 'vit_base_patch16_clip_224',
    'SigLIP, SigLIP 2': 'vit_base_patch16_siglip_224',
    'SigLIP 2, NaFlex': 'naflexvit_base_patch16_siglip',
    'FlexiViT': 'flexivit_small',
    'TIPSv2': 'vit_base_patch14_reg1_tipsv2',
    'AIMv2': 'aimv2_large_patch14_224',
    'BEiT-3': 'beit3_base_patch16_224',
    'InternViT': 'vit_intern300m_patch14_448',
    'C-RADIO': 'vit_base_patch16_radio_v3',
    'ViTamin': 'vitamin_small_224',
    'ViT behind a ResNet': 'vit_small_resnet26d_224',
    'DINOv3': 'vit_small_patch16_dinov3',
    'BEiT, BEiTv2': 'beitv2_base_patch16_224',
    'EVA-02, EVA-CLIP': 'eva02_small_patch14_224',
    'Perception Encoder': 'vit_pe_spatial_base_patch16_512',
    'ViT with RoPE': 'vit_base_patch16_rope_224',
    'ViT with relative positions': 'vit_relpos_small_patch16_224',
    'ViT with post-norms': 'vit_base_patch16_rpn_224',
    'ViT with several attentions side by side': 'vit_small_patch16_18x2_224',
    'ViT with differential attention': 'vit_dlittle_patch16_reg1_gap_256',
    'Sapiens-2': 'vit_base_patch16_sapiens2',
    'LingBot': 'vit_base_patch16_lingbot',
    'Qwen3-VL': 'qwen3_vit_88m',
    'SAM': 'samvit_base_patch16',
    'Swin': 'swin_tiny_patch4_window7_224',
    'SwinV2': 'swinv2_tiny_window8_256',
    'SwinV2-CR': 'swinv2_cr_tiny_224',
    'ViT with attention and MLP in one': 'vit_base_patch16_xp_224',
    'DeepSeek-OCR': 'deepseek_vit_412m',
    'Gemma 4': 'gemma4_vit_167m',
    'MLP-Mixer': 'mixer_s16_224',
    'ResMLP': 'resmlp_12_224',
    'gMLP': 'gmlp_s16_224',
    'XCiT': 'xcit_tiny_12_p16_224',
    'CaiT': 'cait_xxs24_224',
    'ConvMixer': 'convmixer_768_32',
}
REFUSED = ('hiera_tiny_224', 'convit_tiny', 'davit_tiny', 'crossvit_tiny_240', 'tnt_s_legacy_patch16_224', 'resnet50')
# of models without classes: what is converted, and the size of its images in pixels
WITHOUT_CLASSES = {
    'vit_small_patch14_dinov2': 224, 'vit_base_patch14_dinov2': 224, 'vit_large_patch14_dinov2': 224,
    'vit_base_patch16_clip_224': 224, 'vit_base_patch16_siglip_224': 224, 'vit_so400m_patch14_siglip_224': 224,
}
METHODS_OF = {'all methods': 'all', 'unsplit methods': 'unsplit'}


def rows(heads, lines):
    """A table in Markdown."""
    return '\n'.join([f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads),
                      *(f"| {' | '.join(line)} |" for line in lines)]) + '\n'


def settings(kind):
    about = kind.about()
    return rows(['setting', 'default', 'what it is'], [
        [f'`{f.name}`', '-' if f.default is MISSING else f'`{f.default!r}`', about[f.name].replace('|', '\\|')]
        for f in fields(kind)])


def recipes():
    def about(name):
        lines = (FOLDER / f'{name}.yaml').read_text().splitlines()
        return ' '.join(line.removeprefix('# ') for line in lines if line.startswith('# '))
    return rows(['recipe', 'what it does'], [[f'`{name}`', about(name)] for name in builtin_recipes()])


def methods():
    return rows(['method', 'order', 'evaluations per step', 'attention and MLP'], [
        [f'`{name}`', str(method.order), str(method.evaluations), 'in turn' if method.splits else 'at once']
        for name, method in METHODS.items()])


def parts():
    return rows(['part', 'names of its parameters begin with or, from a dot, contain'], [
        [f'`{name}`', ', '.join(f'`{text}`' for text in found if text) or 'anything'] for name, found in PARTS.items()])


def built(name, **kwargs):
    with on_meta():
        return timm.create_model(name, **kwargs)


def families():
    lines = []
    for family, name in FAMILIES.items():
        good, text = convertibility(built(name))
        assert good, f'{name}: {text}'
        field, of, least = text.split('; ')
        lines.append([family, f'`{name}`', field, METHODS_OF[of], least.split()[2]])
    return rows(['family', 'tried as', 'fields', 'methods', 'fewest shared blocks'], lines)


def refused():
    lines = []
    for name in REFUSED:
        good, text = convertibility(built(name))
        assert not good, name
        lines.append([f'`{name}`', text.split(': ', 1)[1].split('. See')[0]])
    return rows(['model', 'why it is refused'], lines)


def registered():
    lines = []
    for name in timm.list_models('odevit_*'):
        if name == 'odevit_converted':
            continue
        model, tags = built(name), timm.list_pretrained(f'{name}.*')
        config = model.blocks.config
        size, patch = (getattr(model.patch_embed, key)[0] for key in ('img_size', 'patch_size'))
        lines.append([f'`{name}`', str(model.embed_dim), f'{size}, {patch}', f'`{config.field}`',
                      f'{config.steps} on [0, {config.T:g}]', f'{count_parameters(model.blocks) / 1e6:.2f} M',
                      ', '.join(f"`{tag.partition('.')[2]}`" for tag in tags) or '-'])
    return rows(['architecture', 'width', 'image, patch (px)', 'field', 'K', 'parameters of the blocks',
                 'published weights'], lines)


def sizes():
    lines = []
    for name, size in WITHOUT_CLASSES.items():
        model = built(name, img_size=size)
        one, whole = predict_parameters(model, OdeConfig()), count_parameters(model)
        quarter = choose_size(model, 0.25)
        lines.append([f'`{name}`', f'{whole / 1e6:.1f} M', f'{one / 1e6:.1f} M ({100 * one / whole:.1f} %)',
                      f'{quarter.phases} shared blocks', f'{4 * whole / 1e6:.0f} MB',
                      f'{4 * predict_parameters(model, quarter) / 1e6:.0f} MB'])
    return rows(['model', 'parameters', 'one shared block', 'a quarter of the blocks', 'file', 'file of the quarter'],
                lines)


TABLES = {
    **{f'settings of {kind.__name__}': (SETTINGS, partial(settings, kind)) for kind in (
        OdeConfig, LossConfig, FitConfig, DataConfig, Recipe, Stage)},
    'recipes': (SETTINGS, recipes), 'parts': (SETTINGS, parts), 'methods': (SETTINGS, methods),
    'families': (MODELS, families), 'refused': (MODELS, refused), 'registered': (MODELS, registered),
    'sizes': (EMBEDDINGS, sizes),
}


def put(tables=TABLES, script='examples/generate.py'):
    for name, (path, make) in tables.items():
        if '--write' not in sys.argv:
            print(make())
            continue
        marks = re.compile(rf'(<!-- {name}: python {script} -->\n).*?(<!-- end -->)', re.S)
        text, count = marks.subn(lambda found, make=make: found[1] + make() + found[2], path.read_text())
        if not count:
            raise SystemExit(f'{path.name} has no place for the table {name}: {marks.pattern}')
        path.write_text(text)


if __name__ == '__main__':
    put()
