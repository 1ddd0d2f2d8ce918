"""Write the results table of README.md from hub/runs/*/results.json.

    python hub/table.py            print it
    python hub/table.py --write    put it into README.md, between its marks
"""
import json
import re
import sys
from pathlib import Path

HUB = Path(__file__).parent
README = HUB.parent / 'README.md'
MARKS = re.compile(r'(<!-- cifar: python hub/table.py -->\n).*?(<!-- end -->)', re.S)
NAMES = {
    'teacher': 'DeiT-tiny, 12 blocks (the teacher)',
    'native': 'ODE-ViT, `native`, `lie_trotter`, `mean`',
    'lipschitz': "ODE-ViT, `lipschitz`, `euler`, `spectral` (the paper's block)",
}


def table():
    rows = ['| model | parameters | K | top-1 % | top-5 % | kept % | agreement % |', '|' + ' --- |' * 7]
    for name, title in NAMES.items():
        path = HUB / 'runs' / name / 'results.json'
        if not path.exists():
            continue
        results = json.loads(path.read_text())['test']
        for r in results[-1:] if name == 'teacher' else results[1:]:
            shown = ['-' if r[key] is None else f'{r[key]:.1f}' for key in ('top1', 'top5', 'kept', 'agreement')]
            rows.append(f"| {title} | {r['parameters']:,} | {r['steps'] or '-'} | {' | '.join(shown)} |")
    return '\n'.join(rows) + '\n'


if __name__ == '__main__':
    if '--write' in sys.argv:
        README.write_text(MARKS.sub(lambda marks: marks[1] + table() + marks[2], README.read_text()))
    else:
        print(table(), end='')
