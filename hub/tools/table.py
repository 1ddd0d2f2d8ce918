"""Write the tables of README.md, hub/RESULTS.md, hub/SPEED.md and hub/DYNAMICS.md from the records in hub/.

    python hub/tools/table.py            print them
    python hub/tools/table.py --write    put them between their marks, and draw hub/kept.png, hub/speed/dials.png
                                         and hub/dial/dial.png
"""
import importlib.util
import json
import re
import statistics
import sys
from functools import partial
from pathlib import Path

from cards import dataset_of
from dynamics_tables import TABLES as DYNAMICS_TABLES

from timm_odevit.benchmark.tables import Benchmark, Timing, Weights
from ablate import table

HUB = Path(__file__).parent.parent
README, RESULTS, SPEED, DYNAMICS = (
    HUB.parent / 'README.md', HUB / 'RESULTS.md', HUB / 'SPEED.md', HUB / 'DYNAMICS.md')
DIALS = {'imagenet_sample': '500 photos of ImageNet', 'cifar100': 'CIFAR-100'}
# the share of the blocks' parameters at which the time and the number of images vary
BUDGETS = {'imagenet': ('photos of ImageNet', 0.5), 'cifar100': ('CIFAR-100', 0.25)}
STEPS = (6, 8, 12, 16, 24)
# variants of hub/controls.jsonl, as the tables of RESULTS.md name them
CONTROLS = {
    'two blocks, rank 11': 'two blocks, rank 11', 'no KL': 'everything shared, rank 23',
    'only the MLP shared': 'only the MLP shared, rank 27', 'nothing shared': 'nothing shared, rank 35',
    'only attention shared': 'only attention shared, rank 31', 'three blocks': 'three blocks, rank 0',
    'three blocks, mixed': 'three blocks, mixed for each layer',
    'first and last layer kept': 'first and last layer kept, one block between'}
SHARES = {
    'fifth: one block': 'a fifth: one block, rank 16', 'fifth: two blocks': 'a fifth: two blocks, rank 4',
    'no KL': 'a quarter: one block, rank 23', 'two blocks, rank 11': 'a quarter: two blocks, rank 11',
    'third: one block': 'a third: one block, rank 37', 'third: two blocks': 'a third: two blocks, rank 25',
    'half: one block': 'half: one block, rank 59', 'half: two blocks': 'half: two blocks, rank 47',
    'half: three blocks': 'half: three blocks, rank 35', 'half: four blocks': 'half: four blocks, rank 23'}
STEP_COUNTS = {
    'no KL': 'K = 12', 'no KL, random K': 'random K', 'no KL, random K last': 'random K last',
    'no KL, half of K last': 'K = 6 last', 'no KL, half of K last, from itself': 'K = 6 last, from itself',
    'no KL, random K, averaged': 'random K, residuals averaged over the step',
    'no KL, random K, length of the step as an input': 'random K, length of the step as an input'}
AUTONOMOUS = {
    'autonomous': 'one block', 'autonomous, K = 24': 'K = 24', 'autonomous, MLP twice as wide': 'MLP twice as wide',
    'autonomous, 10 registers': '10 registers'}
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
# DeiT-Ti with tokens merged and nothing trained (ToMe, arXiv 2210.09461): GMACs and top-1
TOME = [(1.3, 72.2), (0.9, 71.7), (0.8, 71.4), (0.6, 70.7)]


def models():
    heads = ['model', 'data', 'parameters', *(f'K = {steps}' for steps in STEPS), 'kept %']
    rows = [f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads)]
    paths = sorted(HUB.glob('*/results.json'), key=lambda path: (dataset_of(path.parent.name), path.parent.name))
    for path in paths:
        name, record = path.parent.name, json.loads(path.read_text())
        dataset = dataset_of(name)
        trained, found = record['trained_at'], {r['steps']: r for r in record['test'] if r['model'] != 'teacher'}
        cells = [f"**{found[k]['top1']:.2f}**" if k in trained else f"{found[k]['top1']:.2f}" if k in found else '-'
                 for k in STEPS] if None not in found else ['', '', f"{found[None]['top1']:.2f}", '', '']
        row = found.get(12) or found.get(None) or found[trained[0]]
        kept = '' if row['kept'] is None else f"{row['kept']:.1f}"
        rows.append(f"| `{name}` | {dataset} | {row['parameters']:,} | {' | '.join(cells)} | {kept} |")
    for name, dataset, parameters, top1, kept in OTHERS:
        rows.append(f'| {name} | {dataset} | {parameters} | | | {top1} | | | {kept} |')
    return '\n'.join(rows) + '\n'


