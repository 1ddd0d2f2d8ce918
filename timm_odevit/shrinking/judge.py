"""Images to learn from and to judge by, what is measured of a model on them, and how sure that is."""
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import Mapped, unlabelled
from ..data.config import DataConfig
from ..data.read import Data, read_data
from ..hooks import evaluating

__all__ = ['BATCH', 'SAMPLE', 'Held', 'Material', 'margin', 'outputs_of', 'read_images', 'score', 'scores', 'value_of']

BATCH = 64
HELD = 2048  # images that choose and judge, at most
HELD_OUT = 0.2  # share of the images that is held out to choose and to judge, unless others are given for that
SAMPLE = 256  # images that are learned from, at least, to initialise by: a few would fit themselves alone
NUMBERS = 2 ** 28  # in the images held out: 1 GB
LEAST = 0.2  # of the labels that a model must know, and more than by chance


class Held(NamedTuple):
    """Images held out [N, C, H, W], their labels [N], and the model's outputs for them [N, ...]."""
    images: Tensor
    labels: Tensor
    outputs: Tensor


class Material(NamedTuple):
    """A model to shrink, and images to shrink it by.

    Attributes:
        model: The model.
        data: All images, to learn from.
        choosing: Images held out that choose the best state of a training.
        judging: Others, which judge the result: those kept for that, if there are labels.
        learned: Some of those that are learned from, not augmented.
        measure: 'accuracy', if there are labels that are the model's; 'agreement' with its top-1 class, if it has
            classes; or 'cosine' with its embeddings.
        why: Why it is not accuracy, in a sentence.
    """
    model: nn.Module
    data: Data
    choosing: Held
    judging: Held
    learned: Held
    measure: str
    why: str


def read_images(source: Any, model: nn.Module, embedding: bool = False) -> Material:
    """Read images, in any form that `shrink` takes; raises ValueError if they do not fit the model."""
    classes: Any = 0 if embedding else getattr(model, 'num_classes', 0)
    if getattr(model, 'num_classes', 0) == 1:
        raise ValueError('The model has one output (num_classes=1), with which every student would agree. Give a model '
                         'with classes or embeddings.')
    data = read_data(source, model, DataConfig(batch_size=BATCH), labels=False if embedding else None,
                     held_out=HELD_OUT)
    if data.val is None:
        raise ValueError('shrink holds images out, which it cannot do for a loader. Give a folder, an .npz or tensors.')
    why = "the model's outputs are embeddings" if embedding else data.why
    most = max(2, min(HELD, NUMBERS // data.sample('val', 1)[0].numel()))
    images, labels = data.sample('val', most)
    half = most // 2 if data.test is not None else (len(images) + 1) // 2
    # one image chooses and judges
    judging = data.sample('test', half) if data.test is not None else (images[half:], labels[half:])
    judging = judging if len(judging[0]) else (images, labels)
    measure = 'accuracy' if classes and data.labelled else 'agreement' if classes else 'cosine'
    if measure == 'accuracy':
        right = float((outputs_of(model, images).argmax(dim=-1) == labels).double().mean())
        if right < max(LEAST, 1. / classes + 2. * (1. / classes * (1. - 1. / classes) / len(labels)) ** 0.5):
            measure, why = 'agreement', f'the model gets only {100 * right:.1f} % right, so they are not its classes'
    parts = (images[:half], labels[:half]), judging, data.sample('train', max(len(judging[0]), SAMPLE))
    if measure != 'accuracy':
        data = replace(data, train=Mapped(data.train, unlabelled))
    choosing, judge, learned = (_held(model, *part, measure) for part in parts)
    return Material(model, data, choosing, judge, learned, measure, why)


def _held(model: nn.Module, images: Tensor, labels: Tensor, measure: str) -> Held:
    outputs = outputs_of(model, images)
    return Held(images, labels if measure == 'accuracy' else outputs.flatten(1).argmax(dim=-1), outputs)


@torch.no_grad()
def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """The outputs of a model for images [N, C, H, W], in batches, on the CPU, as float32."""
    device = next(model.parameters()).device
    with evaluating(model):
        return torch.cat([model(batch.to(device)).float().cpu() for batch in images.split(BATCH)])


def scores(outputs: Tensor, held: Held, measure: str) -> Tensor:
    """What is measured of each image [N]: a cosine, or whether the class is right."""
    return (F.cosine_similarity(outputs.flatten(1), held.outputs.flatten(1), dim=-1) if measure == 'cosine'
            else outputs.argmax(dim=-1) == held.labels).double()


def margin(each: Tensor, first: Tensor, measure: str) -> float:
    """Half of the 95 % interval of the mean difference between two models on the same images, in percent.

    Source, for shares: Agresti & Min 2005, with half an image more of each kind.
    """
    difference, more = each - first, 0. if measure == 'cosine' else 1.
    n = len(each) + 2. * more
    return 196. * float((difference.square().sum() + more - difference.sum() ** 2 / n).clamp(0.)) ** 0.5 / n


def score(each: Tensor, measure: str) -> tuple[float, float]:
    """The mean of what is measured, and half of its 95 % interval, in percent.

    Source of the interval of a share: Agresti & Coull 1998, with two more of each kind.
    """
    share, n = (float(each.sum()) + 2.) / (len(each) + 4.), len(each)
    spread = float(each.std()) / n ** 0.5 if measure == 'cosine' and n > 1 else (share * (1. - share) / (n + 4.)) ** 0.5
    return 100. * float(each.mean()), 196. * spread


def value_of(model: nn.Module, held: Held, measure: str) -> float:
    """The mean of what is measured of a model, in percent."""
    return score(scores(outputs_of(model, held.images), held, measure), measure)[0]
