"""The weights in hub/: what is stored loads by name, without a network, and computes what was stored with it."""
import json
import runpy
import shlex
from pathlib import Path

import pytest
import timm
import torch
from hub_server import errors_in_card
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import timm_odevit.registry
from timm_odevit import Recipe, cli
from timm_odevit.ode.blocks import find_ode_blocks

HUB = Path(__file__).parent.parent / 'hub'
FOLDERS = sorted(path.parent for path in HUB.glob('*/model.safetensors'))
NAMES = [f'{name}.{tag}' for name, cfgs in timm_odevit.registry.default_cfgs.items() for tag in cfgs.tags if tag]


def test_every_tag_has_its_folder_and_every_folder_its_tag():
    assert FOLDERS and sorted(NAMES) == [folder.name for folder in FOLDERS]
    assert set(NAMES) <= set(timm.list_models(pretrained=True))


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda f: f.name)
def test_a_published_model_gives_what_was_stored_with_it(folder):
    stored = load_file(folder / 'test' / 'tensors.safetensors')
    by_name = timm.create_model(folder.name, pretrained=True).eval()
    by_folder = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    with torch.no_grad():
        for model in (by_name, by_folder):
            torch.testing.assert_close(model(stored['input']), stored['output'], rtol=1e-3, atol=1e-3)  # other kernels
        for ode in find_ode_blocks(by_name):
            assert {**vars(ode.config), 'init': None} == {**vars(by_folder.blocks.config), 'init': None}
    for key in ('mean', 'std', 'input_size', 'num_classes', 'crop_pct', 'label_names'):
        ours, theirs = (json.dumps(model.pretrained_cfg[key]) for model in (by_name, by_folder))
        assert ours == theirs


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda f: f.name)
def test_a_published_folder_is_whole(folder):
    assert (folder / 'model.safetensors').stat().st_size <= 16 * 2 ** 20
    record = json.loads((folder / 'results.json').read_text())
    rows = [r for r in record['test'] if r['model'] != 'teacher']
    card = (folder / 'README.md').read_text()
    assert all(f"{r['top1']:.2f}" in card for r in rows)
    assert {r['images'] for r in record['test']} == {10000}
    commands = card.split('```bash\n')[1].split('```')[0].splitlines()
    assert len(commands) == len(record['command'].splitlines()) and 'hub/' not in card
    for line in commands:
        args = cli.parser().parse_args(shlex.split(line)[1:])
        recipe = args.recipe or 'finetune'
        recipe = Recipe.load(folder / recipe if recipe.endswith('.yaml') else recipe, args.set)
        assert recipe.stages and (recipe.model is not None or not getattr(args, 'checkpoint', None) or getattr(args, 'model', None))
        given = [getattr(args, key, None) for key in ('teacher', 'student', 'model')]
        assert all(name is None or timm.is_model(name.split('.')[0]) or name.startswith('local-dir:out/') for name in given)


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda f: f.name)
def test_a_published_card_is_generated_its_code_runs_and_its_metadata_are_valid(folder):
    cards = runpy.run_path(str(HUB / 'tools' / 'cards.py'))
    text = (folder / 'README.md').read_text()
    assert text == cards['card'](folder), 'run python hub/tools/table.py --write'
    card = ModelCard(text)
    assert not errors_in_card(text) and card.data.license == 'apache-2.0' and card.data.model_name == folder.name
    rows = [r for r in json.loads((folder / 'results.json').read_text())['test'] if r['model'] != 'teacher']
    assert [round(100 * r.metric_value, 2) for r in card.data.eval_results] == [round(r['top1'], 2) for r in rows]
    names = {}
    exec(card.text.split('```python\n')[1].split('```')[0], names)
    assert names['logits'].shape == (1, names['model'].num_classes)