def ablation():
    path = HUB / 'ablation.json'
    return table(json.loads(path.read_text())) if path.exists() else ''


def minutes(rank):
    """One row per variant, the best first: top-1 after the minutes, by seed."""
    records = [json.loads(line) for line in (HUB / 'minutes.jsonl').read_text().splitlines()]
    found = {}
    for r in records:
        if r['rank'] == rank:
            found.setdefault((r['minutes'], r['variant']), []).append(r)
    rows = ['| minutes | variant | updates | top-1 % | at half K | at twice K |', '|' + ' --- |' * 6]

    def order(item):
        return item[0][0], -sum(r['top1'] for r in item[1]) / len(item[1])
    for (time, name), runs in sorted(found.items(), key=order):
        updates = ' + '.join(str(part['updates']) for part in runs[0]['parts'])
        cells = [', '.join(f'{r[key]:.1f}' for r in runs) for key in ('top1', 'half K', 'twice K')]
        rows.append(f"| {time:g} | {name} | {updates} | {' | '.join(cells)} |")
    return '\n'.join(rows) + '\n'


def variants(names):
    """One row per variant, with mean and standard deviation over the seeds."""
    records = [json.loads(line) for line in (HUB / 'controls.jsonl').read_text().splitlines()]
    rows = ['| variant | block parameters | top-1 % | at half K | at twice K | minutes | seeds |', '|' + ' --- |' * 7]
    for name, shown in names.items():
        runs = [record for record in records if record['variant'] == name]
        if runs:
            cells = [_spread([r[key] for r in runs]) for key in ('top1', 'half K', 'twice K', 'cpu_minutes')]
            rows.append(f"| {shown} | {runs[0]['block_parameters']:,} | {' | '.join(cells)} | {len(runs)} |")
    return '\n'.join(rows) + '\n'


def _spread(values):
    if None in values:
        return '-'
    spread = f' ± {statistics.stdev(values):.1f}' if len(values) > 1 else ''
    return f'{statistics.mean(values):.1f}{spread}'


def families():
    rows = ['| family | tried as | same after saving | stepwise | unrolled | same in its program |', '|' + ' --- |' * 6]

    def shown(value):
        return '-' if value is None else ('yes' if value else 'no') if isinstance(value, bool) else (
            'yes' if isinstance(value, float) and value < 1e-4 else value)
    for r in json.loads((HUB / 'families.json').read_text()):
        cells = [shown(r.get(key)) for key in ('round trip', 'stepwise', 'unrolled', 'in its program')]
        rows.append(f"| {r['family']} | `{r['model']}` | {' | '.join(cells)} |")
    return '\n'.join(rows) + '\n'


def embeddings():
    """An embedding teacher and students trained for equal updates; the same relation weight in neighbouring rows."""
    rows = ['| model | parameters | relation term | minutes | cosine | same nearest image % | k-NN % | probe % |',
            '|' + ' --- |' * 8]
    records = json.loads((HUB / 'embeddings.json').read_text())
    for r in records:
        rows.append(f"| {r['student']} | {r['parameters']:,} | {r['relation_weight']:g} | {r['minutes']:.1f} | "
                    f"{r['cosine']:.3f} | {r['neighbours']:.1f} | {r['knn']:.1f} | {r['probe']:.1f} |")
    r = {key.removeprefix('teacher '): value for key, value in records[0].items() if key.startswith('teacher ')}
    rows.append(f"| teacher | {r['parameters']:,} | | | | | {r['knn']:.1f} | {r['probe']:.1f} |")
    return '\n'.join(rows) + '\n'


