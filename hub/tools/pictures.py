"""Draw pictures of hub/pictures/ for `python hub/tools/table.py --write`. Those in b17a7c4 and 9508f57 drew others."""
import io
from statistics import mean, stdev

from cards import HUB, read
from first_page import ticks
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import t

MODELS = {
    'deit_tiny_patch16_128.cifar100': ('teacher', 'black'),
    'odevit_tiny_native_three_patch16_128.deit_tiny_cifar100': ('three blocks, any K', 'C2'),
    'odevit_tiny_native_three_patch16_128.deit_tiny_k6_cifar100': ('three blocks, K = 6', 'C4'),
    'odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100': ('three blocks, K = 12', 'C5'),
    'odevit_tiny_native_patch16_128.deit_tiny_cifar100': ('one block, any K', 'C0'),
    'odevit_tiny_native_patch16_128.deit_tiny_k6_cifar100': ('one block, K = 6', 'C3'),
    'odevit_tiny_patch16_128.deit_tiny_k6_cifar100': ("the paper's block", 'C1'),
}
OTHERS = {'plain3': ('three plain blocks', 'C7')}  # whose dynamics were not measured, with K = 3
DESIGNS = {'plain': 'K plain blocks', 'one': 'one block', 'three': 'three blocks',
           'two': 'two blocks, residuals of rank 11', 'narrow': 'a ViT with 64 channels', 'wrn': 'WRN-16-2 at 32 px',
           'stepwise': ', stepwise first', 's': ''}
SIGNALS = {
    'confidence': 'softmax confidence', 'margin': 'margin of the logits', 'exponents': 'largest exponent',
    'class_token': 'that of the class token', 'distance': 'distance from the teacher'}


def sheet(width, height, columns=1, rows=1, **kwargs):
    figure = Figure(figsize=(width, height), dpi=150, layout='constrained')
    return figure, figure.subplots(rows, columns, **kwargs)


def auroc():
    figure, axes = sheet(8, 5)
    for at, (name, (text, color)) in enumerate(MODELS.items()):
        found = {r['name']: r for r in read(f'dynamics/{name}/relations.json')['found']}
        for row, key in enumerate(SIGNALS):
            if (r := found.get(key)) is not None:
                bar = [[r['auroc'] - r['low']], [r['high'] - r['auroc']]]
                axes.errorbar(r['auroc'], row + 0.12 * (at - 3), xerr=bar, fmt='o', markersize=4, color=color,
                              capsize=2, elinewidth=1, label=text if row == 0 else None)
    axes.set_yticks(range(len(SIGNALS)), list(SIGNALS.values()))
    axes.invert_yaxis()
    axes.axvline(0.5, color='black', linewidth=0.8)
    axes.set(xlabel='area under the ROC curve for a right answer', xlim=(0.1, 1))
    axes.set_title('counts against the answer  ←   0.5: no relation   →  speaks for the answer', fontsize=9)
    axes.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def agreement():
    students = {text: [f'dynamics/{name}'] for name, (text, _) in MODELS.items() if name.endswith('tiny_cifar100')}
    students['three blocks, any K, three seeds, 20 minutes'] = [f'lab/seeds/s{seed}' for seed in range(3)]
    figure, grid = sheet(11, 5.4, len(students), rows=2, sharex=True, sharey='row')
    for column, (text, folders) in zip(grid.T, students.items(), strict=True):
        found = [row for folder in folders for row in read(f'{folder}/agreement.json')['found']]
        for method, color in zip(dict.fromkeys(row['method'] for row in found), ('C3', 'C0', 'C1', 'C2'), strict=True):
            evaluations = sorted({row['evaluations'] for row in found if row['method'] == method})
            for axes, key in zip(column, ('top1', 'agreement'), strict=True):
                of_seeds = [[row[key] for row in found if (row['method'], row['evaluations']) == (method, nfe)]
                            for nfe in evaluations]
                axes.plot(evaluations, list(map(mean, of_seeds)), 'o-', color=color, label=method)
                axes.fill_between(evaluations, *zip(*((min(of), max(of)) for of in of_seeds), strict=True),
                                  color=color, alpha=0.3)
        column[0].set_title(text, fontsize=10)
        column[1].set(xlabel='evaluations of the block', xscale='log')
        ticks(column[1], sorted({row['evaluations'] for row in found}))
    for axes, text in zip(grid[:, 0], ('top-1 accuracy, %', 'same class as with K = 100, %'), strict=True):
        axes.set_ylabel(text)
    grid[1, 1].legend(fontsize=8)
    return figure


