"""Write the tables of README.md (models) and hub/RESULTS.md (ablations, dial) from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, and draw hub/dial/dial.png
"""
import importlib.util
import json
import re
import sys
from pathlib import Path

from cards import dataset_of

from timm_odevit.training.ablate import table

HUB = Path(__file__).parent.parent
README, RESULTS = HUB.parent / 'README.md', HUB / 'RESULTS.md'
DIALS = {'imagenet_sample': '500 photos of ImageNet', 'cifar100': 'CIFAR-100'}
STEPS = (6, 8, 12, 16, 24)
# what others kept of their teachers, from their papers
OTHERS = [
    ('ODE-ViT Base, arXiv 2511.16501: of a ViT-B', 'CIFAR-100', '7 M', '72.1', '81.8'),
    ('ODE-ViT Base, arXiv 2511.16501: of a ViT-B', 'CIFAR-10', '7 M', '88.5', '95.9'),
    ('Raptor, arXiv 2512.19941: of a DINOv2-B, 2 blocks', 'ImageNet-1k probe', '-', '-', '96'),
    ('Raptor, arXiv 2512.19941: of a DINOv2-B, 3 blocks', 'ImageNet-1k probe', '-', '-', '98'),
]


def models():
    heads = ['model', 'data', 'parameters', *(f'K = {steps}' for steps in STEPS), 'kept %']
    rows = [f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads)]
    paths = sorted(HUB.glob('*/results.json'), key=lambda path: (path.parent.name.split('_')[-1], path.parent.name))
    for path in paths:
        name, record = path.parent.name, json.loads(path.read_text())
        dataset = dataset_of(name)
        trained, found = record['trained_at'], {r['steps']: r for r in record['test'] if r['model'] != 'teacher'}
        cells = [f"**{found[k]['top1']:.2f}**" if k in trained else f"{found[k]['top1']:.2f}" if k in found else '-'
                 for k in STEPS] if None not in found else ['', '', f"{found[None]['top1']:.2f}", '', '']
        row = found.get(12) or found[None]
        kept = '' if row['kept'] is None else f"{row['kept']:.1f}"
        rows.append(f"| `{name}` | {dataset} | {row['parameters']:,} | {' | '.join(cells)} | {kept} |")
    for name, dataset, parameters, top1, kept in OTHERS:
        rows.append(f'| {name} | {dataset} | {parameters} | | | {top1} | | | {kept} |')
    return '\n'.join(rows) + '\n'


def ablation():
    path = HUB / 'ablation.json'
    return table(json.loads(path.read_text())) if path.exists() else ''


def dial():
    records = _dials()
    if not records:
        return ''
    text = ['## The size dial', '', '![Top-1 kept against parameters](dial/dial.png)', '']
    for title, record in records.items():
        images, teacher = record['images'], record['teacher']
        minutes = max(row['minutes'] for row in record['rows'])
        text += [
            f"{title}: DeiT-tiny at {images['size']} px, {teacher['top1']:.1f} % top-1 on {images['test']:,} test "
            f"images; calibrated on {images['calibration']:,} images without labels, at most {minutes:.0f} minutes a "
            f"point ({record['device']}).", '', _example().table(record), '']
    return '\n'.join(text)


def _example():
    path = HUB.parent / 'examples' / 'dial.py'
    spec = importlib.util.spec_from_file_location('dial', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dials():
    paths = {title: HUB / 'dial' / f'{name}.json' for name, title in DIALS.items()}
    return {title: json.loads(path.read_text()) for title, path in paths.items() if path.exists()}


TABLES = {'models': (README, models), 'ablation': (RESULTS, ablation), 'dial': (RESULTS, dial)}


def main():
    if '--write' not in sys.argv:
        print(*(make() for _, make in TABLES.values()), sep='\n')
        return
    for name, (path, make) in TABLES.items():
        marks = re.compile(rf'(<!-- {name}: python hub/tools/table.py -->\n).*?(<!-- end -->)', re.S)
        text, count = marks.subn(lambda found, make=make: found[1] + make() + found[2], path.read_text())
        if not count:
            raise SystemExit(f'{path.name} has no place for the table {name}: {marks.pattern}')
        path.write_text(text)
    if _dials():
        _example().plot(_dials(), HUB / 'dial' / 'dial.png')


if __name__ == '__main__':
    main()
