import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import timm_odevit

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart(tmp_path, capsys, monkeypatch):
    quickstart = load(ROOT / 'examples' / 'quickstart.py')
    monkeypatch.setattr(quickstart, 'EPOCHS', (1, 1))
    quickstart.main(tmp_path)
    out = capsys.readouterr().out
    assert (tmp_path / 'accuracy.png').exists() and out.count('| student |') == len(quickstart.STEPS)
    assert timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).blocks.steps == 8


def test_readme_code_blocks_run(tmp_path, monkeypatch):
    create = timm.create_model  # without a network, what would be downloaded starts at random
    monkeypatch.setattr(timm, 'create_model', lambda name, pretrained=False, **kwargs: create(
        name, pretrained=pretrained and name.startswith('local-dir:'), **kwargs))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, 'README.md', 'exec'), names)


@pytest.fixture
def cifar(tmp_path):
    rng = np.random.default_rng(0)
    data = {}
    for name, n in (('train', 120), ('test', 30)):
        data[f'x_{name}'] = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        data[f'y_{name}'] = np.arange(n) % 10
    np.savez(tmp_path / 'data.npz', **data)
    return tmp_path


def test_cifar_runs_at_a_tiny_size(cifar, monkeypatch, capsys):
    script = load(ROOT / 'hub' / 'cifar.py')

    def run(*args):
        monkeypatch.setattr('sys.argv', ['cifar.py', *args, '--device', 'cpu', '--quiet', '--batch-size', '20', '--img-size', '32',
                                         '--epochs', '1'])
        script.main()
    data = str(cifar / 'data.npz')
    run('teacher', data, str(cifar / 'teacher'), '--scratch', '--model', 'vit_tiny_patch16_224')
    run('student', data, str(cifar / 'student'), '--teacher', str(cifar / 'teacher' / 'best'), '--checkpoints', 'distance')
    assert '| student | 24' in capsys.readouterr().out
    assert (cifar / 'student' / 'results.json').exists()


def test_readme_has_the_tables_of_the_results():
    readme = (ROOT / 'README.md').read_text()
    for table in load(ROOT / 'hub' / 'table.py').TABLES.values():
        assert table() in readme


def test_dial(tmp_path, monkeypatch, capsys, vit):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / 'data.npz', x_train=rng.integers(0, 256, (40, 20, 20, 3), dtype=np.uint8),
             x_test=rng.integers(0, 256, (20, 20, 20, 3), dtype=np.uint8), y_test=np.arange(20) % 5)
    timm_odevit.save_pretrained(vit(depth=6), tmp_path / 'teacher')
    script = load(ROOT / 'examples' / 'dial.py')

    def run(*shares):
        monkeypatch.setattr('sys.argv', [
            'dial.py', str(tmp_path / 'data.npz'), str(tmp_path / 'out'), '--teacher', f"local-dir:{tmp_path / 'teacher'}",
            '--img-size', '16', '--minutes', '0.01', '--batch-size', '8', '--quiet', '--shares', *shares])
        script.main()
        return json.loads((tmp_path / 'out' / 'dial.json').read_text())['rows']
    first = run('0.5')
    rows = run('0.5', '1.0')
    assert rows[0] == first[0] and [row['share'] for row in rows] == [0.5, 1.0]
    assert rows[0]['rank'] > 0 and rows[0]['updates'] >= 2 and rows[1]['phases'] == 6
    assert (tmp_path / 'out' / 'dial.png').exists()
    assert '| 50 % |' in capsys.readouterr().out


def test_cifar_augmentation_moves_and_mirrors_each_image_on_its_own():
    augment = load(ROOT / 'hub' / 'cifar.py').augment
    torch.manual_seed(0)
    images = torch.arange(1, 26).view(1, 1, 5, 5).repeat(300, 1, 1, 1)
    found = augment(images, padding=1)
    assert found.shape == images.shape and found.dtype == images.dtype
    variants = {tuple(image.flatten().tolist()) for image in found}
    assert len(variants) == 18 and tuple(range(1, 26)) in variants  # 3 x 3 shifts, mirrored or not
