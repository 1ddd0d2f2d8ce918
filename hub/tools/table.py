"""Write the tables of README.md and of the pages in hub/ and examples/ from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, draw hub/pictures/*.png, and write the cards
"""
import json
import re
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import cards
from first_page import compare, frontier, idea, in_words, models, published, rows, which
from pictures import MODELS, OTHERS, draw

HUB = Path(__file__).parent.parent
README = HUB.parent / 'README.md'
RESULTS, SPEED, DYNAMICS, TRAINING = (HUB / f'{page}.md' for page in ('RESULTS', 'SPEED', 'DYNAMICS', 'TRAINING'))
# models that were timed and are not published, as hub/SPEED.md names them
TIMED = {
    'vit_tiny_patch16_224': 'vit_tiny, 12 blocks', 'local-dir:out/native': 'one block',
    'local-dir:out/paper': "the paper's block"}


def speed(name):
    """What `odevit benchmark --json` wrote: a row per model, two columns per batch size."""
    record = json.loads((HUB / 'speed' / f'{name}.json').read_text())
    found = {}
    for r in record['timings']:
        found.setdefault(r['name'], []).append(r)
    heads = [f"batch {r['batch_size']}: {what}" for r in next(iter(found.values())) for what in ('ms', 'ratio')]
    lines = []
    for model, timings in found.items():
        base, *state = model.split(', ')
        if not state and timings[0]['evaluations']:
            state = [f"K = {timings[0]['evaluations']:g}"]
        title = ', '.join([TIMED.get(base) or in_words(base, None), *state])
        lines.append([title] + [cell for r in timings for cell in (
            f"{1000 * r['seconds']:.1f} ± {50 * r['iqr'] / r['seconds']:.0f} %", f"{r['ratio']:.2f}")] + [
                f"{timings[-1]['peak'] / 1e6:.1f}", f"{timings[0]['size'] / 1e6:.1f}"])
    return rows(['', *heads, f"peak memory at batch {timings[-1]['batch_size']}, MB", 'weights, MB'], lines)


def trained():
    lines = []
    for name, record, _ in published():
        spans = [f"{span['minutes']:.0f} on {span['device'].replace('one core of ', '')}"
                 for span in (*record.get('before', ()), record)]
        lines.append([f'[`{name}`]({name}/README.md)', cards.dataset_of(name), str(record['epochs']),
                      ', then '.join(spans)])
    return rows(['model', 'data', 'epochs', 'minutes'], lines)


def records():
    """What hub/tools/dynamics.py measured, by model and measure; the teacher comes first."""
    found = {}
    for path in sorted((HUB / 'dynamics').glob('*/*.json')):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


def robustness():
    """The points that corruptions cost, of a teacher and its students."""
    record, lines = json.loads((HUB / 'robustness.json').read_text()), []
    for label, row in record['summary'].items():
        name, *steps = label.split(', ')
        clean, words = record['clean'][label], {**MODELS, **OTHERS}[name][0].partition(', K')[0]
        lines.append([', '.join([words, *steps]), f"{clean['top1']:.1f}", *(
            f'{row[kind]:.1f}' for kind in ('lost', 'noise', 'blur', 'weather', 'digital')),
            *(f'{each:.1f}' for each in (clean['ece'], clean['ece at temperature'], row['ece'])),
            f"{record['PGD, 0.5'][label]:.0f}"])
    heads = ['model', 'clean, %', 'lost', 'noise', 'blur', 'weather', 'digital', 'ECE', 'scaled', 'corrupted', 'PGD, %']
    return rows(heads, lines)


def per_model(heads, cells):
    """A row for each model, with the cells that a function makes of what was found by measure."""
    return rows(['model', *heads], [[MODELS[name][0], *cells({key: m['found'] for key, m in measures.items()})]
                                    for name, measures in records().items()])


def spread(found, digits=3):
    return f"{round(found['mean'], digits) + 0.:.{digits}f} ± {found['sd']:.{digits}f}"  # no -0.000


