"""Write the tables of README.md from hub/runs/*/results.json and hub/dial/*.json, and draw hub/dial/dial.png.

    python hub/table.py            print them
    python hub/table.py --write    put them into README.md, between their marks, and draw
"""
import importlib.util
import json
import re
import sys
from pathlib import Path

HUB = Path(__file__).parent
README = HUB.parent / 'README.md'
RUNS = {
    'teacher': 'DeiT-tiny, 12 blocks (the teacher)',
    'native': 'ODE-ViT, `native`, `lie_trotter`, `mean`',
    'lipschitz': "ODE-ViT, `lipschitz`, `euler`, `spectral` (the paper's block)",
}
DIALS = {'imagenet_sample': '500 photos of ImageNet', 'cifar100': 'CIFAR-100'}


def runs():
    rows = ['| model | parameters | K | top-1 % | top-5 % | kept % | agreement % |', '|' + ' --- |' * 7]
    for name, title in RUNS.items():
        path = HUB / 'runs' / name / 'results.json'
        if not path.exists():
            continue
        results = json.loads(path.read_text())['test']
        for r in results[-1:] if name == 'teacher' else results[1:]:
            shown = ['-' if r[key] is None else f'{r[key]:.1f}' for key in ('top1', 'top5', 'kept', 'agreement')]
            rows.append(f"| {title} | {r['parameters']:,} | {r['steps'] or '-'} | {' | '.join(shown)} |")
    return '\n'.join(rows) + '\n'


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


TABLES = {'cifar': runs, 'dial': dial}


def main():
    text = README.read_text()
    for name, table in TABLES.items():
        marks = re.compile(rf'(<!-- {name}: python hub/table.py -->\n).*?(<!-- end -->)', re.S)
        text = marks.sub(lambda found, table=table: found[1] + table() + found[2], text)
    if '--write' in sys.argv:
        README.write_text(text)
        if _dials():
            _example().plot(_dials(), HUB / 'dial' / 'dial.png')
    else:
        print(*(table() for table in TABLES.values()), sep='\n')


if __name__ == '__main__':
    main()
