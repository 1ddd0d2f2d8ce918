"""Imports inside the package go downwards only."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

import timm_odevit

PACKAGE = Path(timm_odevit.__file__).parent
# lowest first; a module imports only from the lines above its own (evaluate and distill are rooms of their own)
LAYERS = ['_version', 'files', 'settings', 'methods', 'config', 'skeleton', 'patches', 'fields', 'time_dependence', 'solvers', 'blocks',
          'merge', 'torchscript', 'families', 'align', 'init', 'spans',
          'convert', 'sizing', 'sources', 'odevit', 'cards', 'hub', 'interop', 'data',
          'evaluate', 'distill', 'benchmark', 'recipe', 'train', 'ablate', 'cli', '__init__', 'run']


def imports(path):
    package = ('timm_odevit', *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[:len(package) - node.level + 1]
            names = [node.module.split('.')[0]] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield (*base, name)[1]


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


@pytest.mark.parametrize('path', sorted(PACKAGE.rglob('*.py')), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    assert layer(path) in LAYERS, 'a new module needs its place in LAYERS'
    for target in imports(path):
        if target != layer(path):
            assert LAYERS.index(target) < LAYERS.index(layer(path)), f'{path} imports {target}'


def test_importing_needs_no_extra_and_leaves_torchdiffeq_and_the_gpu_alone():
    code = ("import sys\nfor name in ('matplotlib', 'sklearn'): sys.modules[name] = None\n"
            "import timm_odevit, torch\nassert 'torchdiffeq' not in sys.modules\nassert not torch.cuda.is_initialized()")
    subprocess.run([sys.executable, '-c', code], check=True)
