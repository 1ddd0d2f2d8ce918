"""Image towers of open_clip and transformers as timm's, and back in their programs."""
import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import reloaded, snapshot
from torch import nn

from timm_odevit import (
    calibrate_,
    convert_,
    from_open_clip,
    from_transformers,
    put_tower_,
)

open_clip = pytest.importorskip('open_clip', reason='open_clip is not installed: pip install open_clip_torch')
transformers = pytest.importorskip('transformers', reason='transformers is not installed')

CLOSE = dict(rtol=0, atol=1e-5)
VISION = dict(layers=3, width=64, head_width=16, patch_size=8, image_size=32)
TEXT = dict(context_length=16, vocab_size=49408, width=32, heads=2, layers=2)
HF = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8)
HF_TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)


def shaken(model):
    """No parameter left at zero or one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def clip(quick_gelu=False, **vision):
    return shaken(open_clip.CLIP(32, {**VISION, **vision}, TEXT, quick_gelu=quick_gelu))


def hf_clip(**vision):
    config = transformers.CLIPConfig(vision_config={**HF, **vision}, text_config=HF_TEXT, projection_dim=24)
    return shaken(transformers.CLIPModel(config))


def hf_siglip(**vision):
    text = {**HF_TEXT, 'projection_size': 32}
    return shaken(transformers.SiglipModel(transformers.SiglipConfig(vision_config={**HF, **vision}, text_config=text)))


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


BLOCK, LAYER = 'visual.transformer.resblocks.1.', 'vision_model.encoder.layers.1.'


def changed(model, name, value):
    owner, _, key = name.rpartition('.')
    setattr(model.get_submodule(owner), key, value)
    return model


def embedding_of(model, images):
    with torch.no_grad():
        if hasattr(model, 'encode_image'):
            return model.encode_image(images)
        out = model.get_image_features(images)
        return out if isinstance(out, torch.Tensor) else out.pooler_output


PROGRAMS = {
    'open_clip': (clip, from_open_clip),
    'open_clip-quickgelu': (lambda: clip(quick_gelu=True), from_open_clip),
    'open_clip-tanh': (lambda: clip(act_kwargs={'approximate': 'tanh'}), from_open_clip),
    'open_clip-average': (lambda: clip(pool_type='avg'), from_open_clip),
    'open_clip-norm-after-average': (lambda: clip(pool_type='avg', final_ln_after_pool=True), from_open_clip),
    'open_clip-no-first-norm': (lambda: clip(no_ln_pre=True), from_open_clip),
    'open_clip-layer-scale': (lambda: clip(ls_init_value=0.1), from_open_clip),
    'open_clip-sincos': (lambda: clip(pos_embed_type='sin_cos_2d'), from_open_clip),
    'open_clip-wide': (lambda: clip(image_size=(32, 48), mlp_ratio=3.7), from_open_clip),
    'open_clip-patch-dropout': (lambda: clip(patch_dropout=0.5), from_open_clip),
    'transformers-clip': (hf_clip, from_transformers),
    'open_clip-no-bias': (lambda: changed(clip(), BLOCK + 'attn', nn.MultiheadAttention(64, 4, bias=False, batch_first=True)), from_open_clip),
    'transformers-clip-gelu': (lambda: hf_clip(hidden_act='gelu', intermediate_size=77), from_transformers),
    'transformers-clip-relu': (lambda: hf_clip(hidden_act='relu'), from_transformers),
    'transformers-siglip': (hf_siglip, from_transformers),
}
three = pytest.mark.parametrize('build, map_', [PROGRAMS[name] for name in ('open_clip', 'transformers-clip', 'transformers-siglip')],
                                ids=['open_clip', 'clip', 'siglip'])


@pytest.mark.parametrize('build, map_', PROGRAMS.values(), ids=PROGRAMS)
def test_the_same_embedding_and_gradients_saved_reloaded_and_put_back(build, map_, tmp_path):
    program = build()
    before = snapshot(program)
    tower = map_(program)
    assert snapshot(program) == before
    assert not {p.data_ptr() for p in tower.parameters()} & {p.data_ptr() for p in program.parameters()}
    images = torch.randn(2, *tower.pretrained_cfg['input_size'])
    expected = embedding_of(program, images)
    assert expected.std() > 0.1
    torch.testing.assert_close(tower(images), expected, **CLOSE)
    # the projection has no bias in its program, so the gradient by the images shows every parameter's use
    a = images.clone().requires_grad_()
    tower(a).square().sum().backward()
    assert a.grad.abs().max() > 0
    again = reloaded(tower, tmp_path / 'tower')
    assert torch.equal(again(images), tower(images))
    put = put_tower_(program, again)
    torch.testing.assert_close(embedding_of(program, images), expected, **CLOSE)
    put.restore()
    with pytest.raises(ValueError, match='no longer holds this tower'):
        put.restore()
    assert snapshot(program) == before
    assert torch.equal(embedding_of(program, images), expected)


@three
def test_converted_calibrated_saved_reloaded_and_put_back(build, map_, tmp_path):
    program = build()
    tower = map_(program)
    images = torch.randn(8, 3, 32, 32)
    teacher = copy.deepcopy(tower)
    convert_(tower, phases=2)
    put_tower_(program, tower)  # it is used as it is, so that it may learn in its program
    first = F.cosine_similarity(embedding_of(program, images), teacher(images)).mean()
    calibrate_(tower, teacher, images, epochs=40, batch_size=4, progress=False)
    assert F.cosine_similarity(embedding_of(program, images), teacher(images)).mean() > first
    assert torch.equal(reloaded(tower, tmp_path / 'student')(images), tower(images))


def test_what_a_tower_of_transformers_gives_beside_the_embedding(images):
    for program in (hf_clip(), hf_siglip()):
        with torch.no_grad():
            expected = program.vision_model(images)
            put_tower_(program, from_transformers(program))
            found = program.vision_model(pixel_values=images)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-4)
            torch.testing.assert_close(found.pooler_output, expected.pooler_output, **CLOSE)
            ids = torch.randint(0, 99, (3, 7))
            assert program(input_ids=ids, pixel_values=images).logits_per_image.shape == (2, 3)
            program.gradient_checkpointing_enable()
            assert program.vision_model.tower.grad_checkpointing and program.vision_model.gradient_checkpointing
            program.gradient_checkpointing_disable()
            assert not program.vision_model.tower.grad_checkpointing
            for wrong in ('output_hidden_states', 'output_attentions', 'interpolate_pos_encoding'):
                with pytest.raises(ValueError, match=f'{wrong}=True.*forward_intermediates.*dynamic_img_size=True'):
                    program.vision_model(images, **{wrong: True})


def test_towers_alone_and_with_a_projection(images):
    config = transformers.CLIPVisionConfig(**HF, projection_dim=24)
    for cls in (transformers.CLIPVisionModel, transformers.CLIPVisionModelWithProjection):
        model = shaken(cls(config))
        with torch.no_grad():
            out = model(images)
        expected = out.pooler_output if cls is transformers.CLIPVisionModel else out.image_embeds
        torch.testing.assert_close(from_transformers(model)(images), expected, **CLOSE)
    put_tower_(model, from_transformers(model))
    torch.testing.assert_close(model(images).image_embeds, expected, **CLOSE)
    program = hf_clip()
    expected, projection = embedding_of(program, images), program.visual_projection
    put_tower_(program, from_transformers(program.vision_model))  # without classes, which leaves the projection there
    assert program.visual_projection is projection
    torch.testing.assert_close(embedding_of(program, images), expected, **CLOSE)
    siglip = hf_siglip()
    torch.testing.assert_close(from_transformers(siglip.vision_model)(images), embedding_of(siglip, images), **CLOSE)
    visual = clip().visual
    torch.testing.assert_close(from_open_clip(visual)(images), visual(images), **CLOSE)


def test_towers_of_open_clip_that_are_timms_are_converted_where_they_are(images, tmp_path):
    program = shaken(open_clip.CLIP(24, dict(timm_model_name='vit_tiny_patch16_224', image_size=32, timm_pool='',
                                             timm_proj='linear', timm_model_pretrained=False), TEXT))
    with pytest.raises(TypeError, match=r'use model\.visual\.trunk as it is'):
        from_open_clip(program)
    images = torch.randn(2, 3, 224, 224)
    trunk, expected = program.visual.trunk, embedding_of(program, images)
    exact = convert_(trunk, phases=12)
    torch.testing.assert_close(embedding_of(program, images), expected, **CLOSE)
    again = reloaded(trunk, tmp_path / 'trunk')
    exact.restore()
    program.visual.trunk = again
    torch.testing.assert_close(embedding_of(program, images), expected, **CLOSE)


def test_requires_grad_carries_over_also_without_gradients():
    program = hf_clip().half().to('meta').requires_grad_(False)
    program.vision_model.encoder.layers[1].self_attn.requires_grad_(True)
    with torch.no_grad():
        tower = from_transformers(program)
    assert {(p.device.type, p.dtype) for p in tower.parameters()} == {('meta', torch.float16)}
    assert {n for n, p in tower.named_parameters() if p.requires_grad} == {
        f'blocks.1.attn.{n}' for n in ('qkv.weight', 'qkv.bias', 'proj.weight', 'proj.bias')}


def test_preprocessing_is_that_of_open_clip():
    program = clip()
    assert from_open_clip(program).pretrained_cfg['mean'] == open_clip.OPENAI_DATASET_MEAN
    open_clip.factory.set_model_preprocess_cfg(program, dict(
        mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5), interpolation='bilinear', resize_mode='squash', size=32))
    cfg = from_open_clip(program).pretrained_cfg
    assert (cfg['mean'], cfg['interpolation'], cfg['crop_mode']) == ((0.1, 0.2, 0.3), 'bilinear', 'squash')
    put_tower_(program, from_open_clip(program))
    assert program.visual.preprocess_cfg['resize_mode'] == 'squash' and tuple(program.visual.image_size) == (32, 32)


OTHER = "its output for a random image differs from timm's"


@pytest.mark.parametrize('build, map_, error, message', [
    *((build, from_open_clip, ValueError, 'it must have a projection .* and pool by its class token') for build in (
        lambda: clip(attentional_pool=True), lambda: changed(clip(), 'visual.proj', None), lambda: clip(pool_type='none'))),
    (lambda: changed(clip(), BLOCK + 'mlp.gelu', nn.ReLU()), from_open_clip, ValueError, OTHER),
    (lambda: changed(changed(clip(), BLOCK + 'attn.num_heads', 2), BLOCK + 'attn.head_dim', 32), from_open_clip, ValueError, OTHER),
    (lambda: clip(qk_norm=True), from_open_clip, ValueError, r'Unexpected key.*blocks\.0\.attn\.(ln_|norm)q\.weight'),
    (lambda: changed(clip(), 'visual.adapter', nn.Linear(4, 4)), from_open_clip, ValueError, 'Unexpected key.*adapter.weight'),
    (lambda: changed(clip(), 'visual.ln_post.eps', 0.1), from_open_clip, ValueError, OTHER),
    (lambda: open_clip.CLIP(32, dict(layers=(1, 1, 1, 1), width=8, head_width=8, image_size=32), TEXT),
     from_open_clip, TypeError, "expected open_clip's own VisionTransformer"),
    (lambda: nn.Linear(2, 2), from_open_clip, TypeError, 'from_open_clip got a .*Linear'),
    (lambda: nn.Linear(2, 2), from_transformers, TypeError, 'expected CLIPModel, SiglipModel'),
    (lambda: hf_siglip(vision_use_head=False), from_transformers, ValueError, 'no pooling head'),
    (lambda: changed(hf_siglip(), LAYER + 'mlp.activation_fn', nn.Tanh()), from_transformers, ValueError, OTHER),
    (lambda: changed(hf_clip(), LAYER + 'self_attn.k_proj', nn.Linear(32, 32, bias=False)), from_transformers, ValueError,
     r'Unexpected key.*blocks\.1\.attn\.[qv]_proj\.bias'),
])
def test_what_timm_lacks_is_refused(build, map_, error, message):
    program = build()
    before = snapshot(program)
    with pytest.raises(error, match=message):
        map_(program)
    assert snapshot(program) == before


def test_a_program_with_a_tower_is_copied_and_saved_by_its_own_means(images, tmp_path):
    for program in (hf_clip(), hf_siglip()):
        put_tower_(program, from_transformers(program))
        expected = embedding_of(program, images)
        names = [name for name, _ in program.named_parameters()]
        assert len(set(names)) == len(names) == len(list(program.parameters()))
        program.save_pretrained(tmp_path / 'saved')
        assert torch.equal(embedding_of(copy.deepcopy(program), images), expected)
        with torch.no_grad():
            program.vision_model.tower.norm.weight.mul_(2)
        assert not torch.equal(embedding_of(program, images), expected)


def test_a_tower_that_does_not_fit_is_not_put_in(images):
    other = timm.create_model('vit_tiny_patch16_224', img_size=32, num_classes=7)
    for program in (clip(), hf_clip(), hf_siglip()):
        expected, names = embedding_of(program, images), list(program.state_dict())
        with pytest.raises(ValueError, match='embeddings of width 7; this model needs 32'):
            put_tower_(program, other)
        assert torch.equal(embedding_of(program, images), expected) and list(program.state_dict()) == names
    with pytest.raises(ValueError, match='embeddings of width 1024; this model needs 32'):
        put_tower_(clip(), timm.create_model('mobilenetv3_small_050', num_classes=0))
    with_tokens = changed(clip(), 'visual.output_tokens', True)
    with pytest.raises(TypeError, match='put_tower_ got a .*Linear; expected a timm model'):
        put_tower_(clip(), nn.Linear(32, 32))
    for program in (other, with_tokens):
        with pytest.raises(TypeError, match='put_tower_ got a .*gives no patch tokens'):
            put_tower_(program, other)


@pytest.mark.parametrize('how', [dict(method='dopri5'), dict(tokens=0.5)], ids=str)
@three
def test_a_tower_computes_in_its_program_what_it_computes_alone(build, map_, how, images):
    program = build()
    tower = convert_(map_(program), **how).model
    with torch.no_grad():
        alone = tower.eval()(images)
        put_tower_(program, tower)
        torch.testing.assert_close(embedding_of(program, images), alone, **CLOSE)


@pytest.mark.parametrize('name', ['swin_tiny_patch4_window7_224', 'resnet18', 'vit_tiny_patch16_224'])
def test_towers_of_other_kinds_give_their_embeddings(name):
    sizes = dict(img_size=32, class_token=False, global_pool='avg') if name.startswith('vit') else {}
    tower = shaken(timm.create_model(name, num_classes=24, **sizes))
    program, images = hf_clip(), torch.randn(1, 3, *[32 if sizes else 224] * 2)
    with torch.no_grad():
        alone = tower(images)
        put_tower_(program, tower)
        torch.testing.assert_close(embedding_of(program, images) / alone.abs().max(), alone / alone.abs().max(), **CLOSE)
        assert isinstance(program.vision_model(images, return_dict=False), tuple)


@pytest.mark.parametrize('projection', ['linear', 'mlp'])
def test_the_projection_of_a_timm_tower_of_open_clip_stays(projection):
    program = open_clip.CustomTextCLIP(192, dict(
        timm_model_name='vit_tiny_patch16_224', image_size=224, timm_pool='', timm_proj=projection,
        timm_model_pretrained=False), TEXT).eval()
    images = torch.randn(1, 3, 224, 224)
    expected = embedding_of(program, images)
    put = put_tower_(program, copy.deepcopy(program.visual.trunk))
    torch.testing.assert_close(embedding_of(program, images), expected, **CLOSE)
    put.restore()
    with pytest.raises(ValueError, match='width 384; this model needs 192'):
        put_tower_(program, timm.create_model('vit_small_patch16_224', num_classes=0))
    put_tower_(program, timm.create_model('vit_tiny_patch16_224', num_classes=192))


def test_a_program_in_half_precision_whose_norms_are_not(images):
    program = shaken(open_clip.CLIP(32, VISION, TEXT, cast_dtype=torch.float16))
    open_clip.model.convert_weights_to_lp(program, torch.float16)
    with torch.no_grad():
        expected = program.encode_image(images.half())
        tower = from_open_clip(program)
        torch.testing.assert_close(tower(images.half()), expected, rtol=0, atol=1e-2)
        put_tower_(program, tower).restore()
        assert torch.equal(program.encode_image(images.half()), expected)


@pytest.mark.parametrize('build, map_', [PROGRAMS['open_clip'], PROGRAMS['transformers-clip']], ids=['open_clip', 'clip'])
def test_restored_after_the_program_was_moved(build, map_, images):
    program = build()
    put = put_tower_(program, map_(program))
    program.double()
    expected = embedding_of(program, images.double())
    put.restore()
    assert {tensor.dtype for tensor in program.state_dict().values() if tensor.is_floating_point()} == {torch.float64}
    torch.testing.assert_close(embedding_of(program, images.double()), expected, rtol=0, atol=1e-5)
    again = put_tower_(program, map_(program))
    program.to('meta')
    again.restore()
    assert all(tensor.is_meta for tensor in program.state_dict().values())
