"""Write the tables of README.md and of the pages in hub/ from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, and draw hub/kept.png, hub/steps.png and
                                         hub/pictures/*.png
"""
import json
import re
import sys
from functools import partial
from pathlib import Path

from ablate import table
from cards import dataset_of
from pictures import MODELS, draw

HUB = Path(__file__).parent.parent
README = HUB.parent / 'README.md'
RESULTS, SPEED, DYNAMICS, TRAINING = (HUB / f'{page}.md' for page in ('RESULTS', 'SPEED', 'DYNAMICS', 'TRAINING'))
STEPS = (6, 8, 12, 16, 24)
# what others kept of their teachers, from their papers
OTHERS = [
    ('ODE-ViT Base, arXiv 2511.16501: of a ViT-B', 'CIFAR-100', '7 M', '72.1', '81.8'),
    ('ODE-ViT Base, arXiv 2511.16501: of a ViT-B', 'CIFAR-10', '7 M', '88.5', '95.9'),
    ('ODE-ViT, arXiv 2511.16501: from scratch', 'CIFAR-100', '4.2 M', '57.9', '-'),
    ('Raptor, arXiv 2512.19941: of a DINOv2-B, 2 blocks', 'ImageNet-1k probe', '-', '-', '96'),
    ('Raptor, arXiv 2512.19941: of a DINOv2-B, 3 blocks', 'ImageNet-1k probe', '-', '-', '98'),
]
# the same for the figure: percentages of the teacher's parameters and of its accuracy. Raptor's parameters are those of
# a ViT-B/14 with 2 and 3 of its 12 blocks
REPORTED = [
    ('ODE-ViT Base of a ViT-B, CIFAR-100 and -10 (arXiv 2511.16501)', 'D', [(8.1, 81.8), (8.1, 95.9)]),
    ('Raptor of a DINOv2-B, ImageNet-1k probe (arXiv 2512.19941)', '^', [(18.1, 96.), (26.3, 98.)]),
]
# models that were timed, as hub/SPEED.md names them
TIMED = {
    'vit_tiny_patch16_224': 'vit_tiny, 12 blocks', 'local-dir:out/native': 'one block',
    'local-dir:out/paper': "the paper's block", 'local-dir:out/rank8': 'one block and residuals of rank 8',
    **{name: title for name, (title, _) in MODELS.items()}}


def rows(heads, lines):
    """A table in Markdown."""
    return '\n'.join([f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads),
                      *(f"| {' | '.join(line)} |" for line in lines)]) + '\n'


def models():
    lines = []
    paths = sorted(HUB.glob('*/results.json'), key=lambda path: (dataset_of(path.parent.name), path.parent.name))
    for path in paths:
        name, record = path.parent.name, json.loads(path.read_text())
        trained, found = record['trained_at'], {r['steps']: r for r in record['test'] if r['model'] != 'teacher'}
        if None in found:
            cells = ['', '', f"{found[None]['top1']:.2f}", '', '']
        else:
            shown = {k: f"{r['top1']:.2f}" for k, r in found.items()}
            cells = [f'**{shown[k]}**' if k in trained else shown.get(k, '-') for k in STEPS]
        row = found.get(12) or found.get(None) or found[trained[0]]
        kept = '' if row['kept'] is None else f"{row['kept']:.1f}"
        lines.append([f'`{name}`', dataset_of(name), f"{row['parameters']:,}", *cells, kept])
    lines += [[*about, '', '', top1, '', '', kept] for *about, top1, kept in OTHERS]
    return rows(['model', 'data', 'parameters', *(f'K = {steps}' for steps in STEPS), 'kept %'], lines)


def ablation():
    return table(json.loads((HUB / 'lab' / 'ablation.json').read_text()))


def paper():
    record = json.loads((HUB / 'speed' / 'paper.json').read_text())
    return rows(['', 'ms', 'times as fast', 'peak memory, MB', 'from outside, MB'], [
        [f"{r['what']}, {r['model']}", f"{r['ms']:.0f}", f"{r['ratio']:.2f}", f"{r['bytes'] / 1e6:.0f}",
         f"{r['resident'] / 1e6:.0f}"] for r in record['found']])


def speed(name):
    """What `odevit benchmark --json` wrote: a row for each model, two columns for each batch size."""
    record = json.loads((HUB / 'speed' / f'{name}.json').read_text())
    found = {}
    for r in record['timings']:
        found.setdefault(r['name'], []).append(r)
    heads = [f"batch {r['batch_size']}: {what}" for r in next(iter(found.values())) for what in ('ms', 'ratio')]
    lines = []
    for model, timings in found.items():
        base, *state = model.split(', ')
        lines.append([', '.join([TIMED[base], *state])] + [cell for r in timings for cell in (
            f"{1000 * r['seconds']:.1f} ± {50 * r['iqr'] / r['seconds']:.0f} %", f"{r['ratio']:.2f}")] + [
                f"{timings[-1]['peak'] / 1e6:.1f}", f"{timings[0]['size'] / 1e6:.1f}"])
    return rows(['', *heads, f"peak memory at batch {timings[-1]['batch_size']}, MB", 'weights, MB'], lines)