def robustness():
    summary = read('robustness.json')['summary']
    figure, (left, right) = sheet(9, 3.8, 2, sharey=True)
    for name, (text, color) in {**MODELS, **OTHERS}.items():
        rows = {label.partition('K = ')[2] or ('3' if name in OTHERS else '12'): row for label, row in summary.items()
                if label.partition(', ')[0] == name}
        steps, lost = [int(steps) for steps in rows], [row['lost'] for row in rows.values()]
        left.plot(steps, lost, 'o-', color=color, label=text)
        if name in MODELS:
            constant = read(f'dynamics/{name}/lipschitz.json')['found']
            own = dict(zip(steps, lost, strict=True)).get(len(constant['along']), lost[0])
            right.errorbar(constant['mean'], own, xerr=constant['sd'], fmt='o', color=color, capsize=2)
    left.set(xlabel='K', xscale='log', ylabel='points lost to corruptions, on average')
    ticks(left, (3, 6, 12))
    right.set(xlabel='local Lipschitz constant of the steps, with its own K')
    figure.legend(fontsize=7, loc='outside right center')
    return figure


def by_design(folder):
    """What the seeds of a design gave, by minutes, words and K, of hub/lab/."""
    found = {}
    for path in sorted((HUB / 'lab' / folder).glob('*.json')):
        name, *more, minutes = path.stem.split('-')
        results = read(path)
        own = next((row for row in results if name.endswith(str(row['steps']))), results[0])
        words = ''.join(DESIGNS[each.rstrip('0123456789')] for each in (name, *more))
        found.setdefault((int(minutes), words, own['steps']), []).append(own)
    return found


def controls():
    group, = read('verdict.json')['groups']
    counted = {int(row['name'].rpartition(' ')[2]): row['operations'] for row in group['rows'] if 'K' in row['name']}
    figure, panels = sheet(9, 4, 2, sharey=True)
    for (_, words, steps), found in by_design('controls').items():
        top1, row = [each['top1'] for each in found], found[0]
        half = t.ppf(0.975, len(top1) - 1) * stdev(top1) / len(top1) ** 0.5 if len(top1) > 1 else None
        for axes, x in zip(panels, (row['parameters'] / 1e6, row.get('operations') or counted[steps]), strict=True):
            axes.errorbar(x, mean(top1), half, fmt='o', capsize=3, label=f'{words}, K = {steps}' if steps else words)
    panels[0].set(xlabel='parameters, 10⁶ (two bytes each in float16)', ylabel='top-1 accuracy on CIFAR-100, %')
    panels[1].set(xlabel='multiply-adds of an image, 10⁶')
    for axes, marks in zip(panels, ((0.5, 1, 2, 3), (50, 100, 200, 400)), strict=True):
        axes.set(xscale='log', xlim=(0.8 * marks[0], 1.2 * marks[-1]))
        ticks(axes, marks)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc='outside right center')
    return figure


def draw():
    for make in (auroc, agreement, robustness, controls):
        figure = make()
        for axes in figure.axes:
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        figure.savefig(drawn := io.BytesIO())
        Image.open(drawn).convert('RGB').quantize(64).save(HUB / 'pictures' / f'{make.__name__}.png', optimize=True)
