r"""Make the folder of a published model from a finished run: weights, config, recipe, results, card, stored tensors.

    python hub/tools/release.py out/run odevit_tiny_native_patch16_128.deit_tiny_cifar100 cifar100.npz \
        --teacher hub/deit_tiny_patch16_128.cifar100 --device-name "one core" \
        --command "odevit distill autonomous cifar100.npz out/run ..."

Training never sees the test images. Weights are stored in half precision, unless that costs more than 0.05 points of
top-1 on the images held out of training.
"""
import argparse
import copy
import json
import re
import shutil
import tempfile
from pathlib import Path

import timm
import torch
from cards import EARLIER, HUB, card, dataset_of

import timm_odevit
from timm_odevit import Recipe, evaluate, save_pretrained
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.ode.blocks import find_ode_blocks
from timm_odevit.saving.save import save_reference

STEPS = (1, 2, 3, 4, 5, 6, 8, 12, 24, 48, 100)
LIMIT = 16 * 2 ** 20


def trained(rows, model):
    blocks = find_ode_blocks(model)
    return next(r for r in rows if r['model'] != 'teacher' and (not blocks or r['steps'] == blocks[0].steps))


def before(published, name):
    """Commands, recipes, epochs, and minutes by device of the student that a run continued."""
    if published is None:
        return [], [], 0, []
    record = json.loads((published / 'results.json').read_text())
    recipes = [path.read_text() for path in (*sorted(published.glob('earlier*.yaml')), published / 'recipe.yaml')]
    if len(recipes) > len(EARLIER):
        raise SystemExit(f'{len(recipes)} earlier recipes are too many; at most {len(EARLIER)} are kept.')
    last = EARLIER[len(recipes) - 1]
    command = re.sub(rf'hub/(runs/\S+|{published.name}/recipe)[.]yaml', f'hub/{name}/{last}', record['command'])
    commands = [command.replace(f'hub/{published.name}/', f'hub/{name}/')]
    spans = [*record.get('before', []), {key: record[key] for key in ('minutes', 'device')}]
    return commands, recipes, record['epochs'], spans


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='folder that odevit distill wrote')
    parser.add_argument('name', help='name of the published model and of its folder')
    parser.add_argument('data')
    parser.add_argument('--teacher', help='folder of the teacher')
    parser.add_argument('--command', required=True, help='the command that trained it, for the card')
    parser.add_argument('--earlier', type=Path, help='folder of the published student that the run continued')
    parser.add_argument('--begun', nargs=3, action='append', default=[], metavar=('EPOCHS', 'MINUTES', 'DEVICE'),
                        help='what the weights took that the run began with, if they were not published, and on what')
    parser.add_argument('--device-name', required=True, help='hardware, for the card')
    parser.add_argument('--start', help='a sentence or two on the student that the run began with, for the card')
    parser.add_argument('--hub', type=Path, default=HUB)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = [(int(epochs), {'minutes': float(minutes), 'device': device}) for epochs, minutes, device in args.begun]
    dataset_of(args.name)  # fail now, for a data set that cards do not know
    run, folder = args.run, args.hub / args.name
    if json.loads((run / 'run.json').read_text())['limit'] is not None:
        raise SystemExit(f"'{run}' is a rehearsal on a part of the images. Give a run on all of them.")
    model = timm.create_model(f'local-dir:{run / "best"}', pretrained=True).eval()
    teacher = timm.create_model(f'local-dir:{args.teacher}', pretrained=True).eval() if args.teacher else None
    recipe, steps, trained_at = Recipe.load(run / 'best' / 'recipe.yaml'), None, []
    if find_ode_blocks(model):
        steps = [k for k in STEPS if k >= len(model.blocks.shared.phases)]
        trained_at = list(recipe.trained_at(model.blocks.steps))
    data = read_data(args.data, model, DataConfig(batch_size=128), held_out=recipe.batches.held_out)
    half = copy.deepcopy(model).half().float()  # rounded
    full, rounded = (trained(json.loads(evaluate(m, data.val).to_json()), m)['top1'] for m in (model, half))
    stored = model if rounded < full - 0.05 else copy.deepcopy(half).half()
    commands, recipes, epochs, spans = before(args.earlier, args.name)
    spans += [span for _, span in begun]
    args.hub.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.hub) as temp:  # hub/NAME changes only when all is there
        aside = Path(temp, args.name)
        save_pretrained(stored, aside)
        published = timm.create_model(f'local-dir:{aside}', pretrained=True).eval()
        rows = json.loads(evaluate(published, data.test, steps=steps, teacher=teacher).to_json())
        size = (aside / 'model.safetensors').stat().st_size
        if size > LIMIT:
            raise SystemExit(f'The weights take {size / 2 ** 20:.1f} MiB; at most 16 MiB are allowed.')
        for name, text in zip(EARLIER, recipes, strict=False):
            (aside / name).write_text(text)
        (aside / 'recipe.yaml').write_text(recipe.to_yaml())
        history = json.loads((run / 'history.json').read_text())
        record = {
            'command': '\n'.join([*commands, args.command]),
            'epochs': epochs + sum(number for number, _ in begun) + len(history),
            **({'before': spans} if spans else {}),
            'device': args.device_name, 'minutes': sum(r['seconds'] for r in history) / 60,
            **({'start': args.start} if args.start else {}),
            'versions': f'timm_odevit {timm_odevit.__version__}, torch {torch.__version__}, timm {timm.__version__}',
            'trained_at': trained_at, 'curve': [round(r['val_top1'], 1) for r in history], 'test': rows}
        (aside / 'results.json').write_text(json.dumps(record, indent=2) + '\n')
        save_reference(published, aside)
        (aside / 'README.md').write_text(card(aside))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    print(f'{folder}: {size / 2 ** 20:.2f} MiB, {trained(rows, model)}')


if __name__ == '__main__':
    main()
