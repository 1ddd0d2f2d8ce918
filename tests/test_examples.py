import importlib.util
import json
import re
import shlex
from pathlib import Path

import nbformat
import numpy as np
import pytest
import timm
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

import timm_odevit
from timm_odevit import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for pattern in ('*.md', 'examples/*.md', 'hub/*.md', 'hub/lab/*.md') for path in ROOT.glob(pattern))
WITH_CODE = [page for page in PAGES if '```python' in (ROOT / page).read_text()]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart(tmp_path, capsys, monkeypatch):
    quickstart = load(ROOT / 'examples' / 'quickstart.py')
    monkeypatch.setattr(quickstart, 'EPOCHS', (1, 1))
    quickstart.main(tmp_path)
    assert capsys.readouterr().out.count('| student |') == len(quickstart.STEPS)
    assert timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).blocks.steps == 8


@pytest.mark.parametrize('page', WITH_CODE)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r'```python\n(.*?)```', (ROOT / page).read_text(), re.S):
        exec(compile(block, page, 'exec'), names)


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r'\]\((?!http)(.*?)\)', path.read_text()):
        file, _, heading = target.partition('#')
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), target
        titles = re.findall(r'^#+ (.*)$', other.read_text(), re.M) if heading else []
        assert not heading or heading in [re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-') for title in titles], target


def test_commands_are_commands():
    pages = ''.join((ROOT / page).read_text() for page in PAGES if '/lab/' not in page)
    blocks = re.findall(r'```bash\n(.*?)```', pages.replace('\\\n', ''), re.S)
    lines = [line for block in blocks for line in block.splitlines() if 'odevit' in line]
    parsed = 0
    for line in lines:
        command = shlex.split(line, comments=True)
        command = command[command.index('timm_odevit.cli'):] if 'timm_odevit.cli' in command else command
        if command[0] in ('odevit', 'timm_odevit.cli'):
            cli.parser().parse_args(command[1:])
            parsed += 1
    assert parsed > 30


def test_the_first_command_of_readme_prints_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command, printed = re.search(r'```bash\nodevit (predict .*?)\n```\n\n```\n(.*?)```', Path('README.md').read_text(), re.S).groups()
    assert cli.main(command.split()) == 0 and capsys.readouterr().out == printed


def test_pages_have_the_tables_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'hub' / 'tools')
    for name, (page, table) in load(ROOT / 'hub' / 'tools' / 'table.py').TABLES.items():
        assert f'<!-- {name}: python hub/tools/table.py -->\n{table()}<!-- end -->' in page.read_text()
    assert '-->\n<!-- end' not in (ROOT / 'README.md').read_text()  # a place without its table


def test_the_pages_can_be_read_in_an_afternoon():
    assert sum(len(re.sub(r'<!--.*?-->', '', (ROOT / page).read_text(), flags=re.S).split()) for page in PAGES) <= 28_000


def test_figures_in_sentences_are_those_of_their_records(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / 'hub' / 'tools')
    tool = load(ROOT / 'hub' / 'tools' / 'table.py')
    for page in tool.PAGES:
        assert tool.tied(page.read_text()) == page.read_text(), f'{page.name}: python hub/tools/table.py --write'
    (tmp_path / 'a_k6').mkdir()
    (tmp_path / 'a_k6' / 'results.json').write_text('{"test": [{"steps": 3, "top1": 1}, {"steps": 6, "top1": 72.349}]}')
    monkeypatch.setattr(tool, 'HUB', tmp_path)  # a record that has changed
    assert tool.tied('now 79.3<!-- =*k6:test/steps=6/top1 --> %') == 'now 72.3<!-- =*k6:test/steps=6/top1 --> %'
    assert tool.tied('1 to 0<!-- =a*:max:test/steps=*/top1 -->') == '1 to 72<!-- =a*:max:test/steps=*/top1 -->'


@pytest.mark.parametrize('page', [page for page in PAGES if '/lab/' not in page and page not in ('CHANGELOG.md', 'hub/TRAINING.md')])
def test_a_figure_in_a_sentence_names_its_record_or_its_source(page):
    text = re.sub(r'```.*?```|<!-- \w.*?<!-- end -->|^\|.*?$', '', (ROOT / page).read_text(), flags=re.S | re.M)
    for paragraph in re.split(r'\n\n|\n(?=- )', text):
        untied = re.findall(r'(?<![\w.])\d+\.\d+(?= %| points|, \d)', re.sub(r'[\d.]+<!-- =.*?-->', '', paragraph))
        assert not untied or re.search(r'\]\(|commit|[Rr]ecord|command', paragraph), (untied, paragraph)


def test_pages_have_the_tables_of_the_code():
    for name, (page, table) in load(ROOT / 'examples' / 'generate.py').TABLES.items():
        assert f'<!-- {name}: python examples/generate.py -->\n{table()}<!-- end -->' in page.read_text(), 'python examples/generate.py --write'


def test_the_index_names_every_page_and_each_page_says_where_to_go_next():
    index = (ROOT / 'examples' / 'README.md').read_text()
    for path in (ROOT / 'examples').glob('[!R]*.md'):
        assert f'({path.name})' in index and re.search(r'\n## Next\n\n(- .*\n(  .*\n)*)+\Z', path.read_text()), path.name


