"""Draw hub/pictures/*.png from the records in hub/; `python hub/tools/table.py --write` calls it."""
import io
import json
import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

HUB = Path(__file__).parent.parent
MODELS = {
    'deit_tiny_patch16_128.cifar100': ('teacher', 'black'),
    'odevit_tiny_native_patch16_128.deit_tiny_cifar100': ('one block, any K', 'C0'),
    'odevit_tiny_native_patch16_128.deit_tiny_k6_cifar100': ('one block, K = 6', 'C3'),
    'odevit_tiny_native_two_r11_patch16_128.deit_tiny_cifar100': ('two blocks, rank 11', 'C2'),
    'odevit_tiny_patch16_128.deit_tiny_k6_cifar100': ("the paper's block", 'C1'),
}
# variants of hub/lab/controls.jsonl
SHARING = {
    'two blocks, rank 11': 'two blocks, residuals of rank 11', 'no KL': 'one block, residuals of rank 23',
    'only the MLP shared': 'only the MLP shared, rank 27', 'nothing shared': 'nothing shared, rank 35',
    'only attention shared': 'only attention shared, rank 31', 'three blocks': 'three blocks, no residuals',
    'three blocks, mixed': 'a mixture of three blocks per layer',
    'first and last layer kept': 'first and last layer kept, one block between'}
ONE_OR_TWO = {
    'one block': ('fifth: one block', 'no KL', 'third: one block', 'half: one block'),
    'two blocks': ('fifth: two blocks', 'two blocks, rank 11', 'third: two blocks', 'half: two blocks')}
BLOCK = 444_864  # parameters of one of the teacher's twelve blocks
SIGNALS = {
    'confidence': 'softmax confidence', 'margin': 'margin of the logits', 'radius': 'radius of the class',
    'entropy': 'entropy', 'exponents': 'largest exponent', 'class_token': 'that of the class token',
    'acceleration': 'acceleration',
    'distance': 'distance from the teacher'}
KEPT = "top-1 accuracy, % of the teacher's"


