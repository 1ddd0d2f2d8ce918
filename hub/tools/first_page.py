"""The tables and pictures of README.md from the records in hub/; `python hub/tools/table.py --write` puts them in."""
import math
import sys

from cards import HUB, dataset_of, read
from matplotlib.figure import Figure

sys.path.append(str(HUB.parent / 'examples'))
from generate import rows

# trained from scratch at 32 px on CIFAR-100: 10^6 parameters, 10^6 multiply-adds, top-1 %
# Sources: chenyaofo/pytorch-cifar-models, SHI-Labs/Compact-Transformers, sunshangquan/logit-standardization-KD
SCRATCH = {'ResNet-20': (0.28, 41, 68.8), 'CCT-2/3x2': (0.28, 33, 66.9), 'CCT-4/3x2': (0.48, 46, 70.5),
           'ResNet-44': (0.67, 97, 71.6), 'ResNet-56': (0.86, 126, 72.6), 'MobileNetV2 x 0.75': (1.48, 59, 73.6),
           'WRN-16-2, distilled': (0.70, 101, 77.5)}
STEPS = (3, 6, 12, 24)
PAPER = (35, 72.1)  # number of steps and top-1 % of CIFAR-100 of the student in arXiv 2511.16501
BLUE, RED, GREEN, GREY, ORANGE, BROWN = '#2a6fbb', '#c0392b', '#2e8b57', '#777777', '#d9822b', '#7a4b1e'
# students that the first picture shows: color, where their accuracy stands, and for which numbers of steps
SHOWN = {
    'odevit_tiny_native_patch16_128.deit_tiny_cifar100': (BLUE, (-6, -12), (3, 6, 24, 100)),
    'odevit_tiny_native_patch16_128.deit_tiny_k6_cifar100': (GREEN, (7, -3), (6,)),
    'odevit_tiny_native_three_patch16_128.deit_tiny_cifar100': (ORANGE, (-8, 6), (3, 12, 24, 100)),
    'odevit_tiny_native_three_patch16_128.deit_tiny_k6_cifar100': (BROWN, (7, -3), (6,))}
WORDS = {'odevit_tiny_native': 'one block', 'odevit_tiny_native_three': 'three blocks', 'deit_tiny': 'DeiT-tiny',
         'odevit_tiny': "the paper's block"}


def published():
    """Name, record, and what was found on the test images by number of steps, of each published model."""
    for path in sorted(HUB.glob('*/results.json'), key=lambda path: (dataset_of(path.parent.name), path.parent.name)):
        record = read(path)
        yield path.parent.name, record, {r['steps']: r for r in record['test'] if r['model'] != 'teacher'}


def in_words(name, trained):
    """A published model in words, with the numbers of steps of its training."""
    words = WORDS[name.partition('_patch')[0]]
    return words if not trained else f'{words}, any K' if len(trained) > 1 else f'{words}, K = {trained[0]} alone'


def models():
    """Each published model: size, top-1 with numbers of steps, those of training in bold, share of its teacher's."""
    lines = []
    for name, record, found in published():
        trained = record['trained_at'] or []
        cells = [f"**{found[k]['top1']:.1f}**" if k in trained else f"{found[k]['top1']:.1f}" if k in found else ''
                 for k in STEPS] if trained else ['', '', f"{found[None]['top1']:.1f}", '']
        row = max((found[k] for k in trained or [None] if k in found), key=lambda r: r['top1'])
        kept = '' if row['kept'] is None else f"{row['kept']:.0f}"
        words = (f"{dataset_of(name)}: {in_words(name, record['trained_at'])}"
                 f"{', from scratch' * bool(trained and not kept)}")
        lines.append([words, f"{row['parameters'] / 1e6:.2f}", *cells, kept, f'[`{name}`]({name}/README.md)'])
    return rows(['model', '10⁶ parameters', *(f'K = {steps}' for steps in STEPS), '% of its teacher', 'name'], lines)


