"""Dense features: maps at given times."""
import copy

import pytest
import timm
import torch

from timm_odevit import convert_, save_pretrained
from timm_odevit.features import FeaturesAtTimes

SMALL = dict(img_size=16, patch_size=4, embed_dim=32, num_heads=2, ode_steps=6)


def build(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('odevit_tiny', **{**SMALL, **kwargs}).eval()


def swin():
    return timm.create_model('swin_tiny_patch4_window7_224', img_size=16, patch_size=2, embed_dim=8, depths=(2, 4),
                             num_heads=(2, 4), window_size=4).eval()


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16)


@pytest.mark.parametrize('steps, indices', [(4, (0, 1, 3)), (6, (1, 2, 5)), (12, (2, 5, 11))])
def test_maps_at_given_times_whatever_the_number_of_steps(images, steps, indices):
    plain = build()
    maps = build(features_only=True, out_times=(0.25, 0.5, 1.0))
    plain.blocks.steps = steps
    expected = plain.forward_intermediates(images, indices=indices, intermediates_only=True)
    maps.model.blocks.steps = steps
    found = maps(images)
    assert all(f.shape == (3, 32, 4, 4) for f in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert maps.feature_info.channels() == [32] * 3 and maps.feature_info.reduction() == [4] * 3


def test_they_are_kept_blocks_aside_saved_and_scaled_to_other_sizes(tmp_path, images):
    model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2).eval()
    convert_(model, blocks=(3, 8))
    save_pretrained(model, tmp_path / 'model')
    maps = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, features_only=True, out_times=(0.5, 1.)).eval()
    expected = model.forward_intermediates(images, indices=(5, 8), intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(maps(images), expected, strict=True))


@pytest.mark.parametrize('kwargs, message', [
    (dict(out_times=(0.5, 0.25)), r'out_times must be strictly increasing relative times, such as \(0.25, 0.5, 1.0\)'),
    (dict(out_times=()), 'out_times must be strictly increasing'),
    (dict(out_times=(0., 1.)), 'out_times must be strictly increasing'),
    (dict(out_times=0.5), 'out_times must be strictly increasing'),
    (dict(out_times=(0.95, 1.)), 'two of them are nearest to the end of one of 6 steps. Give times at least 0.167'),
    (dict(out_times=(0.5,), out_indices=(0,)), 'with it, and no out_indices'),
    (dict(out_times=(0.5,), features_only=False), 'out_times chooses features. Give features_only=True'),
])
def test_bad_times_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**{'features_only': True, **kwargs})


def test_what_timm_says_of_the_maps_holds_for_other_steps(images):
    maps = FeaturesAtTimes(build(), (0.5, 1.), norm=True)
    maps.model.blocks.steps = 2
    assert copy.deepcopy(maps).feature_info.channels() == [x.shape[1] for x in maps(images)]


@pytest.mark.parametrize('name, kwargs', [
    ('swin_tiny_patch4_window7_224', dict(img_size=32, patch_size=2, embed_dim=8, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), window_size=2))])
def test_a_student_has_as_many_maps_as_its_base(tmp_path, name, kwargs):
    base = timm.create_model(name, features_only=True, **kwargs)
    model = timm.create_model(name, **kwargs)
    convert_(model)
    save_pretrained(model, tmp_path / 'model')
    maps = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, features_only=True)
    assert maps.feature_info.reduction() == base.feature_info.reduction()
    assert maps.feature_info.channels() == base.feature_info.channels()


@pytest.mark.parametrize('model', [
    lambda: timm.create_model('vit_tiny_patch16_224'), lambda: convert_(swin()).model])
def test_times_are_of_an_ode_without_stages(model):
    with pytest.raises(ValueError, match='out_times needs an ODE-ViT without stages; got a '):
        FeaturesAtTimes(model(), (0.5, 1.))