def trained():
    lines = []
    for path in sorted(HUB.glob('*/results.json'), key=lambda path: (dataset_of(path.parent.name), path.parent.name)):
        record, name = json.loads(path.read_text()), path.parent.name
        lines.append([f'[`{name}`]({name}/README.md)', dataset_of(name), str(record['epochs']),
                      f"{record['minutes'] / 60:.1f}", record['device'].split(' (')[0].removeprefix('one core of an ')])
    return rows(['model', 'data', 'epochs', 'hours', 'one core of an'], lines)


def figure(path):
    """Plot the share of the teacher's accuracy that is kept against the share of its parameters, for all students."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
    points = {}
    for found in sorted(HUB.glob('*/results.json')):
        teacher, *students = sorted(json.loads(found.read_text())['test'], key=lambda r: r['model'] != 'teacher')
        kept = [r for r in students if r['steps'] == 12 and r['kept'] is not None]
        if kept:
            share = 100 * kept[0]['parameters'] / teacher['parameters']
            points.setdefault(dataset_of(found.parent.name), []).append((share, kept[0]['kept']))
    axes = (drawing := Figure(figsize=(7, 3.6), layout='constrained')).subplots()
    for (name, pairs), marker in zip(points.items(), 'os', strict=True):
        axes.plot(*zip(*pairs, strict=True), marker, label=f'students, {name}')
    record = json.loads((HUB / 'dial' / 'cifar100.json').read_text())
    pairs = [[100 * row[key] / record['teacher'][key] for key in ('parameters', 'top1')] for row in record['rows']]
    axes.plot(*zip(*pairs, strict=True), '.-', linewidth=1, alpha=0.6,
              label='calibrated for minutes without labels, CIFAR-100')
    for name, marker, pairs in REPORTED:
        axes.plot(*zip(*pairs, strict=True), marker, fillstyle='none', label=name)
    axes.plot(100, 100, '*', color='black', markersize=11, label='teacher')
    axes.set(xlabel="parameters, % of the teacher's", ylabel="top-1 accuracy, % of the teacher's", xscale='log',
             ylim=(40, 103))
    axes.set_xticks(ticks := (8, 10, 15, 25, 40, 60, 100), [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc='lower right')
    drawing.savefig(path, dpi=150)


def steps_figure(path):
    """Plot top-1 accuracy against the number of steps, of the students of CIFAR-100, and their teachers."""
    from matplotlib.figure import Figure
    axes, teachers = (drawing := Figure(figsize=(7, 3.4), layout='constrained')).subplots(), set()
    for found in sorted(HUB.glob('odevit_*_cifar100/results.json')):
        teacher, *students = sorted(json.loads(found.read_text())['test'], key=lambda r: r['model'] != 'teacher')
        name = found.parent.name.split('.')[0].removeprefix('odevit_tiny').removeprefix('_')
        axes.plot([r['steps'] for r in students], [r['top1'] for r in students], '.-', label=name)
        teachers.add(teacher['top1'])
    for top1 in teachers:
        axes.axhline(top1, color='black', linewidth=0.7, linestyle=':', alpha=0.6)
        axes.annotate(f'teacher, {top1:.1f} %', (1, top1), (0, 2), textcoords='offset points', fontsize=7)
    axes.set(xlabel='K', ylabel='top-1 accuracy, %', xscale='log', ylim=(0, 90))
    axes.set_xticks(ticks := (1, 2, 3, 4, 6, 8, 12, 24, 48, 100), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc='lower right')
    drawing.savefig(path, dpi=150)


def records():
    """What hub/tools/dynamics.py measured, by model and measure; the teacher comes first."""
    found = {}
    for path in sorted((HUB / 'dynamics').glob('*/*.json')):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


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
        widest = max(m['spectral_norms'], key=m['spectral_norms'].get)
        return [spread(m['lipschitz'], 2), f"{m['lipschitz']['largest']:.1f}", spread(m['softmax']),
                f"{m['spectral_norms'][widest]:.1f}, of {widest.split(' ')[0]}"]
    heads = ['Lipschitz constant, mean along the way', 'largest', "JaSMin's g_1", 'largest spectral norm']
    return per_model(heads, cells)


def regions():
    def cells(m):
        region = m['region']
        return [f"{region['distance']:.2f}", f"{region['towards']:.2f}", f"{region['inside']:.1f} %",
                f"{region['same']:.1f} %"]
    name, teacher = next(iter(records().items()))
    found = teacher['region']['found']
    lines = [[MODELS[key][0], *cells({measure: m['found'] for measure, m in measures.items()})]
             for key, measures in records().items() if key != name]
    return (f"The teacher's own radius is {found['worst']:.3f} of the norm of the state in the worst direction, "
            f"{found['random']:.2f} in a random one (medians).\n\n" + rows([
                'student', 'distance from the teacher', 'radius in this direction', 'nearer than the worst radius',
                'same class'], lines))


TABLES = {
    'models': (README, models), 'ablation': (HUB / 'lab' / 'ingredients.md', ablation), 'paper': (RESULTS, paper),
    'speed at 224 px': (SPEED, partial(speed, 'tiny_224')), 'speed at 64 px': (SPEED, partial(speed, 'published_64')),
    'trained': (TRAINING, trained), 'exponents': (DYNAMICS, exponents), 'constants': (DYNAMICS, constants),
    'regions': (DYNAMICS, regions)}


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
    figure(HUB / 'kept.png')
    steps_figure(HUB / 'steps.png')
    draw()


if __name__ == '__main__':
    main()
