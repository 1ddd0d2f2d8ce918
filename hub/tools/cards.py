"""Write the card of each published model, hub/*/README.md, from its results.json, for `table.py --write`."""
import json
import re
from pathlib import Path

import timm

from timm_odevit.ode.blocks import find_ode_blocks
from timm_odevit.saving.cards import model_card

HUB = Path(__file__).parent.parent
EARLIER = ('earlier.yaml', 'earlier2.yaml', 'earlier3.yaml', 'earlier4.yaml')  # recipes of the runs before, in order
DATASETS = {'cifar100': 'CIFAR-100', 'cifar10': 'CIFAR-10'}
PLAIN = 'odevit_tiny_native_three_patch16_128.deit_tiny_'  # have as many parameters as hub/runs/plain.json


def read(name):
    """The tree of a record of hub/."""
    return json.loads((HUB / name).read_text())


def dataset_of(name):
    """'CIFAR-10' for 'deit_tiny_patch16_64.cifar10' and for 'odevit_tiny_native_patch16_64.deit_tiny_cifar10'."""
    return DATASETS[name.replace('.', '_').rsplit('_', 1)[-1]]


def teacher_of(name):
    return f"deit_tiny_patch{name.partition('patch')[2].partition('.')[0]}.{name.rpartition('_')[2]}"


def commands(record, folder):
    """The commands of a record, as they run in the model's own folder: other published models go by their names."""
    here = record['command'].replace(f'hub/{folder.name}/', '')
    here = re.sub(r'hub/runs/\S+[.]yaml', 'recipe.yaml', here).replace('local-dir:hub/runs/', 'local-dir:out/')
    return re.sub('local-dir:hub/', '', here)


def opening(name, record, steps):
    """Accuracy, size, K of training, and what a sceptic lays beside them."""
    row = next(r for r in record['test'] if r['model'] != 'teacher' and r['steps'] == steps)
    share = '' if row['kept'] is None else f", {row['kept']:.0f} % of its teacher's"
    said = [f"**{row['top1']:.1f} % top-1** with K = {steps}{share}; {row['parameters'] / 1e6:.2f} million parameters; "
            f"trained with K = {', '.join(map(str, record['trained_at']))}."]
    files = {r['name']: r for group in read('verdict.json')['groups'] for r in group['rows']}
    names = (f'{name}, int8, K = {steps}', f'{teacher_of(name)}, int8')
    if all(each in files for each in names):
        said.append('As int8, it takes {:.2f} MB and has {:.1f} %, DeiT-tiny {:.2f} MB and {:.1f} %.'.format(
            *(files[each][key] for each in names for key in ('mb', 'value'))))
    if name.startswith(PLAIN) and name.endswith('cifar100'):
        plain = read('runs/plain.json')[1]
        said.append(f"A plain ViT of as many parameters ({plain['steps']} of an earlier teacher's blocks, each used "
                    f"once), trained once by the same script, has {plain['top1']:.1f} %, with "
                    f"1/{steps // plain['steps']} of the operations.")
    return ' '.join(said)


def card(folder):
    record = read(folder.absolute() / 'results.json')
    model = timm.create_model(f'local-dir:{folder}')
    dataset = dataset_of(folder.name)
    pixels, images, epochs = model.patch_embed.img_size[0], record['test'][0]['images'], record.get('epochs')
    was, published = record['test'][0]['top1'], HUB / teacher_of(folder.name) / 'results.json'
    now = read(published)['test'][0]['top1'] if published.exists() else was
    earlier = f', before the published one, to {was:.1f} % of the test images'
    scratch = not any(row['model'] == 'teacher' for row in record['test']) and bool(find_ode_blocks(model))
    if find_ode_blocks(model):
        origin = f'trained from scratch on the labels of {dataset}.' if scratch else (
            f"distilled from a DeiT-tiny that was fine-tuned on {dataset}{'' if now == was else earlier}.")
        phases = model.blocks.config.phases
        count = f"{('One', 'Two', 'Three', 'Four')[phases - 1]} shared transformer block{'s' if phases > 1 else ''}"
        summary = (f'{opening(folder.name, record, model.blocks.steps)}\n\n{count} that an ODE solver evaluates K '
                   f'times (ODE-ViT, arXiv 2511.16501), {origin}')
    else:
        summary = (f'DeiT-tiny, fine-tuned on {dataset} at {pixels} pixels: the teacher of the `odevit_*` students of '
                   f'{dataset} whose cards name no other.')
    few = '' if len(record['trained_at']) != 1 else (
        f" It was trained with K = {record['trained_at'][0]} only: with any other K it is less accurate.")
    enlarged = f' enlarged to {pixels}' if pixels > 32 else ''
    pretrained = '' if scratch else (
        '`deit_tiny_patch16_224` (Facebook Research, Apache-2.0; LayerNorm parameters rounded to steps of 1/32 or '
        '1/64) and ')
    recipes = 'recipes are' if (folder / EARLIER[0]).exists() else 'recipe is'
    spent = ', then '.join(f"{span['minutes']:.0f} minutes on {span['device']}"
                           for span in (*record.get('before', ()), record))
    training = (f"{spent} ({record['versions']}). The {recipes} in this folder:\n\n```bash\n"
                f"{commands(record, folder)}\n```")
    if 'start' in record:
        training += f"\n\n{record['start']}"
    if 'curve' in record and 'start' not in record:  # which has it
        curve = record['curve']
        stride = -(-len(curve) // 15)
        which = f'every {stride} epochs' if stride > 1 else 'after each epoch'
        last = '' if len(curve) == epochs else f' of the last {len(curve)}'
        shown = ', '.join(map(str, curve[::-stride][::-1]))
        training += f'\n\nTop-1 on the images held out, {which}{last}: {shown} %.'
    return model_card(
        folder.name,
        model,
        summary=summary,
        results=record['test'],
        dataset=dataset,
        protocol=f'{images:,} test images of {dataset} at {pixels} pixels; '
                 + record.get('epoch', 'the epoch was chosen on training images held out.'),
        trained_at=record['trained_at'],
        training=training,
        limits=f'Trained on {dataset} only, 32-pixel photos of its classes{enlarged}; it knows no other images.{few}',
        provenance=f'Made from {pretrained}{dataset} (Krizhevsky 2009).',
    )


def main():
    for path in sorted(HUB.glob('*/results.json')):
        (path.parent / 'README.md').write_text(card(path.parent))
