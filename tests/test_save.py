import builtins
import io
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from conftest import TINY, reloaded
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from timm_odevit import OdeConfig, convert_, files, save_pretrained
from timm_odevit.ode.fields import FIELDS
from timm_odevit.saving import save
from timm_odevit.saving.save import describe


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
    assert again.blocks.config == model.blocks.config and torch.equal(again(images), model(images))
    save_pretrained(timm.create_model('test_resnet', drop_rate=0.2), tmp_path / 'b')  # which timm leaves out of its arguments


@pytest.mark.parametrize('config', [
    *(OdeConfig(field=field, method='dopri5', steps=1, T=2.5, init='spectral') for field in FIELDS),
    OdeConfig(phases=2, tokens=0.5, halting='entropy', halting_threshold=0.7)], ids=repr)
def test_every_setting_survives(vit, images, tmp_path, config):
    model = convert_(vit(act_layer='relu', norm_layer='layernorm', qk_norm=True), config).model
    again = reloaded(model, tmp_path / 'a')
    assert again.blocks.config == model.blocks.config
    assert torch.equal(again(images), model(images))
    save_pretrained(again, tmp_path / 'b')
    for name in ('config.json', 'model.safetensors'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


def test_how_the_weights_were_loaded_is_not_saved(vit, images, tmp_path):
    model = vit(pretrained_strict=False)
    assert torch.equal(reloaded(model, tmp_path / 'a')(images), model(images))


def test_names_of_classes_are_saved_whatever_the_source_had(vit, tmp_path):
    model, names = vit(), ['a', 'گل\u200cسرخ', 'c\u200dd', 'd\u00a0e', 'e']  # Persian and other joiners
    model.pretrained_cfg['label_names'] = names
    assert model.pretrained_cfg['num_classes'] == 1000  # the source's
    again = reloaded(model, tmp_path / 'a')
    assert again.pretrained_cfg['label_names'] == names and again.pretrained_cfg['num_classes'] == 5
    again.reset_classifier(7)  # whose classes nobody has named
    save_pretrained(again, tmp_path / 'b')
    assert not load(tmp_path / 'b').pretrained_cfg.get('label_names')


def test_other_classes_and_another_image_size(vit, tmp_path):
    model = convert_(vit()).model
    model.of_the_users_own = 'run 1'
    again = reloaded(model, tmp_path / 'a', num_classes=3, img_size=32)
    assert again(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert all(torch.equal(again.state_dict()[k], v) for k, v in model.state_dict().items() if k.startswith('blocks'))
    twice = load(tmp_path / 'a', img_size=32)
    assert torch.equal(twice.head.weight, model.head.weight)
    assert twice.pos_embed.shape[1] == 65
    convert_(of_ours := timm.create_model('deit_tiny_patch16_128', depth=1))
    of_base = timm.create_model('odevit_converted', base='deit_tiny_patch16_128.cifar100')
    for made, folder in ((of_ours, 'b'), (of_base, 'c')):
        assert reloaded(made, tmp_path / folder, img_size=160).pos_embed.shape[1] == 101


def test_checkpoint_path(vit, images, tmp_path):
    model = timm.create_model('odevit_tiny', **TINY).eval()
    save_pretrained(model, tmp_path / 'a')
    path = str(tmp_path / 'a' / 'model.safetensors')
    assert os.stat(path).st_mode == (tmp_path / 'a' / 'config.json').stat().st_mode  # safetensors itself lets only the owner read it
    for options in (dict(checkpoint_path=path), dict(pretrained=True, pretrained_cfg_overlay=dict(file=path, num_classes=5))):
        assert torch.equal(timm.create_model('odevit_tiny', **TINY, **options).eval()(images), model(images))


def test_what_cannot_be_described_is_refused_before_anything_is_written(tmp_path):
    model = convert_(VisionTransformer(**TINY)).model
    with pytest.raises(ValueError, match='was not made by timm.create_model.*Build it with timm.create_model'):
        save_pretrained(model, tmp_path / 'a')
    with pytest.raises(ValueError, match='cannot be saved: it is no timm model, or one of features_only'):
        save_pretrained(timm.create_model('odevit_tiny', **TINY, features_only=True), tmp_path / 'a')
    model = timm.create_model('vit_tiny_patch16_224', **TINY)
    model.embed_dim = 64
    with pytest.raises(ValueError, match='would not rebuild this model: it has embed_dim = 64, the rebuilt one embed_dim = 32'):
        describe(model)
    model = timm.create_model('vit_tiny_patch16_224', **TINY)
    model._model_args['num_heads'] = 4
    with pytest.raises(ValueError, match='head_dim = 16, the rebuilt one .*head_dim = 8'):  # which no shape shows
        save_pretrained(model, tmp_path / 'a')
    model = timm.create_model('vit_tiny_patch16_224', **TINY)
    for block in model.blocks:
        block.mlp.act = torch.nn.ReLU()
    convert_(model)
    with pytest.raises(ValueError, match=r'blocks.shared.block.mlp.act: ReLU\(\), the rebuilt one .*GELU'):
        save_pretrained(model, tmp_path / 'a')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name, value', [
    ('dataset', 'my photos'), ('crop_pct', 0.05), ('label_names', ['a\tb', *'bcde'])])
def test_what_would_not_load_again_is_not_saved(vit, tmp_path, name, value):
    model = vit()
    save_pretrained(model, tmp_path / 'a')
    before = (tmp_path / 'a' / 'config.json').read_bytes()
    model.pretrained_cfg[name] = value
    with pytest.raises(ValueError, match=f'the model would not load again: .*{name}'):
        save_pretrained(model, tmp_path / 'a')
    assert (tmp_path / 'a' / 'config.json').read_bytes() == before


