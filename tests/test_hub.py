import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

from timm_odevit import OdeConfig, convert_, save_pretrained
from timm_odevit.hub import describe

TINY = dict(img_size=16, patch_size=4, embed_dim=32, num_heads=2, num_classes=5)


def load(folder, **kwargs):
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs).eval()


@pytest.mark.parametrize('name', ['odevit_tiny', 'odevit_small_patch14_reg4'])
def test_a_named_model_keeps_its_name_and_its_settings_of_the_moment(images, tmp_path, name):
    model = timm.create_model(name, **TINY, ode_steps=5, mlp_ratio=2).eval()
    model.blocks.steps, model.blocks.method = 7, 'midpoint'
    save_pretrained(model, tmp_path / 'a')
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    assert config['architecture'] == name
    assert config['model_args']['img_size'] == [16, 16] and config['model_args']['ode_steps'] == 7
    again = load(tmp_path / 'a')
    assert again.blocks.config == model.blocks.config
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize('config', [
    OdeConfig(init='block:2'), OdeConfig(field='lipschitz', method='dopri5', steps=1, T=2.5), OdeConfig(init='spectral')],
    ids=lambda c: c.init)
def test_every_setting_survives(vit, images, tmp_path, config):
    model = vit(act_layer='relu', norm_layer='layernorm', qk_norm=True, global_pool='avg')
    convert_(model, config)
    save_pretrained(model, tmp_path / 'a')
    again = load(tmp_path / 'a')
    assert again.blocks.config == model.blocks.config
    assert torch.equal(again(images), model(images))
    save_pretrained(again, tmp_path / 'b')
    for name in ('config.json', 'model.safetensors'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


def test_other_classes_and_another_image_size(vit, tmp_path):
    model = vit()
    convert_(model)
    save_pretrained(model, tmp_path / 'a')
    again = load(tmp_path / 'a', num_classes=3, img_size=32)
    assert again(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    shared = {k: v for k, v in model.state_dict().items() if k.startswith('blocks')}
    assert shared and all(torch.equal(again.state_dict()[k], v) for k, v in shared.items())
    twice = load(tmp_path / 'a', img_size=32)
    assert torch.equal(twice.head.weight, model.head.weight)
    assert twice.pos_embed.shape[1] == 65


def test_checkpoint_path(vit, images, tmp_path):
    model = timm.create_model('odevit_tiny', **TINY).eval()
    save_pretrained(model, tmp_path / 'a')
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    for path in (tmp_path / 'a' / 'model.safetensors', tmp_path / 'weights.pth'):
        again = timm.create_model('odevit_tiny', **TINY, checkpoint_path=str(path)).eval()
        assert torch.equal(again(images), model(images))
    overlay = dict(file=str(tmp_path / 'a' / 'model.safetensors'), num_classes=5)
    again = timm.create_model('odevit_tiny', **TINY, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    assert torch.equal(again(images), model(images))


def test_only_safetensors_and_nothing_else_is_left(vit, tmp_path):
    model = vit()
    convert_(model)
    save_pretrained(model, tmp_path / 'a')
    save_pretrained(model, tmp_path / 'a')
    assert sorted(p.name for p in (tmp_path / 'a').iterdir()) == ['config.json', 'model.safetensors']
    assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_a_failure_leaves_the_folder_as_it_was(vit, tmp_path, monkeypatch):
    model = vit()
    convert_(model)
    save_pretrained(model, tmp_path / 'a')
    before = {p.name: p.read_bytes() for p in (tmp_path / 'a').iterdir()}

    def full(*args, **kwargs):
        raise OSError('No space left on device')
    monkeypatch.setattr('timm_odevit.hub.save_for_hf', full)
    with pytest.raises(OSError, match='No space left'):
        save_pretrained(vit(), tmp_path / 'a')
    assert {p.name: p.read_bytes() for p in (tmp_path / 'a').iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ['a']
    (tmp_path / 'file').touch()
    with pytest.raises(ValueError, match='a file of that name exists'):
        save_pretrained(model, tmp_path / 'file')


def test_a_plain_timm_model_is_saved_too(vit, images, tmp_path):
    model = vit()
    save_pretrained(model, tmp_path / 'a')
    assert torch.equal(load(tmp_path / 'a')(images), model(images))


def test_what_cannot_be_described_is_refused_before_anything_is_written(tmp_path):
    model = VisionTransformer(**TINY, depth=3)
    convert_(model)
    with pytest.raises(ValueError, match='was not made by timm.create_model'):
        save_pretrained(model, tmp_path / 'a')
    with pytest.raises(ValueError, match='would not rebuild this model: it has embed_dim = 32, the rebuilt one embed_dim = 192'):
        describe(model, base='vit_tiny_patch16_224', base_args={})
    model = timm.create_model('vit_tiny_patch16_224', **TINY, depth=3)
    for block in model.blocks:
        block.mlp.act = torch.nn.ReLU()
    convert_(model)
    with pytest.raises(ValueError, match=r'blocks.shared.block.mlp.act: ReLU\(\), the rebuilt one .*GELU'):
        save_pretrained(model, tmp_path / 'a')
    assert not list(tmp_path.iterdir())


def test_base_and_base_args_describe_a_model_from_elsewhere(images, tmp_path):
    model = VisionTransformer(**TINY, depth=3).eval()
    convert_(model)
    save_pretrained(model, tmp_path / 'a', base='vit_tiny_patch16_224', base_args=TINY)
    assert torch.equal(load(tmp_path / 'a')(images), model(images))


def test_settings_that_no_shape_shows_are_compared_too(tmp_path):
    model = VisionTransformer(**{**TINY, 'num_heads': 4}, depth=3)
    convert_(model)
    with pytest.raises(ValueError, match='head_dim = 8, the rebuilt one .*head_dim = 16'):
        save_pretrained(model, tmp_path / 'a', base='vit_tiny_patch16_224', base_args=TINY)


def test_a_compiled_model_is_saved_without_its_wrapper(vit, images, tmp_path):
    model = vit()
    convert_(model)
    save_pretrained(torch.compile(model), tmp_path / 'a')
    assert torch.equal(load(tmp_path / 'a')(images), model(images))


def test_channels_last(vit, images, tmp_path):
    model = vit().to(memory_format=torch.channels_last)
    convert_(model)
    save_pretrained(model, tmp_path / 'a')
    torch.testing.assert_close(load(tmp_path / 'a')(images), model(images))


def test_weights_that_do_not_fit_are_refused(vit, tmp_path):
    model = vit()
    convert_(model)
    save_pretrained(model, tmp_path / 'a')
    path = tmp_path / 'a' / 'model.safetensors'
    state = load_file(path)
    state.pop('blocks.shared.block.attn.qkv.weight')
    save_file(state, path)
    with pytest.raises(RuntimeError, match='Missing key'):
        load(tmp_path / 'a')
