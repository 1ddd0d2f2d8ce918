"""Make the folder of a published model out of a finished run: weights, config, recipe, results, card, stored tensors.

    python hub/tools/release.py out/run odevit_tiny_native_patch16_64.deit_tiny_cifar100 cifar100.npz \
        --teacher hub/deit_tiny_patch16_64.cifar100 --command "odevit distill autonomous cifar100.npz out/run ..."

The test images are used here only. Weights are stored in half precision, unless that costs 0.05 points of top-1 on the
images held out of training.
"""
import argparse
import copy
import json
import shutil
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file

import timm_odevit
from timm_odevit import Recipe, evaluate, save_pretrained
from timm_odevit.blocks import find_ode_blocks
from timm_odevit.data import array_loaders
from timm_odevit.distill.task import step_counts

HUB = Path(__file__).parent.parent
STEPS = (6, 8, 12, 16, 24)
DATASETS = {'cifar100': 'CIFAR-100', 'cifar10': 'CIFAR-10'}
LIMIT = 16 * 2 ** 20


def measure(model, images, teacher=None, steps=None):
    return json.loads(evaluate(model, images, steps=steps, teacher=teacher).to_json())


def halved(model):
    """A copy whose weights went through half precision."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())
    return other


def trained(rows, model):
    blocks = find_ode_blocks(model)
    return next(r for r in rows if r['model'] != 'teacher' and (not blocks or r['steps'] == blocks[0].steps))


CARD = """---
library_name: timm
license: apache-2.0
pipeline_tag: image-classification
tags:
- image-classification
- timm
- ode-vit
datasets:
- {dataset_id}
---

# {name}

{what}

```python
import timm, timm_odevit

model = timm.create_model('{name}', pretrained=True).eval()
{dial}```

## Results

{images:,} test images of {dataset} at {pixels} pixels; the epoch was chosen on training images held out.{bold}

{table}

## How it was trained

On {device}, {minutes:.0f} minutes, {versions}; the recipes lie beside this file:

```bash
{command}
```

## Limits

Trained on {dataset} only, 32-pixel photos of its classes enlarged to {pixels}; it knows nothing else.{short}{compute}

## Licence and provenance