def test_the_licence_is_that_of_the_weights_and_the_size_that_of_the_model(tmp_path):
    dino = timm.create_model('odevit_converted', base='vit_small_patch16_dinov3.lvd1689m', base_args=TINY)
    assert dino.pretrained_cfg['license'] == 'dinov3-license'
    save_pretrained(dino, tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['pretrained_cfg']['input_size'] == [3, 16, 16]  # that of the model


def test_a_new_head_is_saved_whatever_the_keywords_of_the_base_were(images, tmp_path):
    model = timm.create_model('odevit_converted', base='vit_tiny_patch16_224', base_args={**TINY, 'num_classes': 7}).eval()
    model.reset_classifier(5)
    save_pretrained(model, tmp_path / 'a')
    assert torch.equal(load(tmp_path / 'a')(images), model(images))


@pytest.mark.parametrize('change', [
    lambda model: torch.compile(model, backend='eager'), lambda model: model.to(memory_format=torch.channels_last)])
def test_a_compiled_model_and_channels_last_are_saved_without_them(vit, images, tmp_path, change):
    model = convert_(vit()).model
    save_pretrained(change(model), tmp_path / 'a')
    again, state = load(tmp_path / 'a'), model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    torch.testing.assert_close(again(images), model(images))


# --- files are complete or absent

OPERATIONS = [(os, name) for name in ('open', 'replace', 'rename', 'mkdir', 'unlink', 'rmdir', 'fsync')] + [
    (builtins, 'open'), (io, 'open'), (save, 'save_file'), (save, 'save_for_hf')]
PAIR = ['config.json', 'model.safetensors']


def kill_at(monkeypatch, n):
    """From the n-th operation on files on, each raises KeyboardInterrupt, as if the process had been killed."""
    calls = []

    def wrap(original):
        def operation(*args, **kwargs):
            calls.append(1)
            if len(calls) >= n:
                raise KeyboardInterrupt
            return original(*args, **kwargs)
        return operation
    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))


def pair(folder):
    """Steps that config.json says, and a number out of the weights; None without a config.json."""
    if not (folder / 'config.json').is_file():
        return None
    steps = json.loads((folder / 'config.json').read_text())['model_args']['ode_steps']
    return steps, load_file(folder / 'model.safetensors')['head.bias'][0].item()


@pytest.fixture
def two(monkeypatch):
    """Two models, (3, 3.) and (steps, 5.) by `pair`; described once, so that hundreds of saves take seconds."""
    def build(steps):
        models = [timm.create_model('odevit_tiny', **TINY, ode_steps=k).eval() for k in (3, steps)]
        for model, value in zip(models, (3., 5.)):
            torch.nn.init.constant_(model.head.bias, value)
        known = {id(model): save.describe(model) for model in models}
        monkeypatch.setattr(save, 'describe', lambda model, *args: known[id(model)])
        return models
    return build


@pytest.mark.parametrize('case', ['new folder', 'other settings', 'same settings'])
def test_a_process_killed_at_any_operation_leaves_complete_files_or_none(two, tmp_path, case):
    steps = 3 if case == 'same settings' else 5
    old, new = two(steps)
    save_pretrained(old, tmp_path / 'old')
    allowed = {'new folder': {None, (5, 5.)}, 'other settings': {None, (3, 3.), (5, 5.)}}.get(case, {(3, 3.), (3, 5.)})
    seen = set()
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        if case != 'new folder':
            shutil.copytree(tmp_path / 'old', folder)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, n)
            try:
                save_pretrained(new, folder)
                break
            except KeyboardInterrupt:
                pass
        seen.add(pair(folder))
        assert seen <= allowed, n
        save_pretrained(new, folder)
        assert pair(folder) == (steps, 5.) and sorted(os.listdir(folder)) == PAIR
    # Python 3.10's pathlib holds on to the functions of os that it imported, so that fewer operations are seen there
    assert n > (20 if sys.version_info >= (3, 11) else 12) and allowed <= seen | {pair(folder)}


def test_a_save_neither_disturbs_nor_joins_another_one(two, tmp_path, monkeypatch):
    monkeypatch.setattr(files, '_WAIT', 0.1)
    old, new = two(5)
    with files.staged(tmp_path / 'a', 'note') as aside, ThreadPoolExecutor(1) as pool:
        (aside / 'note').write_text('mine')
        with pytest.raises(OSError, match='is in use by another process. Wait until it is done'):
            pool.submit(save_pretrained, new, tmp_path / 'a').result()
    assert os.listdir(tmp_path / 'a') == ['note'] and (tmp_path / 'a' / 'note').read_text() == 'mine'
    save_pretrained(new, tmp_path / 'a')
    assert sorted(os.listdir(tmp_path / 'a')) == [*PAIR, 'note']


def test_a_disk_that_is_full_leaves_the_old_files(vit, tmp_path, monkeypatch):
    save_pretrained(vit(), tmp_path / 'a')
    before = {path.name: path.read_bytes() for path in (tmp_path / 'a').iterdir()}

    def full(*args, **kwargs):
        raise SafetensorError('Error while serializing: I/O error:\nNo space left on device (os error 28)')
    monkeypatch.setattr(save, 'save_file', full)
    with pytest.raises(OSError, match="a/model.safetensors' could not be written: .* No space left on device"):
        save_pretrained(vit(), tmp_path / 'a')
    assert {path.name: path.read_bytes() for path in (tmp_path / 'a').iterdir()} == before