def paper():
    record = json.loads((HUB / 'speed' / 'paper.json').read_text())
    rows = ['| | ms | times as fast | peak memory, MB | from outside, MB |', '|' + ' --- |' * 5]
    rows += [f"| {r['what']}, {r['model']} | {r['ms']:.0f} | {r['ratio']:.2f} | {r['bytes'] / 1e6:.0f} | "
             f"{r['resident'] / 1e6:.0f} |" for r in record['found']]
    return '\n'.join(rows) + '\n'


def tokens():
    record = json.loads((HUB / 'speed' / 'tokens.json').read_text())
    rows = ['| tokens left at T | top-1 % | GMACs | images/s | times as fast |', '|' + ' --- |' * 5]
    rows += [f"| {100 * r['tokens']:.0f} % | {r['top1']:.1f} | {r['operations'] / 1e9:.2f} | "
             f"{r['images per second']:.1f} | {r['times as fast']:.2f} |" for r in record['found']]
    return '\n'.join(rows) + '\n'


def benchmarks():
    """What `odevit benchmark` printed, from its JSON."""
    def shown(name):
        record = json.loads((HUB / 'speed' / f'{name}.json').read_text())
        return str(Benchmark(record['machine'], [Timing(**t) for t in record['timings']],
                             [Weights(**w) for w in record['weights']]))
    return '\n\n'.join(f'`{command}`\n\n{shown(name)}' for name, command in {
        'tiny224': 'odevit benchmark --threads 1',
        'tiny64': 'odevit benchmark deit_tiny_patch16_224 --img-size 64 --batch-size 1,16,64 --threads 1',
        'published': 'odevit benchmark deit_tiny_patch16_64.cifar100 odevit_tiny_native_patch16_64.deit_tiny_cifar100 '
                     'odevit_tiny_patch16_64.deit_tiny_cifar100 odevit_tiny_native_r23_patch16_64.deit_tiny_cifar100 '
                     '--batch-size 1 --rounds 100 --threads 1',
        'exit': 'odevit benchmark local-dir:out/early --batch-size 1,256 --data cifar10.npz --rounds 12 --threads 1',
        'large': 'odevit benchmark vit_large_patch16_224 --img-size 64 --batch-size 1 --rounds 8 --threads 1',
        'train': 'odevit benchmark deit_tiny_patch16_224 --img-size 64 --batch-size 64 --train --rounds 20 --threads 1',
    }.items()) + '\n'


def memory():
    record = json.loads((HUB / 'speed' / 'memory.json').read_text())
    heads = ['training step', 'T', 'K', 'evaluations', 'peak memory, MB', 'ms', 'error of the gradient']
    rows = [f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads)]
    for r in record['found']:
        T, K = (r['steps'], '') if 'dopri5' in r['way'] else (12, r['steps'])
        rows.append(f"| {r['way']} | {T} | {K} | {r['evaluations']} | {r['bytes'] / 1e6:.1f} | {r['ms']:.0f} | "
                    f"{r['gradient error']:.0e} |")
    return '\n'.join(rows) + '\n'


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
            f"images; calibrated on {images['calibration']:,} images without labels, at most {minutes:.0f} minutes per "
            f"point ({record['device']}).", '', _example().table(record), '']
    text += ['What more time and more images give:', '',
             '| data | parameters of the blocks | images | minutes | kept |', '|' + ' --- |' * 5]
    found = []
    for path in (HUB / 'dial').glob('*.json'):
        record, (data, share) = json.loads(path.read_text()), BUDGETS[path.stem.split('_')[0]]
        images, teacher = record['images']['calibration'], record['teacher']['top1']
        found += [(data, share, images, row['minutes'], row['top1'] / teacher)
                  for row in record['rows'] if row['share'] == share]
    text += [f'| {data} | {100 * share:.0f} % | {images:,} | {minutes:.0f} | {100 * kept:.1f} % |'
             for data, share, images, minutes, kept in sorted(found)]
    most = json.loads((HUB / 'dial' / 'imagenet_sample_900.json').read_text())
    text += ['', f"The row with 900 photos is measured on the other {most['images']['test']}, of which the teacher "
             f"gets {most['teacher']['top1']:.1f} % right; the other rows of photos are measured on the same 500."]
    return '\n'.join(text) + '\n'


