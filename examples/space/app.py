"""An image, a student and its teacher: classes and attention over t, and a slider for the number K of steps.

    pip install -r requirements.txt && python app.py
"""
import os
import re
from functools import lru_cache
from pathlib import Path

os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')

import gradio as gr
import matplotlib
import timm
import torch
from matplotlib.figure import Figure
from PIL import ImageOps

from timm_odevit import attention_over_time, with_steps
from timm_odevit.dynamics.flow import follow as flow_of

matplotlib.use('Agg')
matplotlib.rcParams.update({  # readable on a light and on a dark page
    'figure.facecolor': 'none', 'axes.facecolor': 'none', 'savefig.facecolor': 'none', 'axes.edgecolor': '#888888',
    **dict.fromkeys(('text.color', 'axes.labelcolor', 'axes.titlecolor', 'xtick.color', 'ytick.color'), '#888888')})
KINDS = {'native_three': 'three blocks', 'native': 'one block', '': "the paper's block"}
IMAGES = Path(gr.__file__).parent / 'media_assets' / 'images'
SHOWN = 5  # classes, and times
EXAMPLES = [str(IMAGES / name) for name in ('cheetah1.jpg', 'tower.jpg', 'lion.jpg')]


@lru_cache
def load(name):
    model = timm.create_model(name, pretrained=True).eval()
    data = timm.data.resolve_model_data_config(model)
    return model, model.pretrained_cfg['label_names'], timm.data.create_transform(**data, is_training=False)


def title(name):
    """What a student is, in words."""
    architecture, tag = name.split('.')
    variant, _, size = architecture.removeprefix('odevit_tiny').rpartition('_patch16_')
    own = re.search(r'_k(\d+)_', tag)
    kind = KINDS.get(variant.strip('_'), variant) + (f' for K = {own[1]}' if own else '')
    count = sum(p.numel() for p in load(name)[0].parameters()) / 1e6
    return f"{tag.rsplit('_', 1)[-1].replace('cifar', 'CIFAR-')}, {kind}, {count:.1f} M, {size} pixels"


STUDENTS = {title(name): name for name in timm.list_models('odevit_*.deit_tiny_*', pretrained=True)}
FIRST = next(words for words, name in STUDENTS.items() if '_128.' in name)


def teacher_of(name):
    """The name of a student's teacher, if it is published."""
    size = name.split('.')[0].rsplit('_', 1)[-1]
    teacher = f"deit_tiny_patch16_{size}.{name.rsplit('_', 1)[-1]}"
    return teacher if timm.list_models(teacher, pretrained=True) else None


def follow(image, name, steps):
    """Probabilities [K + 1, classes] at t = 0 ... T, attention of the class token [K, side, side], times [K + 1]."""
    model, _, transform = load(name)
    with flow_of(with_steps(model, max(int(steps), len(model.blocks.shared.phases))), transform(image)[None]) as flow:
        probabilities = torch.cat([flow.logits(x).softmax(-1) for x in flow.states()])
        seen = attention_over_time(flow)
    attention = seen.attention[0, :, seen.prefix:].unflatten(1, model.patch_embed.grid_size)
    return probabilities, attention, flow.times


def draw_classes(probabilities, times, names):
    """The classes of the last state along the way, from probabilities [K + 1, classes]."""
    figure = Figure(figsize=(5, 3.6), layout='constrained')
    axes = figure.subplots()
    for index in probabilities[-1].topk(min(SHOWN, probabilities.shape[1])).indices.tolist():
        axes.plot(times, probabilities[:, index].numpy(), marker='.', label=names[index])
    axes.set(xlabel='t', ylabel='probability', ylim=(0, 1.02), title='Classes, if the head read the state at t')
    axes.legend(frameon=False)
    return figure


def draw_attention(picture, attention, times):
    """An image, and where its attention is at five times, on one scale [K, rows, columns]."""
    figure = Figure(figsize=(5, 3.6), layout='constrained')
    first, *others = figure.subplots(2, 3).flat
    first.imshow(picture)
    first.set_title('image', fontsize=9)
    chosen = torch.linspace(0, len(attention) - 1, min(SHOWN, len(attention))).round().int().tolist()
    for axes, i in zip(others, chosen, strict=False):
        drawn = axes.imshow(attention[i].numpy(), cmap='magma', vmin=0, vmax=float(attention.max()))
        axes.set_title(f't = {times[i]:.3g}', fontsize=9)
    for axes in figure.axes:
        axes.axis('off')
    figure.colorbar(drawn, ax=[first, *others], shrink=0.8, label='attention')
    return figure


def answer(image, student, steps):
    """The classes of student and teacher, two figures, and the classes that they know; nothing without an image."""
    name = STUDENTS[student]
    labels = load(name)[1]
    known = f"{len(labels)} classes: {', '.join(sorted(labels))}."
    if image is None or max(image.size) > 500 * min(image.size):
        return None, None, None, None, known
    image = image.convert('RGB')
    probabilities, attention, times = follow(image, name, steps)
    found, wanted = dict(zip(labels, probabilities[-1].tolist(), strict=True)), None
    if (teacher := teacher_of(name)) is not None:
        model, _, transform = load(teacher)
        with torch.no_grad():
            wanted = dict(zip(labels, model(transform(image)[None]).softmax(-1)[0].tolist(), strict=True))
    seen = ImageOps.fit(image, (128, 128))  # the model sees the centre
    return found, wanted, draw_classes(probabilities, times, labels), draw_attention(seen, attention, times), known


def demo():
    with gr.Blocks(title='ODE-ViT') as page:
        gr.Markdown('# ODE-ViT\nOne transformer block that an ODE solver evaluates K times, next to the vision '
                    'transformer that it was distilled from. Choose another image, another student, another K.')
        with gr.Row():
            with gr.Column(min_width=280):
                image = gr.Image(EXAMPLES[0], label='image', type='pil', sources=['upload', 'clipboard'], height=260)
                gr.Examples(EXAMPLES, image, label='examples')
                student = gr.Dropdown(list(STUDENTS), value=FIRST, label='student: data, kind, parameters')
                steps = gr.Slider(1, 24, value=6, step=1, label='K, steps of the solver')
                with gr.Accordion('What it knows', open=False):
                    known = gr.Markdown()
            with gr.Column(min_width=280):
                found = gr.Label(num_top_classes=SHOWN, label='student')
                wanted = gr.Label(num_top_classes=SHOWN, label='teacher')
        with gr.Row():
            lines = gr.Plot(label='classes over t', show_label=False, min_width=280)
            maps = gr.Plot(label='attention over t', show_label=False, min_width=280)
        gr.on([page.load, image.change, student.change, steps.change], answer, [image, student, steps],
              [found, wanted, lines, maps, known], trigger_mode='always_last')
    page.theme = gr.themes.Default(font=['system-ui', 'sans-serif'], font_mono=['monospace'])
    return page


if __name__ == '__main__':
    demo().launch()
