"""Draw pictures of hub/pictures/ from the records in hub/; `python hub/tools/table.py --write` calls it.

`git show 9508f57:hub/tools/pictures.py` drew those of closed studies: faster, memory, sharing, steps.
"""
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
SIGNALS = {
    'confidence': 'softmax confidence', 'margin': 'margin of the logits', 'radius': 'radius of the class',
    'entropy': 'entropy', 'exponents': 'largest exponent', 'class_token': 'that of the class token',
    'acceleration': 'acceleration',
    'distance': 'distance from the teacher'}
KEPT = "top-1 accuracy, % of the teacher's"


def read(name):
    """The tree of a record of hub/."""
    return json.loads((HUB / name).read_text())


def sheet(width, height, columns=1, **kwargs):
    figure = Figure(figsize=(width, height), dpi=150, layout='constrained')
    return figure, figure.subplots(1, columns, **kwargs)


def say(axes, text, point, shift=(6, 0), **kwargs):
    """Write next to a point."""
    axes.annotate(text, point, shift, textcoords='offset points', fontsize=8, va='center', **kwargs)


def ticks(axes, values, which='x'):
    getattr(axes, f'set_{which}ticks')(values, [f'{value:g}' for value in values])
    axes.minorticks_off()


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


PICTURES = (sizes, ingredients, auroc, discretisation)


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
