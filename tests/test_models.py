import re

import pytest
import timm
import torch

from timm_odevit.ode.blocks import count_parameters, find_ode_blocks

NAMES = timm.list_models('odevit_*')


def meta(name, **kwargs):
    return timm.create_model(name, device='meta', **kwargs)


def test_the_names_are_there():
    wanted = {'odevit_tiny', 'odevit_small', 'odevit_base', 'odevit_large', 'odevit_tiny_patch4_32', 'odevit_converted',
              'odevit_small_patch14_reg4', 'odevit_base_patch14_reg4', 'odevit_large_patch14_reg4',
              'odevit_tiny_patch16_128', 'odevit_tiny_native_patch16_128', 'odevit_tiny_native_three_patch16_128',
              'odevit_tiny_native_patch4_32'}
    assert wanted == set(NAMES)


@pytest.mark.parametrize('name, dim, steps', [
    ('odevit_tiny', 192, 12), ('odevit_small', 384, 12), ('odevit_base', 768, 12), ('odevit_large', 1024, 24)])
def test_settings(name, dim, steps):
    model = meta(name)
    config = model.blocks.config
    assert (config.field, config.method, config.init, config.steps, config.T) == ('lipschitz', 'euler', 'spectral', steps, steps)
    assert model.embed_dim == dim and model.patch_embed.patch_size == (16, 16) and model.patch_embed.img_size == (224, 224)


def test_sizes_are_the_papers_and_others_are_as_named():
    assert count_parameters(meta('odevit_base').blocks) == pytest.approx(7.08e6, rel=1e-3)
    assert count_parameters(meta('odevit_base', mlp_ratio=1).blocks) == pytest.approx(3.54e6, rel=1e-3)
    model = meta('odevit_tiny_patch4_32')
    assert model.patch_embed.grid_size == (8, 8) and model.pretrained_cfg['input_size'] == (3, 32, 32)
    model = meta('odevit_base_patch14_reg4')
    assert model.num_reg_tokens == 4 and model.num_prefix_tokens == 5 and model.no_embed_class
    assert model.patch_embed.patch_size == (14, 14)


@pytest.mark.parametrize('name', NAMES)
def test_every_ode_keyword_on_every_name(name):
    model = meta(name, ode_field='native', ode_method='dopri5', ode_steps=3, ode_T=2, ode_init='mean', ode_rtol=0.1, ode_atol=0.2)
    config = find_ode_blocks(model)[0].config
    assert (config.field, config.method, config.steps, config.T, config.init, config.rtol, config.atol) == (
        'native', 'dopri5', 3, 2., 'mean', 0.1, 0.2)


@pytest.mark.parametrize('name', NAMES)
def test_unknown_keywords_are_type_errors(name):
    with pytest.raises(TypeError, match=re.escape(f"{name} got an unknown argument 'ode_stepz'. Did you mean 'ode_steps'?")):
        meta(name, ode_stepz=3)
    with pytest.raises(TypeError, match='not_an_argument'):
        meta(name, not_an_argument=3)
    with pytest.raises(ValueError, match='Did you mean'):
        meta(name, ode_method='heun')


def test_native_at_random_is_the_bases_own_start():
    model = timm.create_model('odevit_tiny', ode_field='native', ode_init='mean')
    assert model.blocks.shared.block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_depth_sets_steps_and_time_and_drop_path_arrives():
    assert meta('odevit_tiny_native_three_patch16_128', depth=6).blocks.config.T == 6
    model = meta('odevit_tiny', depth=5, drop_path_rate=0.2)
    assert (model.blocks.config.steps, model.blocks.config.T) == (5, 5.)
    assert model.blocks.shared.drop_path.drop_prob == pytest.approx(0.1)


def test_converted_takes_depth_and_preprocessing_from_its_base():
    model = meta('odevit_converted', base='vit_large_patch16_siglip_256')
    assert model.blocks.config.steps == 24
    assert model.pretrained_cfg['input_size'] == (3, 256, 256) and model.pretrained_cfg['mean'] == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="Unknown base 'vit_larg'"):
        meta('odevit_converted', base='vit_larg')
    @timm.models.register_model
    def a_vit_of_my_own(pretrained=False, **kwargs):
        return timm.create_model('vit_tiny_patch16_224', **kwargs)
    assert meta('odevit_converted', base='a_vit_of_my_own').blocks.config.steps == 12
    with pytest.raises(TypeError, match='Cannot convert ResNet|depth'):
        meta('odevit_converted', base='resnet18')


def test_building_allocates_no_block_but_the_shared_one(monkeypatch):
    from timm.models.vision_transformer import Block
    built = []
    init = Block.__init__
    monkeypatch.setattr(Block, '__init__', lambda self, *a, **k: (built.append(torch.empty(0).device.type), init(self, *a, **k))[1])
    timm.create_model('odevit_large', embed_dim=64, num_heads=4)
    assert built.count('cpu') == 1 and set(built) == {'cpu', 'meta'}


@pytest.mark.parametrize('name', ['odevit_tiny', 'odevit_large_patch14_reg4', 'odevit_tiny_native_three_patch16_128', 'odevit_converted'])
def test_trains(name):
    model = timm.create_model(name, embed_dim=32, num_heads=2, num_classes=3, img_size=32, patch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)  # with 1e-3, 24 Euler steps may get stuck
    images, labels = torch.randn(12, 3, 32, 32), torch.arange(12) % 3
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_published_configuration_brings_its_k():
    name = 'odevit_tiny_native_three_patch16_128'
    cfg = timm.get_pretrained_cfg(f'{name}.deit_tiny_k12_cifar100')
    given = {}, dict(pretrained_cfg=cfg), dict(pretrained_cfg=cfg.to_dict()), dict(pretrained_cfg=cfg, ode_steps=6)
    assert [meta(name, **each).blocks.steps for each in given] == [6, 12, 12, 6]
