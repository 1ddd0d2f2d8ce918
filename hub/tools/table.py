"""Write the tables of README.md from hub/*/results.json and hub/dial/*.json, and draw hub/dial/dial.png.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them into README.md, between their marks, and draw
"""
import importlib.util
import json
import re
import sys
from pathlib import Path

HUB = Path(__file__).parent.parent
README = HUB.parent / 'README.md'
DIALS = {'imagenet_sample': '500 photos of ImageNet', 'cifar100': 'CIFAR-100'}
DATASETS = {'cifar100': 'CIFAR-100', 'cifar10': 'CIFAR-10'}
# what others kept of their teachers, from their papers
OTHERS = [
    ('ODE-ViT Base, arXiv 2511.16501: ViT-B, 7 M', 'CIFAR-100', '7 M', '-', '72.1', '81.8'),
    ('ODE-ViT Base, arXiv 2511.16501: ViT-B, 7 M', 'CIFAR-10', '7 M', '-', '88.5', '95.9'),
    ('Raptor, arXiv 2512.19941: DINOv2-B, 2 blocks', 'ImageNet-1k probe', '-', '-', '-', '96'),
    ('Raptor, arXiv 2512.19941: DINOv2-B, 3 blocks', 'ImageNet-1k probe', '-', '-', '-', '98'),
]


def models():
    rows = ['| model | data | parameters | K | top-1 % | kept % |', '|' + ' --- |' * 6]
    paths = sorted(HUB.glob('*/results.json'), key=lambda path: (path.parent.name.split('_')[-1], path.parent.name))
    for path in paths:
        record, name = json.loads(path.read_text()), path.parent.name
        dataset = DATASETS[name.replace('.', '_').rsplit('_', 1)[-1]]
        for r in record['test']:
            if r['model'] == 'teacher' or r['steps'] not in (None, 6, 8, 12, 16, 24):
                continue
            kept = '-' if r['kept'] is None else f"{r['kept']:.1f}"
            steps = r['steps'] or '-'
            rows.append(f"| `{name}` | {dataset} | {r['parameters']:,} | {steps} | {r['top1']:.2f} | {kept} |")
    return '\n'.join([*rows, *(f"| {' | '.join(row)} |" for row in OTHERS)]) + '\n'


def dial():
    records = _dials()
    if not records:
        return ''
    text = ['### The size dial', '', '![Top-1 kept against parameters](hub/dial/dial.png)', '']
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


TABLES = {'models': models, 'dial': dial}


def main():
    text = README.read_text()
    for name, table in TABLES.items():
        marks = re.compile(rf'(<!-- {name}: python hub/tools/table.py -->\n).*?(<!-- end -->)', re.S)
        text = marks.sub(lambda found, table=table: found[1] + table() + found[2], text)
    if '--write' in sys.argv:
        README.write_text(text)
        if _dials():
            _example().plot(_dials(), HUB / 'dial' / 'dial.png')
    else:
        print(*(table() for table in TABLES.values()), sep='\n')


if __name__ == '__main__':
    main()