def test_segmentation(tmp_path, monkeypatch, capsys):
    script = load(ROOT / 'examples' / 'segmentation.py')
    for name, value in (('TRAIN', 48), ('TEST', 16), ('UPDATES', 60)):
        monkeypatch.setattr(script, name, value)
    scores = script.main(tmp_path, names=(script.TEACHER, script.STUDENTS[0]))
    assert all(20 < score < 80 for score in scores.values()) and capsys.readouterr().out.count('IoU') == 2
    assert (tmp_path / 'segmentation.png').stat().st_size > 10_000
    images, masks = script.scenes(2, True, seed=0)
    again = script.scenes(2, True, seed=0)
    assert torch.equal(images, again[0]) and 0.02 < masks.mean() < 0.4 and set(masks.unique().tolist()) == {0., 1.}


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
    assert [row['phases'] for row in rows] == [3, 6] and rows[0]['minutes'] > 0
    assert (tmp_path / 'out' / 'dial.png').exists()
    assert '| 50 % |' in capsys.readouterr().out


def test_release_makes_the_folder_of_a_published_model(tmp_path, vit, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / 'hub' / 'tools')
    x = np.random.default_rng(0).integers(0, 256, (60, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / 'data.npz', x_train=x, y_train=np.arange(60) % 5, x_test=x[:20], y_test=np.arange(20) % 5)
    teacher = vit()
    timm_odevit.save_pretrained(teacher, tmp_path / 'teacher')
    recipe = timm_odevit.Recipe.load('autonomous', ['stages.0.fit.epochs=1', 'stages.1.fit.epochs=1', 'data.batch_size=16'])
    timm_odevit.train(recipe, tmp_path / 'data.npz', tmp_path / 'run', teacher=teacher, progress=False)
    release = load(ROOT / 'hub' / 'tools' / 'release.py')
    monkeypatch.setattr(release, 'STEPS', (2, 3, 6))
    args = ['release.py', str(tmp_path / 'run'), 'odevit_x.deit_tiny_cifar10', str(tmp_path / 'data.npz'), '--teacher',
            str(tmp_path / 'teacher'), '--command', 'odevit distill', '--device-name', 'a core', '--hub', str(tmp_path / 'hub')]
    monkeypatch.setattr('sys.argv', args)
    release.main()
    folder = tmp_path / 'hub' / 'odevit_x.deit_tiny_cifar10'
    assert {p.name for p in folder.iterdir()} == {'README.md', 'config.json', 'model.safetensors', 'recipe.yaml', 'results.json', 'test'}
    assert [r['steps'] for r in json.loads((folder / 'results.json').read_text())['test']] == [None, 2, 3, 6]
    model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    card = (folder / 'README.md').read_text()
    assert '| **2** ' in card and '| 6 ' in card and '**3** (as saved)' in card
    stored = load_file(folder / 'test' / 'tensors.safetensors')
    torch.testing.assert_close(model(stored['input']), stored['output'])
    monkeypatch.setattr('sys.argv', [*args, '--earlier', str(folder), '--begun', '3', '7', 'another'])
    before = json.loads((folder / 'results.json').read_text())
    release.main()
    after = json.loads((folder / 'results.json').read_text())
    assert after['command'] == 'odevit distill\nodevit distill' and after['minutes'] == before['minutes']
    assert after['before'] == [{key: before[key] for key in ('minutes', 'device')}, {'minutes': 7., 'device': 'another'}]
    assert after['epochs'] == 7 and (folder / 'earlier.yaml').read_text() == (folder / 'recipe.yaml').read_text()
    monkeypatch.setattr(release, 'LIMIT', 1000)
    with pytest.raises(SystemExit, match='at most 16 MiB are allowed'):
        release.main()
    assert [path.name for path in (tmp_path / 'hub').iterdir()] == [folder.name]
    assert json.loads((folder / 'results.json').read_text()) == after


NOTEBOOKS = sorted((ROOT / 'examples').glob('*.ipynb'))
notebooks = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)


@notebooks
def test_notebooks_run(path, tmp_path):
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if 'parameters' in cell.metadata.get('tags', ()):
            cell.source = 'EPOCHS, MINUTES = 1, 0.02'
    # each file takes seconds to write, and one of ONNX more than one of torch.export
    notebook.cells.insert(0, nbformat.v4.new_code_cell("""
import sys
sys.modules['onnx'] = None
from timm_odevit.shrinking import candidates, run
run.LEAST, candidates.ROUNDS = 0, 3
run.candidates = lambda *models: [each for each in candidates.candidates(*models) if not each.int8 and 'tokens' not in each.name]
"""))
    NotebookClient(notebook, kernel_name='python3', resources={'metadata': {'path': tmp_path}}).execute()  # raises on an error


@notebooks
def test_notebooks_are_stored_with_what_they_show(path):
    text = path.read_text()
    cells = [cell for cell in nbformat.reads(text, 4).cells if cell.cell_type == 'code']
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # from top to bottom, once
    assert not any('execution' in cell.metadata for cell in cells)  # when a cell ran
    assert sum('image/png' in output.get('data', {}) for output in outputs) >= 1
    assert not [output for output in outputs if output.output_type == 'error' or output.get('name') == 'stderr']
    assert len(text) < 400_000 and not re.search(r'/(home|root|work|tmp|Users)/', text)