Apache-2.0. Made from `deit_tiny_patch16_224` (Facebook Research, Apache-2.0; LayerNorm parameters rounded to steps of
1/32 or 1/64) and {dataset} (Krizhevsky 2009).
"""
COMPUTE = ' It has fewer parameters than its teacher, not less compute: K evaluations\ncost what K blocks cost.'


def card(name, record, model, trained_at):
    dataset = DATASETS[name.rsplit('_', 1)[-1].split('.')[-1]]
    pixels, epochs = model.patch_embed.img_size[0], record['epochs']
    short = f'\n{epochs} epochs are few: longer training gives more.' if epochs < 20 else ''
    row, ode = trained(record['test'], model), bool(find_ode_blocks(model))
    what = f'DeiT-tiny, fine-tuned on {dataset} at {pixels} pixels: the teacher of the `odevit_*` models of it.'
    if ode:
        what = ('One shared transformer block that an ODE solver evaluates K times (ODE-ViT, arXiv 2511.16501),\n'
                f'distilled from a DeiT-tiny that was fine-tuned on {dataset}.')
    lines = ['| model | K | NFE | parameters | top-1 % | top-5 % | kept % | agreement % |', '|' + ' --- |' * 8]
    for r in record['test']:
        shown = [f'{r[key]:.2f}' if r[key] is not None else '-' for key in ('top1', 'top5', 'kept', 'agreement')]
        steps = f"**{r['steps']}**" if r['steps'] in trained_at else r['steps'] or '-'
        mark = ' (as saved)' if ode and r is row else ''
        lines.append(f"| {r['model']} | {steps}{mark} | {r['nfe'] or '-'} | {r['parameters']:,} | "
                     f"{' | '.join(shown)} |")
    return CARD.format(
        name=name, what=what, pixels=pixels, short=short, dataset=dataset,
        dataset_id=dataset.lower().replace('-', ''), images=row['images'],
        bold=' It was\ntrained with the K in bold.' if trained_at else '',
        table='\n'.join(lines), compute=COMPUTE if ode else '',
        dial='model.blocks.steps = 8    # the compute dial\n' if ode else '',
        **{key: record[key] for key in ('device', 'minutes', 'versions', 'command')})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='folder that odevit distill wrote')
    parser.add_argument('name', help='name of the published model, which is that of its folder')
    parser.add_argument('data')
    parser.add_argument('--teacher', help='folder of the teacher')
    parser.add_argument('--command', required=True, help='the command that trained it, for the card')
    parser.add_argument('--earlier', type=Path, help='folder of the published student that the run went on from')
    parser.add_argument('--device-name', required=True, help='hardware, for the card')
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--hub', type=Path, default=HUB)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run, folder = Path(args.run), args.hub / args.name
    if json.loads((run / 'run.json').read_text())['limit'] is not None:
        raise SystemExit(f"'{run}' is a rehearsal on a part of the images.")
    history = json.loads((run / 'history.json').read_text())
    model = timm.create_model(f'local-dir:{run / "best"}', pretrained=True).eval()
    teacher = timm.create_model(f'local-dir:{args.teacher}', pretrained=True).eval() if args.teacher else None
    steps = STEPS if find_ode_blocks(model) else None
    recipe = Recipe.load(run / 'recipe.yaml')
    held_out = (recipe.data or {}).get('held_out', 0.1)
    _, val, test = array_loaders(args.data, model, batch_size=args.batch_size, held_out=held_out)
    half = halved(model)
    full, rounded = (trained(measure(m, val), m)['top1'] for m in (model, half))
    stored, measured = (half.half(), half) if rounded >= full - 0.05 else (model, model)
    rows = measure(measured, test, teacher, steps)
    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(stored, folder)
    model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    size = (folder / 'model.safetensors').stat().st_size
    if size > LIMIT:
        raise SystemExit(f'{size / 2 ** 20:.1f} MiB are too many; at most 16 MiB.')
    command, epochs, minutes = args.command, len(history), sum(r['seconds'] for r in history) / 60
    if args.earlier:
        before = json.loads((args.earlier / 'results.json').read_text())
        command, minutes = f"{before['command']}\n{command}", before['minutes'] + minutes
        epochs += before['epochs']
        (folder / 'earlier.yaml').write_text((args.earlier / 'recipe.yaml').read_text())
    (folder / 'recipe.yaml').write_text(recipe.to_yaml())
    own = find_ode_blocks(model)[0].steps if steps else 0
    trained_at = step_counts(recipe.settings(recipe.stages[-1])[0].get('steps') or [own], own) if steps else []
    for r in rows:
        del r['images_per_second']  # the machine was not idle
    record = {
        'command': command, 'epochs': epochs, 'device': args.device_name, 'minutes': minutes,
        'versions': f'timm_odevit {timm_odevit.__version__}, torch {torch.__version__}, timm {timm.__version__}',
        'held_out_top1': max(r['val_top1'] for r in history if r['stage'] == history[-1]['stage']), 'test': rows,
    }
    (folder / 'results.json').write_text(json.dumps(record, indent=2) + '\n')
    (folder / 'README.md').write_text(card(args.name, record, model, trained_at))
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.standard_normal((2, 3, *model.patch_embed.img_size)).astype(np.float32))
    (folder / 'test').mkdir(exist_ok=True)
    with torch.no_grad():
        save_file({'input': images, 'output': model(images)}, folder / 'test' / 'tensors.safetensors')
    shutil.rmtree(folder / '__pycache__', ignore_errors=True)
    print(f'{folder}: {size / 2 ** 20:.2f} MiB, {trained(rows, model)}')


if __name__ == '__main__':
    main()
