"""Weights in 4 bits: rounded, saved and loaded."""
import copy
from threading import Thread
from time import sleep

import pytest
import timm
import torch
from conftest import snapshot

from timm_odevit import convert_, quantize_, save_pretrained
from timm_odevit.quantization import in_groups, is_rounded, packed, unpacked


def to_nearest(model, bits=4):
    """A copy with its matrices rounded."""
    model = copy.deepcopy(model)
    for p in filter(is_rounded, model.parameters()):
        p.data = in_groups(p, bits).values(p.shape)
    return model


@pytest.mark.parametrize('shape', [(64, 32), (3, 5, 70), (192, 3, 4, 4), (1100, 2)])
@pytest.mark.parametrize('shift', [-1., 0., 30.])
def test_a_rounded_number_is_within_half_a_scale_and_zero_stays_zero(shape, shift):
    weight = torch.randn(shape) + shift
    weight[0] = 0.
    groups = in_groups(weight)
    values = groups.values(shape)
    flat = (values - weight).abs().flatten()
    allowed = groups.scale.float().expand(-1, 32).flatten()[:len(flat)]
    assert (flat <= 0.51 * allowed + 0.002 * weight.abs().flatten()).all() and not values[0].any()
    torch.testing.assert_close(unpacked(packed({'a.weight': weight})), {'a.weight': values}, rtol=0, atol=0)


def test_a_state_dict_takes_four_bits_for_each_number_of_a_matrix():
    state = {'a.weight': torch.randn(256, 96), 'a.bias': torch.randn(256), 'count': torch.tensor(3), 'b': torch.zeros(8, 8)}
    small = packed(state)
    assert sum(t.nbytes for t in small.values()) < 256 * 96 * 4.7 / 8 + 2 * 256 + 2 * 64 + 8
    again = unpacked(small)
    assert again.keys() == state.keys() and again['count'] == 3
    assert packed({'cls_token': torch.randn(1, 1, 1024)}).keys() == {'cls_token'}  # a vector
    assert packed({'b': torch.tensor([1e6])})['b'] == 65504 and packed({'odd': torch.randn(64, 33)}).keys() == {'odd'}  # of 16 bits; of two per byte
    assert unpacked(state) == state  # another one is left as it is


@pytest.mark.parametrize('ode', [dict(steps=4, phases=2), dict(field='lipschitz', method='euler')])
def test_a_folder_of_four_bits_loads_as_the_rounded_model(vit, tmp_path, ode):
    model = convert_(vit(embed_dim=64), **ode).model
    whole, small = (save_pretrained(model, tmp_path / name, bits=bits) for name, bits in (('whole', None), ('small', 4)))
    sizes = [(folder / 'model.safetensors').stat().st_size for folder in (whole, small)]
    assert sizes[1] < sizes[0] / 5
    images = torch.randn(2, 3, 16, 16)
    again = timm.create_model(f'local-dir:{small}', pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images), to_nearest(model)(images), atol=2e-3, rtol=0)  # vectors have 16 bits
    larger = timm.create_model(f'local-dir:{small}', pretrained=True, img_size=32).eval()
    assert larger(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_model_that_timm_itself_would_load_is_refused(vit, tmp_path):
    with pytest.raises(ValueError, match=r'does not unpack 4 bits. convert_\(model, phases=depth\)'):
        save_pretrained(vit(), tmp_path / 'a', bits=4)
    with pytest.raises(ValueError, match='bits=5 is not offered'):
        save_pretrained(vit(), tmp_path / 'a', bits=5)
    assert not (tmp_path / 'a').exists()


@pytest.mark.parametrize('bits', [8, 4])
def test_rounding_for_images_is_better_on_them_and_stored_as_it_is(vit, tmp_path, bits):
    model, images = convert_(vit(embed_dim=64), steps=4, phases=2).model, torch.randn(64, 3, 16, 16)
    with torch.no_grad():
        whole = model(images)
        nearest = (to_nearest(model, bits)(images) - whole).norm()
        quantize_(model.train(), images, bits)
        assert model.training and (model.eval()(images) - whole).norm() < 0.7 * nearest
    again = timm.create_model(f"local-dir:{save_pretrained(model, tmp_path / 'a', bits=4)}", pretrained=True)
    assert bits == 8 or all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True) if is_rounded(p) and p.ndim == 2)


@pytest.mark.parametrize('how', ['compiled', 'autocast'])
def test_rounding_for_images_is_the_same(vit, how):
    model, images = vit(embed_dim=64), torch.randn(4, 3, 16, 16)
    quantize_(other := copy.deepcopy(model), images)
    with torch.autocast('cpu', torch.bfloat16, enabled=how == 'autocast'):
        if how == 'compiled':
            model.compile(backend='aot_eager')
            model(images)
        quantize_(model, images)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_two_threads_leave_the_compiler_as_it_was(vit):
    models, images = [vit(embed_dim=64) for _ in range(2)], torch.randn(2, 3, 16, 16)
    later = Thread(target=quantize_, args=(models[1], images))
    models[1].register_forward_pre_hook(lambda *_: sleep(0.4))
    def begin(*_):  # the second begins while the first runs, and ends after it
        later.start()
        sleep(0.2)
    models[0].register_forward_pre_hook(begin)
    quantize_(models[0], images)
    later.join()
    assert torch._dynamo.eval_frame._stance.stance == 'default'


def test_images_that_do_not_fit_leave_a_model_as_it_is(vit):
    before = snapshot(model := vit(embed_dim=64))
    for given, bits, said in ((torch.full((2, 3, 16, 16), torch.nan), 4, 'must be finite'), ('photos', 4, 'got str'), (torch.full((2, 3, 16, 16), 1e30), 4, 'not finite'), (torch.ones(2, 3, 16, 16), 9, 'Give 2 to 8 bits; got 9')):
        with pytest.raises(ValueError, match=said):
            quantize_(model, given, bits)
    assert snapshot(model) == before and not any(module._forward_pre_hooks for module in model.modules())
