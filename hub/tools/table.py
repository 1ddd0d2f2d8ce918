"""Write the tables of README.md and of the pages in hub/ and examples/ from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, draw hub/pictures/*.png, and write the cards
"""
import re
import sys
from fnmatch import fnmatch
from functools import partial
from statistics import mean

import cards
from cards import HUB, read
from first_page import compare, frontier, idea, in_words, models, published, rows, which
from generate import put
from pictures import MODELS, OTHERS, by_design, draw

README = HUB.parent / 'README.md'
RESULTS, SPEED, DYNAMICS, TRAINING = (HUB / f'{page}.md' for page in ('RESULTS', 'SPEED', 'DYNAMICS', 'TRAINING'))
# models that were timed and are not published, as hub/SPEED.md names them
TIMED = {'vit_tiny_patch16_224': 'vit_tiny, 12 blocks', 'local-dir:out/native': 'one block',
         'local-dir:out/paper': "the paper's block"}


def speed(name):
    """What `odevit benchmark --json` wrote: a row per model, two columns per batch size."""
    record, found = read(f'speed/{name}.json'), {}
    for r in record['timings']:
        found.setdefault(r['name'], []).append(r)
    heads = [f"batch {r['batch_size']}: {what}" for r in next(iter(found.values())) for what in ('ms', 'ratio')]
    lines = []
    for model, timings in found.items():
        base, *state = model.split(', ')
        state = state or ([f"K = {timings[0]['evaluations']:g}"] if timings[0]['evaluations'] else [])
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


def robustness():
    """The points that corruptions cost, of a teacher and its students."""
    record, lines = read('robustness.json'), []
    for label, row in record['summary'].items():
        name, *steps = label.split(', ')
        clean, words = record['clean'][label], {**MODELS, **OTHERS}[name][0].partition(', K')[0]
        lines.append([', '.join([words, *steps]), f"{clean['top1']:.1f}", *(
            f'{row[kind]:.1f}' for kind in ('lost', 'noise', 'blur', 'weather', 'digital')),
            *(f'{each:.1f}' for each in (clean['ece'], clean['ece at temperature'], row['ece at temperature'])),
            f"{record['PGD, 0.5'][label]:.0f}"])
    heads = ['model', 'clean, %', 'lost', 'noise', 'blur', 'weather', 'digital', 'ECE', 'scaled', 'corrupted', 'PGD, %']
    return rows(heads, lines)


def per_model(heads, cells):
    """A row for each model, the teacher first: the cells of what hub/tools/dynamics.py found, by measure."""
    return rows(['model', *heads], [
        [MODELS[folder.name][0], *cells({path.stem: read(path)['found'] for path in folder.glob('*.json')})]
        for folder in sorted((HUB / 'dynamics').glob('*deit*'))])


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


def designs(folder):
    lines = []
    for (minutes, words, steps), found in by_design(folder).items():
        top1 = [row['top1'] for row in found]
        seeds = f' ({min(top1):.1f} to {max(top1):.1f})' if len(top1) > 1 else ''
        lines.append([f'{minutes}', words, f"{steps or ''}", f'{mean(top1):.1f}{seeds}'])
    return rows(['minutes', 'student', 'K', 'top-1 %'],
                sorted(lines, key=lambda row: (int(row[0]), -float(row[3].partition(' ')[0]))))


TABLES = {
    **{name: (HUB / 'lab' / 'minutes.md', partial(designs, name)) for name in ('designs', 'controls')},
    'which': (README, which), 'models': (RESULTS, models),
    'speed at 224 px': (SPEED, partial(speed, 'tiny_224')), 'speed at 128 px': (SPEED, partial(speed, 'published_128')),
    'trained': (TRAINING, trained), 'exponents': (DYNAMICS, exponents), 'constants': (DYNAMICS, constants),
    'robustness': (HUB.parent / 'examples' / 'robustness.md', robustness)}
PAGES = (README, *sorted([*HUB.glob('*.md'), *HUB.glob('lab/*.md'), *HUB.parent.glob('examples/*.md')]))


def look_up(source, path):
    """A number in a record of hub/ (`*three*k12*:test/steps=12/top1`: of the one model of such a name); min: and max:
    before the path take one of all that match `*`, in all such records."""
    def inside(found, part):
        key, _, text = part.partition('=')
        return ([each for name, each in found.items() if fnmatch(name, part)] if isinstance(found, dict) else
                [each for each in found if fnmatch(str(each[key]), text)] if text else [found[int(part)]])
    take, _, path = path.rpartition(':')
    found = [read(record) for record in HUB.glob(source if source.endswith('.json') else f'{source}/results.json')]
    assert take or len(found) == 1, f'{source}: {len(found)} records'
    for part in path.split('/'):
        found = [child for each in found for child in inside(each, part)]
    return {'min': min, 'max': max}[take](found) if take else found[0]


def tied(text):
    """The text with each number that has a comment such as <!-- =deit*:test/0/top1 --> as its record has it."""
    return re.sub(r'(\d+)(\.\d+|)(<!-- =(\S+?):(.+?) -->)', lambda found: '{:.{}f}{}'.format(
        look_up(*found.groups()[3:]), max(len(found[2]) - 1, 0), found[3]), text)


def main():
    put(TABLES, 'hub/tools/table.py')
    if '--write' not in sys.argv:
        return
    for path in PAGES:
        path.write_text(tied(path.read_text()))
    for make in (idea, frontier, compare):
        make().savefig(HUB / 'pictures' / f'{make.__name__}.png', dpi=130)
    draw()
    cards.main()


if __name__ == '__main__':
    main()
