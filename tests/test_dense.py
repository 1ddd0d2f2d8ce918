"""Dense features."""
from functools import partial

import pytest
import timm
import torch
from conftest import reloaded

from timm_odevit import convert_


def build(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('odevit_tiny', img_size=16, patch_size=4, embed_dim=32, num_heads=2, **kwargs).eval()


@pytest.mark.parametrize('steps, indices', [(4, (0, 1, 3)), (6, (1, 2, 5)), (12, (2, 5, 11))])
def test_maps_are_the_states_after_some_steps(images, steps, indices):
    plain, maps = build(ode_steps=steps), build(ode_steps=steps, features_only=True, out_indices=indices)
    expected = plain.forward_intermediates(images, indices=indices, intermediates_only=True)
    found = maps(images)
    assert all(f.shape == (2, 32, 4, 4) for f in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert maps.feature_info.channels() == [32] * 3 and maps.feature_info.reduction() == [4] * 3


def test_kept_blocks_count_and_a_saved_model_gives_them(tmp_path, images):
    model = convert_(timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2).eval(), blocks=(3, 8)).model
    maps = reloaded(model, tmp_path / 'model', features_only=True, out_indices=(5, 8))
    expected = model.forward_intermediates(images, indices=(5, 8), intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(maps(images), expected, strict=True))


def test_a_student_has_as_many_maps_as_its_base(tmp_path):
    build = partial(timm.create_model, 'swin_tiny_patch4_window7_224', img_size=32, patch_size=2, embed_dim=8, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), window_size=2)
    base, again = build(features_only=True), reloaded(convert_(build()).model, tmp_path / 'model', features_only=True)
    for maps in (again, timm.create_model('odevit_converted', base=build.args[0], **build.keywords, features_only=True)):
        assert maps.feature_info.reduction() == base.feature_info.reduction()
        assert maps.feature_info.channels() == base.feature_info.channels()
    with pytest.raises(ValueError, match="These weights are of other shared blocks.*change a Swin's image size after"):
        timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, img_size=16)