def _example():
    path = HUB.parent / 'examples' / 'dial.py'
    spec = importlib.util.spec_from_file_location('dial', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dials():
    paths = {title: HUB / 'dial' / f'{name}.json' for name, title in DIALS.items()}
    return {title: json.loads(path.read_text()) for title, path in paths.items() if path.exists()}


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
    record = _dials()['CIFAR-100']
    rows = [[100 * row[key] / record['teacher'][key] for key in ('parameters', 'top1')] for row in record['rows']]
    axes.plot(*zip(*rows, strict=True), '.-', linewidth=1, alpha=0.6,
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


def dials_figure(path):
    """Accuracy against speed: tokens beside ToMe's figures, and the three dials of a student with exits."""
    from matplotlib.figure import Figure
    drawing = Figure(figsize=(10, 3.8), layout='constrained')
    left, right = drawing.subplots(1, 2)
    found = json.loads((HUB / 'speed' / 'tokens.json').read_text())['found']
    whole = found[0]
    drop = [r['top1'] - whole['top1'] for r in found]
    left.plot([r['times as fast'] for r in found], drop, 'o-', label='merged along t: images/s, measured')
    left.plot([whole['operations'] / r['operations'] for r in found], drop, 'o:', label='merged along t: operations')
    left.plot([TOME[0][0] / gmacs for gmacs, _ in TOME], [top1 - TOME[0][1] for _, top1 in TOME], '^--',
              label='ToMe, its paper: operations')
    left.set(title='DeiT-tiny, converted exactly, 224 px, not trained', xlabel='times fewer operations, times as fast',
             ylabel='top-1, points lost')
    found = json.loads((HUB / 'speed' / 'dials.json').read_text())['found']
    most = max(r['steps'] for r in found)
    for label, style, chosen in [
            ('fewer steps K', 'o-', lambda r: r['tokens'] == 1 and not r['threshold']),
            ('fewer tokens', 's-', lambda r: r['steps'] == most and not r['threshold']),
            ('early exit', '^-', lambda r: r['steps'] == most and r['tokens'] == 1),
            ('early exit and half of the tokens', 'v--', lambda r: r['steps'] == most and r['tokens'] == 0.5)]:
        rows = sorted((r for r in found if chosen(r)), key=lambda r: r['times as fast'])
        right.plot([r['times as fast'] for r in rows], [r['top1'] for r in rows], style, label=label)
    right.set(title='student with exits, CIFAR-10, 64 px', xlabel='times as fast, measured', ylabel='top-1 %')
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    drawing.savefig(path, dpi=150)


TABLES = {'models': (README, models), 'ablation': (RESULTS, ablation), 'dial': (RESULTS, dial),
          'minutes': (RESULTS, partial(minutes, 23)), 'minutes with rank 1': (RESULTS, partial(minutes, 1)),
          'controls': (RESULTS, partial(variants, CONTROLS)),
          'shares': (RESULTS, partial(variants, SHARES)), 'step counts': (RESULTS, partial(variants, STEP_COUNTS)),
          'autonomous': (RESULTS, partial(variants, AUTONOMOUS)), 'families': (RESULTS, families),
          'embeddings': (RESULTS, embeddings), 'tokens': (RESULTS, tokens), 'paper': (RESULTS, paper),
          'memory': (RESULTS, memory), 'benchmark': (SPEED, benchmarks),
          **{name: (DYNAMICS, make) for name, make in DYNAMICS_TABLES.items()}}


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
    dials_figure(HUB / 'speed' / 'dials.png')
    if _dials():
        _example().plot(_dials(), HUB / 'dial' / 'dial.png')


if __name__ == '__main__':
    main()
