"""An image, a student and its teacher: classes and attention over t, and a slider for the number K of steps.

    pip install -r requirements.txt && python app.py
"""
import os
import threading
from functools import lru_cache

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
STUDENTS = [name for name in timm.list_models('odevit_*', pretrained=True) if '.' in name]
LOCK = threading.Lock()    # the number of steps is a setting of the model
SHOWN = 5


@lru_cache
def load(name):
    model = timm.create_model(name, pretrained=True).eval()
    data = timm.data.resolve_model_data_config(model)
    return model, model.pretrained_cfg['label_names'], timm.data.create_transform(**data, is_training=False)


def teacher_of(name):
    return f"deit_tiny_patch16_64.{name.rsplit('_', 1)[-1]}"


@torch.no_grad()
def follow(image, name, steps):
    """Probabilities [K + 1, classes] at t = 0 ... T, attention of the class token [K, side, side], times [K + 1]."""
    model, _, transform = load(name)
    with LOCK, model.blocks.at(int(steps)):
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


def answer(image, name, steps):
    """The student's and the teacher's classes, and two figures."""
    if image is None:
        raise gr.Error('Upload an image first.')
    image = image.convert('RGB')
    labels = load(name)[1]
    probabilities, attention, times = follow(image, name, steps)
    teacher, _, transform = load(teacher_of(name))
    with torch.no_grad():
        expected = teacher(transform(image)[None]).softmax(-1)[0]
    student = dict(zip(labels, probabilities[-1].tolist(), strict=True))
    return (student, dict(zip(labels, expected.tolist(), strict=True)), over_time(probabilities, times, labels),
            attended(image, attention, times))


def over_time(probabilities, times, labels):
    figure = Figure(figsize=(6, 3.2), layout='constrained')
    axes = figure.subplots()
    for index in probabilities[-1].topk(SHOWN).indices.tolist():
        axes.plot(times, probabilities[:, index], marker='.', label=labels[index])
    axes.set(xlabel='t', ylabel='probability', ylim=(0, 1), title='Classes, if the head read the state at t')
    axes.legend(frameon=False)
    return figure


def attended(image, attention, times):
    figure = Figure(figsize=(6, 1.9), layout='constrained')
    figure.suptitle('Attention of the class token')
    chosen = torch.linspace(0, len(attention) - 1, SHOWN).round().int().tolist()
    for axes, i in zip(figure.subplots(1, SHOWN), chosen, strict=True):
        axes.imshow(ImageOps.fit(image, (128, 128)), extent=(0, 1, 0, 1))  # the model sees the centre
        axes.imshow(attention[i], extent=(0, 1, 0, 1), alpha=0.6, cmap='magma', interpolation='bilinear')
        axes.set_title(f't = {times[i]:.3g}', fontsize=9)
        axes.axis('off')
    return figure


def demo():
    fonts = ['system-ui', 'sans-serif']
    with gr.Blocks(title='ODE-ViT') as page:
        gr.Markdown('# ODE-ViT\nOne transformer block that an ODE solver evaluates K times, next to the vision '
                    'transformer that it was distilled from. Upload a photo of something in CIFAR and move the slider.')
        with gr.Row():
            with gr.Column():
                image = gr.Image(label='image', type='pil', sources=['upload', 'clipboard'], height=260)
                name = gr.Dropdown(STUDENTS, value=STUDENTS[0], label='student')
                steps = gr.Slider(1, 24, value=12, step=1, label='K, steps of the solver')
            with gr.Column():
                student = gr.Label(num_top_classes=SHOWN, label='student')
                teacher = gr.Label(num_top_classes=SHOWN, label='teacher')
        with gr.Row():
            lines = gr.Plot(label='classes over t', show_label=False)
            maps = gr.Plot(label='attention over t', show_label=False)
        for event in (image.upload, name.change, steps.release):
            event(answer, [image, name, steps], [student, teacher, lines, maps])
    page.theme = gr.themes.Default(font=fonts, font_mono=['monospace'])
    return page


if __name__ == '__main__':
    demo().launch()