def which():
    """The published models as files, in the terms of `odevit shrink`; hub/verdict.json has a few more."""
    lines, trained = [], {name: record['trained_at'] for name, record, _ in published()}
    group, = read('verdict.json')['groups']
    for row in group['rows']:
        name, *more = row['name'].split(', ')
        worse = 'int8' if 'three' in name else '4 bits'  # of students for any K: three blocks lose little by 4 bits
        if row['kind'] == 'student' and ('native' not in name or (len(trained[name]) > 1 and worse in more)):
            continue
        ratios = [f'{ms / of:.2f}' for ms, of in zip(row['ms'], group['rows'][0]['ms'], strict=True)]
        words = (f'[{in_words(name, trained[name])}](hub/{name}/README.md)' if name in trained else
                 "[three of DeiT-tiny's blocks](hub/TRAINING.md#three-blocks-on-a-gpu)")
        lines.append([words, ', '.join(more) or 'float32', f"{row['parameters'] / 1e6:.2f}", f"{row['mb']:.2f}",
                      f"{row['value']:.1f}", *ratios, f"{row['operations']:.0f}"])
    return rows(['model', 'file', '10⁶ parameters', 'MB', 'top-1 %', 'time, batch 1', 'batch 32', '10⁶ multiply-adds'],
                lines)


def idea():
    """Draw what happens to the blocks, and the accuracy of one block with any number of steps."""
    from matplotlib.patches import FancyBboxPatch
    left, right = (drawing := Figure(figsize=(9, 3.3), layout='constrained')).subplots(1, 2, width_ratios=(1.05, 1))
    left.set(xlim=(0, 10), ylim=(0, 10))
    left.axis('off')

    def box(x, y, width, height, color, text='', **more):
        left.add_patch(FancyBboxPatch((x, y), width, height, boxstyle='round,pad=0.05', color=color, **more))
        left.text(x + width / 2, y + height / 2, text, ha='center', va='center', fontsize=8, color='white')
    for layer in range(12):
        box(0.4, 0.7 + 0.67 * layer, 2.2, 0.42, GREY, '')
    left.text(1.5, 9.3, 'a ViT: 12 blocks', ha='center', fontsize=9)
    left.annotate('', (4.4, 4.7), (3, 4.7), arrowprops=dict(arrowstyle='-|>', color='black'))
    left.text(3.7, 5.1, 'convert_', ha='center', fontsize=8, family='monospace')
    for x, y, color, text in ((4.9, 3.9, BLUE, 'one block,\nK times'),
                              *((7.8, y, BROWN, 'K/3 times') for y in (1.2, 3.9, 6.6))):
        box(x, y, 2, 1.6, color, text)
        left.annotate('', (x + 0.3, y + 1.75), (x + 1.7, y + 1.75), arrowprops=dict(
            arrowstyle='-|>', color=color, connectionstyle='arc3,rad=0.7'))
    left.text(7.35, 4.7, 'or', ha='center', va='center', fontsize=9)
    left.text(7.35, 9.3, 'an ODE-ViT', ha='center', fontsize=9)
    left.text(5.9, 3.3, '1/10 of the\nparameters', ha='center', va='top', fontsize=7)
    left.text(8.8, 0.7, '1/4 of the parameters', ha='center', va='top', fontsize=7)

    for name, (color, shift, steps) in SHOWN.items():
        record = read(f'{name}/results.json')
        teacher, *found = sorted(record['test'], key=lambda r: r['model'] != 'teacher')
        share = found[0]['parameters'] / teacher['parameters']
        if len(record['trained_at']) == 1:  # it has no other
            found = [r for r in found if r['steps'] in record['trained_at']]
        right.plot([r['steps'] for r in found], [r['top1'] for r in found], 'o-', color=color, markersize=4,
                   label=f"{in_words(name, record['trained_at'])}: {100 * share:.0f} % of the parameters")
        for r in found:
            if r['steps'] in steps:
                right.annotate(f"{r['top1']:.1f}", (r['steps'], r['top1']), shift, textcoords='offset points',
                               fontsize=8, color=color)
    right.axhline(teacher['top1'], color=GREY, linestyle=':', linewidth=1)
    right.annotate(f"DeiT-tiny, 12 blocks: {teacher['top1']:.1f} %", (110, teacher['top1']), (0, 3), fontsize=8,
                   textcoords='offset points', color=GREY, ha='right')
    right.plot(*PAPER, 'o', color=RED, markersize=4)
    right.annotate(f'the paper, 7 million parameters: {PAPER[1]} %', (110, PAPER[1]), (0, -46), ha='right',
                   textcoords='offset points', fontsize=8, color=RED)
    right.legend(fontsize=7.5, loc='lower right')
    right.set(xlabel='number of steps K', ylabel='top-1 accuracy on CIFAR-100, %', xscale='log',
              ylim=(56, 87), xlim=(2.5, 125))
    ticks(right, (3, 6, 12, 24, 48, 100))
    return drawing


