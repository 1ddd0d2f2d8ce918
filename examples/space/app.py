"""An image, a student and its teacher: classes and attention over t, and a slider for the number K of steps.

    pip install -r requirements.txt && python app.py
"""
import os
from functools import lru_cache
from pathlib import Path

os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')

import gradio as gr
import matplotlib
import timm
import torch
from matplotlib.figure import Figure
from PIL import ImageOps

import timm_odevit  # noqa: F401  registers the models
from timm_odevit.recording import watch_blocks

matplotlib.use('Agg')
matplotlib.rcParams.update({  # readable on a light and on a dark page
    'figure.facecolor': 'none', 'axes.facecolor': 'none', 'savefig.facecolor': 'none', 'axes.edgecolor': '#888888',
    **dict.fromkeys(('text.color', 'axes.labelcolor', 'axes.titlecolor', 'xtick.color', 'ytick.color'), '#888888')})
SHOWN = 5
KINDS = {'native_r23': 'larger', 'native': 'smaller', '': "the paper's"}
IMAGES = Path(gr.__file__).parent / 'media_assets' / 'images'
EXAMPLES = [str(IMAGES / name) for name in ('cheetah1.jpg', 'tower.jpg', 'lion.jpg')]


@lru_cache
def load(name):
    model = timm.create_model(name, pretrained=True).eval()
    data = timm.data.resolve_model_data_config(model)
    return model, model.pretrained_cfg['label_names'], timm.data.create_transform(**data, is_training=False)


def title(name):
    """What a student is, in words."""
    architecture, tag = name.split('.')
    kind = KINDS[architecture.removeprefix('odevit_tiny').removesuffix('_patch16_64').strip('_')]
    count = sum(p.numel() for p in load(name)[0].parameters()) / 1e6
    return f"{tag.rsplit('_', 1)[-1].replace('cifar', 'CIFAR-')}, {kind}, {count:.1f} M"


STUDENTS = {title(name): name for name in timm.list_models('odevit_*', pretrained=True) if '.' in name}
FIRST = next(words for words in STUDENTS if words.startswith('CIFAR-100, larger'))


def teacher_of(name):
    return f"deit_tiny_patch16_64.{name.rsplit('_', 1)[-1]}"


@torch.no_grad()
def follow(image, name, steps):
    """Probabilities [K + 1, classes] at t = 0 ... T, attention of the class token [K, side, side], times [K + 1]."""
    model, _, transform = load(name)
    with model.blocks.at(int(steps)):
        parts = list(model.blocks)
        with watch_blocks([parts]) as seen:
            model(transform(image)[None])
        states = seen[0][0]
        maps = [model.blocks.shared.attention_map(part.t, x) for part, x in zip(parts, states, strict=False)]
        times = [*(part.t for part in parts), model.blocks.end]
    probabilities = torch.cat([model.forward_head(model.norm(x)).softmax(-1) for x in states])
    side = model.patch_embed.grid_size
    attention = torch.cat([m.mean(1)[:, 0, model.num_prefix_tokens:] for m in maps]).unflatten(1, side)
    return probabilities, attention, times


def answer(image, student, steps):
    """The classes of student and teacher, two figures, and the classes that they know; nothing without an image."""
    name = STUDENTS[student]
    labels = load(name)[1]
    known = f"{len(labels)} classes: {', '.join(sorted(labels))}."
    if image is None:
        return None, None, None, None, known
    image = image.convert('RGB')
    probabilities, attention, times = follow(image, name, steps)
    teacher, _, transform = load(teacher_of(name))
    with torch.no_grad():
        expected = teacher(transform(image)[None]).softmax(-1)[0]
    found, wanted = (dict(zip(labels, p.tolist(), strict=True)) for p in (probabilities[-1], expected))
    return found, wanted, over_time(probabilities, times, labels), attended(image, attention, times), known


def over_time(probabilities, times, labels):
    figure = Figure(figsize=(5, 3.6), layout='constrained')
    axes = figure.subplots()
    for index in probabilities[-1].topk(SHOWN).indices.tolist():
        axes.plot(times, probabilities[:, index], marker='.', label=labels[index])
    axes.set(xlabel='t', ylabel='probability', ylim=(0, 1.02), title='Classes, if the head read the state at t')
    axes.legend(frameon=False)
    return figure


def attended(image, attention, times):
    """The image, and the attention of the class token at five times, on one scale."""
    figure = Figure(figsize=(5, 3.6), layout='constrained')
    first, *others = figure.subplots(2, 3).flat
    picture, most = ImageOps.fit(image, (128, 128)), float(attention.max())  # the model sees the centre
    first.imshow(picture)
    first.set_title('image', fontsize=9)
    first.axis('off')
    for axes, i in zip(others, torch.linspace(0, len(attention) - 1, SHOWN).round().int().tolist(), strict=True):
        drawn = axes.imshow(attention[i], cmap='magma', vmin=0, vmax=most)
        axes.set_title(f't = {times[i]:.3g}', fontsize=9)
        axes.axis('off')
    figure.colorbar(drawn, ax=[first, *others], shrink=0.8, label='attention of the class token')
    return figure


def demo():
    with gr.Blocks(title='ODE-ViT') as page:
        gr.Markdown('# ODE-ViT\nOne transformer block that an ODE solver evaluates K times, next to the vision '
                    'transformer that it was distilled from. Choose another image, another student, another K.')
        with gr.Row():
            with gr.Column(min_width=280):
                image = gr.Image(EXAMPLES[0], label='image', type='pil', sources=['upload', 'clipboard'], height=260)
                gr.Examples(EXAMPLES, image, label='examples')
                student = gr.Dropdown(list(STUDENTS), value=FIRST, label='student: data, kind, parameters')
                steps = gr.Slider(1, 24, value=12, step=1, label='K, steps of the solver')
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
