"""A config.json from a stranger: refused with a message, whatever it says, and nothing is built, read or run."""
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import build_model_with_cfg

from timm_odevit import convert_, save_pretrained


@pytest.fixture
def saved(vit, tmp_path):
    return save_pretrained(convert_(vit()).model, tmp_path / 'model')


def change(folder, part, entries):
    path = folder / 'config.json'
    config = json.loads(path.read_text())
    (config if part is None else config[part]).update(entries)
    path.write_text(json.dumps(config))


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


BASE_ARGS = dict(patch_size=4, embed_dim=32, num_heads=2, depth=3)
CASES = {
    'an unknown keyword': ('model_args', {'code': 'import os'}, 'unexpected keyword argument'),
    'an unknown ode keyword': ('model_args', {'ode_code': 'import os'}, "unknown argument 'ode_code'"),
    'an unknown entry of the cfg': ('pretrained_cfg', {'code': 'import os'}, "unexpected keyword argument 'code'"),
    'a file elsewhere': ('pretrained_cfg', {'url': 'file:///etc/passwd'}, "'url' .*only the caller"),
    'a state dict': ('pretrained_cfg', {'state_dict': {'a': 1}}, "'state_dict' .*only the caller"),
    'a checkpoint': ('model_args', {'checkpoint_path': '/etc/passwd'}, "'checkpoint_path' .*only the caller"),
    'an overlay': ('model_args', {'base_args': {**BASE_ARGS, 'pretrained_cfg_overlay': {'file': 'x'}}}, "'pretrained_cfg_overlay' .*only the"),
    'a base on the Hub': ('model_args', {'base': 'hf-hub:evil/model'}, "Unknown base 'hf-hub:evil/model'"),
    'a base that is no transformer': ('model_args', {'base': 'resnet18', 'base_args': {}}, 'cannot be built from'),
    'itself as a base': ('model_args', {'base': 'odevit_converted'}, "Unknown base 'odevit_converted'"),
    'width 10 ** 12': ('model_args', {'base_args': {**BASE_ARGS, 'embed_dim': 10 ** 12}}, "'embed_dim' 1000000000000: numbers"),
    'width 98,304': ('model_args', {'base_args': {**BASE_ARGS, 'embed_dim': 98304}}, 'numbers in its tensors'),
    'a negative width': ('model_args', {'base_args': {**BASE_ARGS, 'embed_dim': -32}}, 'cannot be built from'),
    'depth 10 ** 6': ('model_args', {'base_args': {**BASE_ARGS, 'depth': 10 ** 6}}, "'depth' 1000000: numbers from 0 to 256"),
    'thousands of layers in stages': (
        'model_args', {'base': 'swin_tiny_patch4_window7_224', 'base_args': {'depths': [1024] * 4}}, "'depths' 1024"),
    'a million steps': ('model_args', {'ode_steps': 10 ** 6}, "'ode_steps' 1000000"),
    'endless time': ('model_args', {'ode_T': float('inf')}, "'ode_T' inf"),
    'no number of classes': (None, {'num_classes': 'ten'}, 'cannot be built from'),
    'a layer by name': ('model_args', {'base_args': {**BASE_ARGS, 'act_layer': 'os.system'}}, 'cannot be built from'),
    'a long list': ('model_args', {'ode_steps': [1] * 10 ** 5}, "'ode_steps' .*too long"),
    'a long keyword': ('model_args', {'x' * 10 ** 6: 1}, 'cannot be built from'),
    'a mean of nothing': ('pretrained_cfg', {'mean': [float('nan')] * 3}, "'mean' nan"),
    'a crop of nothing': ('pretrained_cfg', {'test_crop_pct': 1e-12}, "'test_crop_pct' 1e-12: numbers from 0.1 to 2"),
    'a licence of lists': ('pretrained_cfg', {'license': deep(400)}, r"'license' \[+\.\.\.: it is too long or too deep"),
    'lists in lists in a keyword': ('model_args', {'base_args': {**BASE_ARGS, 'img_size': deep(400)}}, "'img_size' .*too deep"),
    'a label that clears the screen': (None, {'label_names': ['\x1b[2J', 'a']}, r"'label_names' '\\x1b\[2J': it cannot be printed"),
    'a keyword that clears the screen': ('model_args', {'\x1b[2J': 1}, r"'\\x1b\[2J' 1: it cannot be printed"),
}


