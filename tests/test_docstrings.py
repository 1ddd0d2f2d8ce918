"""Every public name shows, in its docstring, how it is used; and that runs."""
import copy
import doctest
import inspect
from itertools import islice

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from test_push import hub  # noqa: F401

import timm_odevit
from timm_odevit import convert_
from timm_odevit.shrinking import candidates, run
from timm_odevit.training import fit

NAMES = [name for name in timm_odevit.__all__ if name != '__version__']
NEEDS = {'export_model': ['onnx', 'onnxscript', 'onnxruntime'], 'from_open_clip': ['open_clip'],
         'put_tower_': ['open_clip'], 'from_transformers': ['transformers']}
VISION = dict(layers=3, width=32, head_width=16, patch_size=4, image_size=16)


class Shown(doctest.OutputChecker):
    """Compares what an example prints only where it shows it."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp('photos')
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8)):
        path = folder / f'class{i % 5}' / f'{i}.png'
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture
def names(vit, photos, tmp_path, monkeypatch):
    """What the reference says of the names in its examples, at a tiny size; a minute of training is a few updates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, 'updates_in', lambda *args: (1, 2))
    (tmp_path / 'photos').symlink_to(photos)
    model = vit(depth=6)
    monkeypatch.setattr(run, 'candidates', lambda *models: islice(candidates.candidates(*models), 1))
    monkeypatch.setattr(candidates, 'export_model', lambda model, path: path.write_text('a model') and path)  # which takes seconds
    monkeypatch.setattr(candidates, 'load_exported', lambda path: (model, {}))
    monkeypatch.setattr(candidates, 'ROUNDS', 3)
    teacher, student = copy.deepcopy(model), copy.deepcopy(model)
    convert_(student)
    images = torch.randn(4, 3, 16, 16)
    return {**{name: getattr(timm_odevit, name) for name in NAMES}, 'timm': timm, 'torch': torch, 'vit': model,
            'teacher': teacher, 'student': student, 'images': images, 'loader': [(images, torch.tensor([0, 1, 2, 3]))] * 2}


def clip_for(name):
    if name == 'from_transformers':
        from transformers import CLIPConfig, CLIPModel
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        return CLIPModel(CLIPConfig(text_config={**sizes, 'vocab_size': 99}, projection_dim=24,
                                    vision_config={**sizes, 'image_size': 16, 'patch_size': 4})).eval()
    from open_clip import CLIP
    return CLIP(32, VISION, dict(context_length=8, vocab_size=99, width=32, heads=2, layers=2)).eval()


@pytest.mark.parametrize('name', NAMES)
def test_the_example_of_a_docstring_runs(name, names, request):
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f'{package} is not installed')
    if name == 'push_to_hub':
        request.getfixturevalue('hub')
    if 'clip' in name or 'tower' in name or 'transformers' in name:
        names['clip'] = clip_for(name)
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(timm_odevit, name)), names, name, None, None)
    assert found.examples, 'its docstring has no example'
    said = []
    failed, _ = doctest.DocTestRunner(checker=Shown(), verbose=False).run(found, out=said.append)
    assert not failed, ''.join(said)
