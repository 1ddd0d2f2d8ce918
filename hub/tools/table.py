"""Write the tables of README.md, hub/RESULTS.md and hub/DYNAMICS.md from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, and draw hub/kept.png and hub/steps.png
"""
import json
import math
import re
import sys
from pathlib import Path

from ablate import table
from cards import dataset_of

HUB = Path(__file__).parent.parent
README, RESULTS, DYNAMICS = HUB.parent / 'README.md', HUB / 'RESULTS.md', HUB / 'DYNAMICS.md'
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
SIGNALS = {
    'confidence': 'softmax confidence', 'margin': 'margin of the logits', 'entropy': 'entropy', 'radius': 'radius',
    'exponent': 'largest exponent', 'acceleration': 'acceleration', 'distance': 'distance from the teacher'}
COSTS = ('spectral_norms', 'exponents', 'class_token', 'softmax', 'region', 'recovery', 'relations', 'lipschitz',
         'discretisation')


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
    return table(json.loads((HUB / 'ablation.json').read_text()))


def paper():
    record = json.loads((HUB / 'speed' / 'paper.json').read_text())
    return rows(['', 'ms', 'times as fast', 'peak memory, MB', 'from outside, MB'], [
        [f"{r['what']}, {r['model']}", f"{r['ms']:.0f}", f"{r['ratio']:.2f}", f"{r['bytes'] / 1e6:.0f}",
         f"{r['resident'] / 1e6:.0f}"] for r in record['found']])


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
    return rows(['model', *heads], [[f'`{name}`', *cells({key: m['found'] for key, m in measures.items()})]
                                    for name, measures in records().items()])


def spread(found, digits=3):
    return f"{found['mean']:.{digits}f} ± {found['sd']:.{digits}f}"


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
        region, recovery = m['region'], m.get('recovery')  # measured by tools/dynamics.py until commit ff807dc
        shown = ['-'] * 4  # of the teacher itself
        if region['distance'] is not None and not math.isnan(region['distance']):
            shown = [f"{region['distance']:.2f}", f"{region['towards']:.2f}", f"{region['inside']:.1f} %",
                     f"{region['same']:.1f} %"]
        if recovery is None:
            return [*shown, '-', '-']
        factor = recovery['factor']
        return [*shown, f'{factor[0]:.2f}, {factor[len(factor) // 2]:.2f}', f"{recovery['same'][0]:.1f} %"]
    teacher = next(iter(records().values()))['region']['found']
    return (f"The teacher's own radius is {teacher['worst']:.3f} of the norm of the state in the worst direction, "
            f"{teacher['random']:.2f} in a random one (medians).\n\n" + per_model([
                'distance from the teacher', 'radius in this direction', 'nearer than the worst radius', 'same class',
                'left of a perturbation at t = 0, 6', 'class kept'], cells))


def relations():
    found = {name: {r['name']: r for r in measures['relations']['found']} for name, measures in records().items()}

    def cell(r):
        related = '' if r and r['related'] else ', no relation'
        return '-' if r is None else f"{r['auroc']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{related}"
    return rows(['AUROC for being right', *(f'`{name}`' for name in found)], [
        [title, *(cell(measures.get(key)) for measures in found.values())] for key, title in SIGNALS.items()])


def discretisation():
    lines = [[f'`{name}`', r['method'], str(r['steps']), f"{r['error']:.3f}", f"{r['bound']:.2f}",
              '-' if r['order'] is None or math.isnan(r['order']) else f"{r['order']:.1f}",
              f"{r['local'][0]:.3f}, {r['local'][-1]:.3f}"]
             for name, measures in records().items() for r in measures.get('discretisation', {'found': []})['found']]
    return rows(['model', 'method', 'K', 'error', 'bound', 'observed order', 'first and last local error'], lines)


def costs():
    lines = []
    for measure in COSTS:
        found = [measures[measure] for measures in records().values() if measure in measures]
        once = measure == 'spectral_norms'
        times = [each['ms per image'] * (each['images'] if once else 1) for each in found]
        shown = ' to '.join(dict.fromkeys(f'{time:.0f}' for time in (min(times), max(times))))
        lines.append([measure.replace('_', ' '), f"{shown} ms per {'model' if once else 'image'}"])
    return rows(['measure', 'one core'], lines)


TABLES = {'models': (README, models), 'ablation': (RESULTS, ablation), 'paper': (RESULTS, paper),
          **{f'dynamics {make.__name__}': (DYNAMICS, make) for make in (
              exponents, constants, regions, relations, discretisation, costs)}}


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


if __name__ == '__main__':
    main()