@pytest.mark.parametrize('case', CASES, ids=str)
@pytest.mark.parametrize('pretrained', [True, False])
def test_refused(saved, tmp_path, case, pretrained):
    part, entries, message = CASES[case]
    change(saved, part, entries)
    before = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    with pytest.raises((ValueError, TypeError), match=message) as e:
        timm.create_model(f'local-dir:{saved}', pretrained=pretrained)
    assert len(str(e.value)) < 1000
    assert {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()} == before


# sizes that are no larger than those of models that exist, and none of these weights
@pytest.mark.parametrize('larger', [
    {'base_args': {**BASE_ARGS, 'embed_dim': 8192, 'num_heads': 8}}, {'num_classes': 5_000_000},
    {'base_args': {**BASE_ARGS, 'reg_tokens': 100_000}}])
def test_a_model_larger_than_its_weights_is_not_built(saved, larger, monkeypatch):
    change(saved, 'model_args', larger)
    made = []
    monkeypatch.setattr('timm_odevit.registry.build_model_with_cfg', lambda *args, build=build_model_with_cfg, **kwargs: (
        made.append(torch.empty(0).device.type), build(*args, **kwargs))[1])
    with pytest.raises(ValueError, match='numbers in its tensors; at most'):
        timm.create_model(f'local-dir:{saved}', pretrained=True)
    assert set(made) == {'meta'}


@pytest.mark.parametrize('name, changed', [('norm.weight', lambda v: v[:3].clone()), ('norms.weight', lambda v: v)])
def test_weights_of_another_model_are_refused(saved, name, changed):
    state = load_file(saved / 'model.safetensors')
    state[name] = changed(state.pop('norm.weight'))
    save_file(state, saved / 'model.safetensors')
    with pytest.raises(RuntimeError, match=r'loading state_dict .*\n.*norm'):
        timm.create_model(f'local-dir:{saved}', pretrained=True)


def test_what_the_caller_says_is_not_the_files(saved):
    for options in (dict(features_only=True, out_indices=[-2, -1]), dict(features_only=True, out_indices=(0, 1)),
                    dict(pretrained_strict=False), dict(device='meta'), dict(drop_path_rate=0.1, device='cpu')):
        assert timm.create_model(f'local-dir:{saved}', pretrained='device' not in options, **options)
    with pytest.raises(TypeError) as e:
        timm.create_model(f'local-dir:{saved}', junk=1)
    assert 'config.json' not in str(e.value)
    assert timm.create_model(f'local-dir:{saved}', pretrained=True, num_classes=7, img_size=32).num_classes == 7
    change(saved, 'model_args', {'num_classes': 5})  # as earlier versions wrote it
    assert timm.create_model(f'local-dir:{saved}', pretrained=True).num_classes == 5


class Evil:
    def __reduce__(self):
        return open, ('/tmp/odevit-evil', 'w')


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pth', 'model.safetensors'])
def test_a_pickle_is_not_read(saved, name, tmp_path):
    (saved / 'model.safetensors').unlink()
    torch.save({'a': Evil()}, saved / name)
    message = 'is not a valid safetensors file' if name == 'model.safetensors' else 'only .safetensors files are read, because a pickle can run code'
    with pytest.raises(ValueError, match=message):
        timm.create_model(f'local-dir:{saved}', pretrained=True)
    assert not Path('/tmp/odevit-evil').exists()


@pytest.mark.parametrize('damage', ['cut', 'empty', 'a header of 2 ** 60 bytes', 'words'])
def test_weights_that_are_not_whole(saved, damage):
    path = saved / 'model.safetensors'
    content = path.read_bytes()
    path.write_bytes({'cut': content[:len(content) // 2], 'empty': b'', 'words': b'<html>not found</html>',
                      'a header of 2 ** 60 bytes': (2 ** 60).to_bytes(8, 'little') + content[8:]}[damage])
    with pytest.raises(ValueError, match=r'is not a valid safetensors file \(.*\)\.$'):
        timm.create_model(f'local-dir:{saved}', pretrained=True)