def read(name):
    """A record of hub/: the tree of a .json, the lines of a .jsonl."""
    text = (HUB / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith('l') else json.loads(text)


def sheet(width, height, columns=1, **kwargs):
    figure = Figure(figsize=(width, height), dpi=150, layout='constrained')
    return figure, figure.subplots(1, columns, **kwargs)


def say(axes, text, point, shift=(6, 0), **kwargs):
    """Write next to a point."""
    axes.annotate(text, point, shift, textcoords='offset points', fontsize=8, va='center', **kwargs)


def ticks(axes, values, which='x'):
    getattr(axes, f'set_{which}ticks')(values, [f'{value:g}' for value in values])
    axes.minorticks_off()


def controls():
    """The runs of hub/lab/controls.jsonl by variant: the share of the blocks' parameters in %, and top-1 by seed."""
    found = {}
    for run in read('lab/controls.jsonl'):
        share = 100 * run['block_parameters'] / (12 * BLOCK)
        found.setdefault(run['variant'], (share, []))[1].append(run['top1'])
    return found


def sizes():
    figure, axes = sheet(7, 4)
    record = read('dial/cifar100.json')
    for key, style, text in (('top1', 'o-', '50,000 images without labels, 10 minutes of one core'),
                             ('init_top1', 'o:', 'initialised, not trained')):
        rows = [(100 * row['share'], 100 * row[key] / record['teacher']['top1']) for row in record['rows']]
        axes.plot(*zip(*rows, strict=True), style, color='C0', label=f'CIFAR-100, {text}')
    for name, minutes in (('1_minute', 1), ('3_minutes', 3)):
        kept = 100 * read(f'dial/cifar100_{name}.json')['rows'][0]['top1'] / record['teacher']['top1']
        axes.plot(25, kept, 'o', color='C0', fillstyle='none')
        say(axes, f"{minutes} minute{'s' if minutes > 1 else ''}", (25, kept), color='C0')
    record = read('dial/imagenet_sample.json')
    rows = [(100 * row['share'], 100 * row['top1'] / record['teacher']['top1']) for row in record['rows']]
    axes.plot(*zip(*rows, strict=True), 's-', color='C1', label='500 photos of ImageNet, 224 px, 8 minutes')
    axes.set(xlabel="parameters of the blocks, % of the teacher's", ylabel=KEPT, ylim=(-3, 104), xscale='log')
    ticks(axes, (10, 15, 25, 50, 100))
    axes.legend(fontsize=8, loc='upper left', bbox_to_anchor=(0, -0.17), borderaxespad=0)
    return figure


def steps():
    figure, (left, right) = sheet(9, 4.1, 2, sharey=True)
    runs = [run for run in read('runs/study.jsonl')
            if str(run.get('student')).startswith('odevit_tiny_native_patch16_64') and 'note' not in run]
    chosen = {'null': ('each update runs K = 6', 'C3'), '[1, 2, 3, 6, 12, 24]': ('one of 1, 2, 3, 6, 12 and 24', 'C0'),
              '[[6, 1], [6, 2], [6, 3], [12, 2], [12, 3], [24, 3]]': ('two of them: a large and a small one', 'C2')}
    for run in runs:
        if (key := json.dumps(run['steps'])) in chosen:
            text, color = chosen[key]
            left.plot([int(k) for k in run['top1']], list(run['top1'].values()), '.-', color=color, label=text)
    left.set_title('one block', fontsize=10)
    for run, text, color in zip(read('lab/steps.jsonl'), (
            'each update runs K = 12', 'one of 6, 8, 12, 16 and 24'), ('C3', 'C0'), strict=True):
        right.plot([int(k) for k in run['top1']], list(run['top1'].values()), '.-', color=color, label=text)
    runs = [run for run in read('runs/study.jsonl') if run.get('averaged') and run['steps'] == [12, 12, 6, 4, 3, 2, 24]]
    right.plot([int(k) for k in runs[0]['top1']], list(runs[0]['top1'].values()), '.-', color='C2',
               label='one of 2, 3, 4, 6, 12 and 24; residuals averaged over a step')
    right.set_title('one block and residuals of rank 23', fontsize=10)
    for axes in (left, right):
        axes.set(xlabel='K in use', xscale='log', ylim=(0, 75), xlim=(0.9, 120))
        ticks(axes, (1, 2, 3, 4, 6, 12, 24, 100))
        axes.legend(fontsize=8, loc='upper left', bbox_to_anchor=(0, -0.17), borderaxespad=0)
    left.set_ylabel('top-1 accuracy, %')
    return figure


def sharing():
    figure, (left, right) = sheet(10, 3.3, 2, width_ratios=(3, 2))
    found = controls()
    for row, (key, _) in enumerate(SHARING.items()):
        mean, sd = statistics.mean(found[key][1]), statistics.stdev(found[key][1])
        left.barh(row, mean, xerr=sd, height=0.7, color='C0' if row < 2 else 'C7', alpha=0.8)
        say(left, f'{mean:.1f}', (mean + sd, row))
    left.set_yticks(range(len(SHARING)), list(SHARING.values()), fontsize=8)
    left.invert_yaxis()
    left.set(xlabel='top-1 accuracy, %', xlim=(0, 62))
    left.set_title('a quarter of the parameters of the blocks', fontsize=10)
    for (name, variants), color in zip(ONE_OR_TWO.items(), ('C1', 'C0'), strict=True):
        pairs = [(found[variant][0], statistics.mean(found[variant][1])) for variant in variants]
        right.plot(*zip(*pairs, strict=True), 'o-', color=color, label=name)
    right.set(xlabel='parameters of the blocks, %', ylabel='top-1 accuracy, %', ylim=(40, 70))
    right.set_title('one block or two, with residuals', fontsize=10)
    ticks(right, (20, 25, 34, 50))
    right.legend(fontsize=8, loc='lower right')
    return figure


def ingredients():
    figure, axes = sheet(7.5, 4.8)
    rows = read('lab/ablation.json')
    first = statistics.mean(rows[0]['top1'])
    shown = sorted(rows[1:], key=lambda row: statistics.mean(row['top1']), reverse=True)
    for at, row in enumerate(shown):
        gain, sd = round(statistics.mean(row['top1']) - first, 2) + 0., statistics.stdev(row['top1'])
        axes.barh(at, gain, xerr=sd, height=0.7, color='C2' if gain >= 0 else 'C3', alpha=0.8)
        say(axes, f'{gain:+.1f}', (gain + math.copysign(sd, gain), at), (4 if gain >= 0 else -4, 0),
            ha='left' if gain >= 0 else 'right')
    axes.set_yticks(range(len(shown)), [row['name'] for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color='black', linewidth=0.8)
    axes.set(xlabel=f'points of top-1 accuracy, from {first:.1f} %', xlim=(-27, 39))
    return figure


def faster():
    figure, (left, right) = sheet(10, 3.7, 2)
    found = read('speed/tokens.json')['found']
    top1, images = [row['top1'] for row in found], read('speed/tokens.json')['images']
    bars = [196 * math.sqrt(p / 100 * (1 - p / 100) / images) for p in top1]
    left.errorbar([row['times as fast'] for row in found], top1, bars, fmt='o-', color='C0', capsize=3, elinewidth=0.5)
    for row in found:
        shift = {0.2: (-10, 10), 0.15: (10, 10), 0.1: (0, -10)}.get(row['tokens'], (0, 10))
        say(left, f"{100 * row['tokens']:.0f} %", (row['times as fast'], row['top1']), shift, ha='center')
    left.set(xlabel='times as fast, measured', ylabel='top-1 accuracy, %', ylim=(73, 82), xlim=(0.95, 1.6))
    left.set_title('DeiT-tiny, 224 px: share of the tokens left at the end', fontsize=10)
    found = read('speed/dials.json')['found']
    for text, style, color, chosen in [
            ('fewer steps', 's-', 'C1', lambda r: r['tokens'] == 1 and not r['threshold']),
            ('fewer tokens', '^-', 'C0', lambda r: r['steps'] == 6 and not r['threshold']),
            ('early exit', 'o-', 'C2', lambda r: r['steps'] == 6 and r['tokens'] == 1),
            ('early exit from five steps', 'o:', 'C3', lambda r: r['steps'] == 5 and r['tokens'] == 1)]:
        rows = sorted((r for r in found if chosen(r)), key=lambda r: r['times as fast'])
        rows = [r for r in rows if r['top1'] > 75]
        right.plot([r['times as fast'] for r in rows], [r['top1'] for r in rows], style, color=color, label=text)
    right.set(xlabel='times as fast, measured')
    right.set_title('student of CIFAR-10 with exits, 64 px, K = 6', fontsize=10)
    right.legend(fontsize=8, loc='lower left')
    return figure


def memory():
    figure, axes = sheet(7, 3)
    ways = {'plain back-propagation': ('every state kept', 'C3', (8, 0)),
            'gradient checkpointing per step': ('each step recomputed (checkpointing)', 'C2', (8, 0)),
            'dopri5': ('dopri5', 'C1', (-38, 8)), 'dopri5, adjoint': ('dopri5, adjoint', 'C0', (8, -4))}
    rows = read('speed/memory.json')['found']
    for way, (text, color, shift) in ways.items():
        pairs = [(row['evaluations'], row['bytes'] / 1e6) for row in rows if row['way'] == way]
        axes.plot(*zip(*pairs, strict=True), 'o-', color=color)
        say(axes, text, pairs[-1], shift, color=color)
    axes.set(xlabel='evaluations of the block', ylabel='peak memory, MB', ylim=(0, 165), xlim=(8, 84))
    ticks(axes, (12, 20, 32, 48))
    return figure


def auroc():
    figure, axes = sheet(8, 4.6)
    for at, (name, (text, color)) in enumerate(MODELS.items()):
        found = {r['name']: r for r in read(f'dynamics/{name}/relations.json')['found']}
        for row, key in enumerate(SIGNALS):
            if (r := found.get(key)) is not None:
                bar = [[r['auroc'] - r['low']], [r['high'] - r['auroc']]]
                axes.errorbar(r['auroc'], row + 0.15 * (at - 2), xerr=bar, fmt='o', markersize=4, color=color,
                              capsize=2, elinewidth=1, label=text if row == 0 else None)
    axes.set_yticks(range(len(SIGNALS)), list(SIGNALS.values()))
    axes.invert_yaxis()
    axes.axvline(0.5, color='black', linewidth=0.8)
    axes.set(xlabel='area under the ROC curve for a right answer', xlim=(0.05, 0.95))
    axes.set_title('counts against the answer  ←   0.5: no relation   →  speaks for the answer', fontsize=9)
    axes.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def discretisation():
    students = [(name, text) for name, (text, _) in MODELS.items() if text != 'teacher']
    figure, panels = sheet(11, 3.2, len(students), sharey=True)
    for axes, (name, text) in zip(panels, students, strict=True):
        found = read(f'dynamics/{name}/discretisation.json')['found']
        for method, color in zip(dict.fromkeys(row['method'] for row in found), ('C3', 'C0', 'C2'), strict=True):
            rows = [row for row in found if row['method'] == method]
            axes.plot([row['steps'] for row in rows], [row['error'] for row in rows], 'o-', color=color, label=method)
        axes.set(xlabel='K', xscale='log', yscale='log', ylim=(1e-3, 5))
        ticks(axes, sorted({row['steps'] for row in found}))
        axes.set_title(text, fontsize=10)
        axes.legend(fontsize=8, loc='lower left')
    panels[0].set_ylabel('distance from the exact solution')
    return figure


PICTURES = (sizes, steps, sharing, ingredients, faster, memory, auroc, discretisation)


def draw():
    for make in PICTURES:
        figure = make()
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        figure.savefig(drawn := io.BytesIO())
        Image.open(drawn).convert('RGB').quantize(64).save(HUB / 'pictures' / f'{make.__name__}.png', optimize=True)


if __name__ == '__main__':
    draw()