def exponents():
    heads = ['largest exponent', 'drift', 'of the class token alone', 'drift', 'images without an exponent']
    return per_model(heads, lambda m: [
        spread(m['exponents']), f"{m['exponents']['drift']:.2f}", spread(m['class_token']),
        f"{m['class_token']['drift']:.2f}", str(m['exponents']['without'])])


def constants():
    def cells(m):
        missed = {row['steps']: row for row in reversed(m.get('discretisation', ()))}.get(len(m['lipschitz']['along']))
        return [spread(m['lipschitz'], 2), f"{m['lipschitz']['largest']:.1f}", spread(m['softmax']),
                f"{max(m['spectral_norms'].values()):.1f}", f"{100 * missed['error']:.0f}" if missed else '']
    heads = ['local Lipschitz constant, mean along the way', 'largest', "JaSMin's g_1", 'largest spectral norm',
             'missed of the path, %']
    return per_model(heads, cells)


DESIGNS = {'plain': 'K blocks of the teacher, each once', 'one': 'one block', 'three': 'three blocks',
           'two': 'two blocks, residuals of rank 11', 'narrow': 'a ViT with 64 channels', 'wrn': 'WRN-16-2 at 32 px',
           'stepwise': ', stepwise first', 'corrupt': ', corrupted', 'late': ', corrupted late', 's': ', another seed'}


def designs(folder):
    found = []
    for path in (HUB / 'lab' / folder).glob('*.json'):
        name, *more, minutes = path.stem.split('-')
        results = json.loads(path.read_text())
        own = next((row for row in results if name.endswith(str(row['steps']))), results[0])
        words = ''.join(DESIGNS[each.rstrip('0123456789')] for each in (name, *more))
        found.append([minutes, words, f"{own['steps'] or ''}", f"{own['top1']:.1f}"])
    return rows(['minutes', 'student', 'K', 'top-1 %'], sorted(found, key=lambda row: (int(row[0]), -float(row[3]))))


TABLES = {
    **{name: (HUB / 'lab' / 'minutes.md', partial(designs, name)) for name in ('designs', 'thirty')},
    'which': (README, which), 'models': (RESULTS, models),
    'speed at 224 px': (SPEED, partial(speed, 'tiny_224')), 'speed at 128 px': (SPEED, partial(speed, 'published_128')),
    'trained': (TRAINING, trained), 'exponents': (DYNAMICS, exponents), 'constants': (DYNAMICS, constants),
    'robustness': (HUB.parent / 'examples' / 'robustness.md', robustness)}
PAGES = (README, *sorted([*HUB.glob('*.md'), *HUB.glob('lab/*.md'), *HUB.parent.glob('examples/*.md')]))


def look_up(source, path):
    """A number in a record of hub/: `*three*k6*:test/steps=6/top1` is of the one published model of such a name."""
    record, = HUB.glob(source if source.endswith('.json') else f'{source}/results.json')
    found = json.loads(record.read_text())
    for part in path.split('/'):
        if isinstance(found, dict):
            found = found[part]
        else:
            key, _, text = part.partition('=')
            found = next(row for row in found if fnmatch(str(row[key]), text)) if text else found[int(part)]
    return found


def tied(text):
    """The text with each number that has a comment such as <!-- =deit*:test/0/top1 --> as its record has it."""
    return re.sub(r'(\d+)(\.\d+|)(<!-- =(\S+?):(.+?) -->)', lambda found: '{:.{}f}{}'.format(
        look_up(*found.groups()[3:]), max(len(found[2]) - 1, 0), found[3]), text)


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
    for path in PAGES:
        path.write_text(tied(path.read_text()))
    idea(HUB / 'pictures' / 'idea.png')
    frontier(HUB / 'pictures' / 'frontier.png')
    compare(HUB / 'pictures' / 'compare.png')
    draw()
    cards.main()


if __name__ == '__main__':
    main()
