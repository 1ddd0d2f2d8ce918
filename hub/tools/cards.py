"""Write the card of each published model, hub/*/README.md, from its results.json.

    python hub/tools/cards.py
"""
import json
import re
from pathlib import Path

import timm

from timm_odevit.ode.blocks import find_ode_blocks
from timm_odevit.saving.cards import model_card
from timm_odevit.saving.push import EARLIER

HUB = Path(__file__).parent.parent
DATASETS = {'cifar100': 'CIFAR-100', 'cifar10': 'CIFAR-10'}
# plain ViTs of as many parameters, in hub/runs/study.jsonl, beside the student after as many minutes
PLAIN = {
    'odevit_tiny_native_two_r11_patch16_128.deit_tiny_cifar100': (
        'three of its blocks, each used once', 'plain3_128', 'two_r11_128')}


def dataset_of(name):
    """'CIFAR-10' for 'deit_tiny_patch16_64.cifar10' and for 'odevit_tiny_native_patch16_64.deit_tiny_cifar10'."""
    return DATASETS[name.replace('.', '_').rsplit('_', 1)[-1]]


def commands(record, folder):
    """The commands of a record, as they run in the model's own folder: other published models go by their names."""
    here = record['command'].replace(f'hub/{folder.name}/', '')
    return re.sub('local-dir:hub/', '', re.sub(r'hub/runs/\S+[.]yaml', 'recipe.yaml', here))


def opening(name, record, steps):
    """Accuracy, size, K of training, and what a sceptic lays beside them."""
    row = next(r for r in record['test'] if r['model'] != 'teacher' and r['steps'] == steps)
    share = '' if row['kept'] is None else f", {row['kept']:.0f} % of its teacher's"
    said = [f"**{row['top1']:.1f} % top-1** with K = {steps}{share}; {row['parameters'] / 1e6:.2f} million parameters; "
            f"trained with K = {', '.join(map(str, record['trained_at']))}."]
    files = {r['name']: r for group in json.loads((HUB / 'verdict.json').read_text())['groups'] for r in group['rows']}
    pixels, dataset = name.partition('_patch16_')[2].split('.')[0], name.rpartition('_')[2]
    teacher = f'deit_tiny_patch16_{pixels}.{dataset}'
    names = (f'{name}, int8, K = {steps}', f'{teacher}, int8')
    if all(each in files for each in names):
        said.append('As int8, it takes {:.2f} MB and has {:.1f} %, its teacher {:.2f} MB and {:.1f} %.'.format(
            *(files[each][key] for each in names for key in ('mb', 'value'))))
    if name in PLAIN:
        words, *runs = PLAIN[name]
        study = {(line.get('student') or '').partition('out/')[2]: line for line in map(
            json.loads, (HUB / 'runs' / 'study.jsonl').read_text().splitlines())}
        (steps, plain), (more, ours) = ((study[run]['own'], study[run]['top1'][str(study[run]['own'])]) for run in runs)
        said.append(f'After {study[runs[0]]["minutes"]:.0f} minutes of training, a plain ViT of as many parameters '
                    f'({words}) has {plain:.1f} % on images held out, this student {ours:.1f} %, with '
                    f'{more // steps} times the operations.')
    return ' '.join(said)


def card(folder):
    record = json.loads((folder / 'results.json').read_text())
    model = timm.create_model(f'local-dir:{folder}')
    dataset = dataset_of(folder.name)
    pixels, images, epochs = model.patch_embed.img_size[0], record['test'][0]['images'], record.get('epochs')
    scratch = not any(row['model'] == 'teacher' for row in record['test']) and bool(find_ode_blocks(model))
    if find_ode_blocks(model):
        origin = f'trained from scratch on the labels of {dataset}.' if scratch else (
            f'distilled from a DeiT-tiny that was fine-tuned on {dataset}.')
        phases = model.blocks.config.phases
        count = f"{('One', 'Two', 'Three', 'Four')[phases - 1]} shared transformer block{'s' if phases > 1 else ''}"
        summary = (f'{opening(folder.name, record, model.blocks.steps)}\n\n{count} that an ODE solver evaluates K '
                   f'times (ODE-ViT, arXiv 2511.16501), {origin}')
    else:
        summary = (f'DeiT-tiny, fine-tuned on {dataset} at {pixels} pixels: the teacher of the `odevit_*` students of '
                   f'{dataset}.')
    continued = re.search(r'--student local-dir:hub/(\S+)', record['command'].splitlines()[0])
    few = f' It continues `{continued[1]}` for {epochs} epochs.' if continued else ''

    if record['trained_at'] and len(record['trained_at']) == 1:
        few += f" It was trained with K = {record['trained_at'][0]} only: with any other K it is less accurate."
    enlarged = f' enlarged to {pixels}' if pixels > 32 else ''
    pretrained = '' if scratch else (
        '`deit_tiny_patch16_224` (Facebook Research, Apache-2.0; LayerNorm parameters rounded to steps of 1/32 or '
        '1/64) and ')
    recipes = 'recipes are' if (folder / EARLIER[0]).exists() else 'recipe is'
    training = (f"On {record['device']}, {record['minutes']:.0f} minutes, {record['versions']}; the {recipes} in "
                f"this folder:\n\n```bash\n{commands(record, folder)}\n```")
    if 'start' in record:
        training += f"\n\n{record['start']}"
    if 'curve' in record:
        last = '' if len(record['curve']) == epochs else f" of the last {len(record['curve'])} epochs"
        training += (f"\n\nTop-1 on the images held out, after each{last or ' epoch'}: "
                     f"{', '.join(map(str, record['curve']))} %.")
    return model_card(
        folder.name,
        model,
        summary=summary,
        results=record['test'],
        dataset=dataset,
        protocol=f'{images:,} test images of {dataset} at {pixels} pixels; the epoch was chosen on training images '
                 'held out.',
        trained_at=record['trained_at'],
        training=training,
        limits=f'Trained on {dataset} only, 32-pixel photos of its classes{enlarged}; it knows no other images.{few}',
        provenance=f'Made from {pretrained}{dataset} (Krizhevsky 2009).',
    )


def main():
    for path in sorted(HUB.glob('*/results.json')):
        (path.parent / 'README.md').write_text(card(path.parent))


if __name__ == '__main__':
    main()
