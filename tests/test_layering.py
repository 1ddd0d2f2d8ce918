"""Imports inside the package go downwards only; it stays small, and a file can be read in one sitting."""
import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from setuptools import Distribution

import timm_odevit

PACKAGE = Path(timm_odevit.__file__).parent
# lowest first, from the package's docstring: a room (a folder, or a file beside the folders) imports only from those above it
ROOMS = ['_version', *re.findall('[a-z]+', ' '.join(re.findall('(?m)^([a-z, ]+?)  ', timm_odevit.__doc__))), '__init__']
FILES = sorted(PACKAGE.rglob('*.py'))


def name_of(path):
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


def imports(path):
    """The modules of this package that a file imports from."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[:len(package) - node.level + 1]
            if node.module:
                yield '.'.join((*base, node.module))
            else:
                yield from ('.'.join((*base, alias.name)) for alias in node.names)


def room(name):
    return name.split('.')[0]


@pytest.mark.parametrize('path', FILES, ids=name_of)
def test_imports_go_downwards(path):
    own = room(name_of(path))
    assert own in ROOMS, 'a new room needs its place in the docstring of the package'
    for target in imports(path):
        if room(target) != own:
            assert ROOMS.index(room(target)) < ROOMS.index(own), f'{path} imports {target}'


def test_there_is_no_circle_inside_a_room():
    TopologicalSorter({name_of(path): set(imports(path)) for path in FILES}).prepare()  # raises CycleError


def lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_house_keeps_to_its_budget():
    root = PACKAGE.parent
    assert lines(FILES) <= 10_500 and len(FILES) <= 70
    assert sum(path.stat().st_size for path in FILES) <= 480_000
    assert lines((root / 'tests').glob('*.py')) <= 9_500
    assert lines([*root.glob('hub/tools/*.py'), *root.glob('hub/runs/*.py')]) <= 1_200


@pytest.mark.parametrize('path', FILES, ids=name_of)
def test_a_file_has_no_more_than_300_lines_and_a_function_80_without_its_docstring(path):
    assert lines([path]) <= 300
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            told = node.body[0] if ast.get_docstring(node) is not None else None
            length = node.end_lineno - node.lineno + 1 - (told.end_lineno - told.lineno + 1 if told else 0)
            assert length <= 80, f'{node.name} has {length} lines'


def test_rooms_lie_on_no_more_than_eight_floors():
    arrows = {}
    for path in FILES:
        arrows.setdefault(room(name_of(path)), set()).update(map(room, imports(path)))
    floors = {}
    for own in TopologicalSorter({own: targets - {own} for own, targets in arrows.items()}).static_order():
        floors[own] = 1 + max((floors[target] for target in arrows.get(own, ()) if target != own), default=0)
    assert max(floors.values()) < 8, floors  # hub/ stands on top of them


def test_no_private_name_is_used_by_another_file():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert not [alias.name for alias in node.names if alias.name.startswith('_') and alias.name != '__version__'
                            and alias.asname != '_registers'], path


def test_the_wheel_has_every_folder_of_the_package_and_the_published_models():
    about = Distribution()
    about.parse_config_files([str(PACKAGE.parent / 'pyproject.toml')])
    with_files = {path.parent for path in PACKAGE.rglob('*') if path.suffix in ('.py', '.yaml')}
    assert set(about.packages) == {'.'.join(path.relative_to(PACKAGE.parent).parts) for path in with_files} | {'timm_odevit.published'}
    assert about.package_dir == {'timm_odevit.published': 'hub'}
    for path in PACKAGE.rglob('*.*'):  # what is read as data
        if path.suffix in ('.md', '.html', '.txt', '.yaml') and path.parent.name != 'published':
            kinds = about.package_data['.'.join(path.parent.relative_to(PACKAGE.parent).parts)]
            assert any(path.match(kind) for kind in kinds), path
    # it is found by its folder, which the source distribution must have too
    assert 'graft timm_odevit/published\n' in (PACKAGE.parent / 'MANIFEST.in').read_text()


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((PACKAGE.parent / 'CITATION.cff').read_text())['version'] == timm_odevit.__version__


def test_importing_needs_no_extra_and_leaves_torchdiffeq_and_the_gpu_alone():
    code = ("import sys\nfor name in ('matplotlib', 'sklearn'): sys.modules[name] = None\n"
            "import timm_odevit, torch\nassert 'torchdiffeq' not in sys.modules\nassert not torch.cuda.is_initialized()\nimport timm\n"
            "with torch.device('meta'): timm.create_model('odevit_tiny', ode_method='dopri5')\n"
            "import torchdiffeq\ntorchdiffeq.odeint(lambda t, y: -y, torch.ones(1), torch.tensor([0., 1.]))")
    subprocess.run([sys.executable, '-c', code], check=True)