def frontier():
    """Draw accuracy against the size of the file."""
    axes = (drawing := Figure(figsize=(7.5, 4), layout='constrained')).subplots()
    group, = read('verdict.json')['groups']
    marks, points = {'float32': 's', 'int8': 'o', '4 bits': '^'}, []
    for row in group['rows']:
        name, file, *steps = *row['name'].split(', '), *['float32'] * (', ' not in row['name'])
        base = name.partition('_patch')[0]
        words = ', '.join([WORDS.get(base, 'three plain blocks').replace('the ', ''), *steps])
        color = {'original': GREY, 'plain': GREEN}.get(row['kind'], BLUE if 'three' in base else ORANGE)
        if '_k' in name or row['kind'] != 'student':
            axes.plot(row['mb'], row['value'], marks[file], color=color, markersize=6, zorder=3)
            points.append((f'{words}, {file}', color, row['mb'], row['value']))
    axes.set(xlabel='file, MB', ylabel='top-1 accuracy on CIFAR-100, %', xscale='log', xlim=(0.2, 70), ylim=(66, 86))
    ticks(axes, (0.4, 0.7, 1, 2, 4, 8, 20))
    place_labels(axes, points, '')
    return drawing


def compare():
    """Draw accuracy against parameters and against multiply-adds on CIFAR-100, with small models by others."""
    drawing = Figure(figsize=(9, 3.8), layout='constrained')
    points = [(name, RED, *values) for name, values in SCRATCH.items()]
    group, = read('verdict.json')['groups']
    for row in (each for each in group['rows'] if '4 bits' not in each['name']):
        name, *file = row['name'].split(', ')
        size = row['parameters'] / 1e6, row['operations']
        if name.partition('_patch')[0] in WORDS and file != ['int8']:  # the teacher as it is, and students
            record = read(f'{name}/results.json')
            found = {r['steps']: r['top1'] for r in record['test'] if r['model'] != 'teacher'}
            _, _, steps = (file[-1] if file else '').partition('K = ')
            words = in_words(name, record['trained_at']).replace('any K', f'K = {steps}')
            words = WORDS['odevit_tiny'] if words.startswith(WORDS['odevit_tiny']) else words
            points.append((words, BLUE if steps else GREY, *size, found[int(steps) if steps else None]))
        elif name == 'plain':
            points.append(('3 plain blocks', GREEN, *size, read('runs/plain.json')[1]['top1']))
    for axes, column, label, marks in zip(
            drawing.subplots(1, 2, sharey=True), (2, 3), ('parameters, 10⁶', 'multiply-adds of an image, 10⁶'),
            ((0.25, 0.5, 1, 2, 4, 8), (25, 50, 100, 200, 400, 800)), strict=True):
        axes.set(xlabel=label, xscale='log', xlim=(0.5 * marks[0], 3 * marks[-1]), ylim=(60, 87))
        ticks(axes, marks)
        place_labels(axes, [(point[0], point[1], point[column], point[4]) for point in points])
    drawing.axes[0].set_ylabel('top-1 accuracy on CIFAR-100, %')
    return drawing


def ticks(axes, values):
    axes.set_xticks(values, [f'{value:g}' for value in values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def place_labels(axes, points, mark='o'):
    """Plot points with 95 % intervals of 10,000 images, and labels as near as they cover no other point or label."""
    taken = [(other, other, y) for _, _, other, y in points]

    def free(low, top, y):
        return not any(first <= top and last >= low and abs(y - at) < 0.75 for first, last, at in taken)
    for name, color, x, y in sorted(points, key=lambda point: -point[3]):
        axes.plot(x, y, mark, color=color, markersize=5)
        axes.errorbar(x, y, 196 * (y / 100 * (1 - y / 100) / 10_000) ** 0.5, color=color, capsize=2, linewidth=1)
        wide = 0.1 + 0.07 * len(name)  # of a label, on the logarithmic axis
        sides = {'left': (1.02 * x, x * math.exp(wide)), 'right': (x / math.exp(wide), x / 1.02)}  # by its alignment
        shift, side = next((shift, side) for distance in range(100) for shift in (distance / 10, -distance / 10)
                           for side in sides if free(*sides[side], y + shift))
        taken.append((*sides[side], y + shift))
        axes.annotate(name, (x, y + shift), (5 if side == 'left' else -5, -2), textcoords='offset points', fontsize=7,
                      color=color, ha=side)
