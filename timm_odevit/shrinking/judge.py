"""Images to learn from and to judge by, what is measured of a model on them, and the size of a student that suits."""
import copy
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert.conversion import Conversion, convert_
from ..convert.planning import check_convertible, choose_size, predict_parameters
from ..data.batches import DataConfig, Mapped, unlabelled
from ..data.read import Data, read_data
from ..hooks import evaluating
from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..training.run import calibrate_

__all__ = ['BATCH', 'SHARE', 'Held', 'Material', 'base_settings', 'converted', 'margin', 'outputs_of', 'read_images',
           'score', 'scores', 'smallest_size', 'suitable', 'suitable_settings', 'value_of']

BATCH = 64
HELD = 2048  # images that choose and judge, at most
HELD_OUT = 0.2  # share of the images that is held out to choose and to judge, unless others are given for that
SAMPLE = 256  # images that are learned from, at least, to initialise by: a few would fit themselves alone
NUMBERS = 2 ** 28  # in the images held out: 1 GB
LEAST = 0.2  # of the labels that a model must know, and more than by chance
SHARE = 0.45  # of the minutes for each of the two students, at most
TRIALS = 4  # each halves the range that is left: 4 find the size to 5 % of the model's parameters
MANY, SEEN = 5_000, 100_000  # images, and images seen in training, from which a quarter of the parameters suits
UPDATE = 4.5  # times that a forward pass of the model takes for each image of an update


class Held(NamedTuple):
    """Images held out [N, C, H, W], their labels [N], and the model's outputs for them [N, ...]."""
    images: Tensor
    labels: Tensor
    outputs: Tensor


class Material(NamedTuple):
    """A model to shrink, and images to shrink it by."""
    model: nn.Module
    data: Data
    choosing: Held  # the best state of a training
    judging: Held  # the result: others, those that were kept for it if there are any
    learned: Held  # some of those to learn from, not augmented
    measure: str  # 'accuracy'; 'agreement' with the model's top-1 class, if labels are not its; or 'cosine'
    why: str  # why it is not accuracy


def read_images(source: Any, model: nn.Module, embedding: bool = False) -> Material:
    """Read images, in any form that `shrink` takes; raises ValueError if they do not fit the model."""
    classes: Any = getattr(model, 'num_classes', 0)
    if classes == 1:
        raise ValueError('The model has one output (num_classes=1), with which every student would agree. Give a model '
                         'with classes or embeddings.')
    data = read_data(source, model, DataConfig(batch_size=BATCH), labels=False if embedding else None,
                     held_out=HELD_OUT)
    if data.val is None:
        raise ValueError('shrink holds images out, which it cannot do for a loader. Give a folder, an .npz or tensors.')
    measure, why = 'accuracy' if data.labelled else 'agreement', data.why
    if embedding or not classes:
        measure, why = 'cosine', "the model's outputs are embeddings"
    most = max(2, min(HELD, NUMBERS // data.sample('val', 1)[0].numel()))
    images, labels = data.sample('val', most)
    half = most // 2 if data.test is not None else (len(images) + 1) // 2
    judging = data.sample('test', half) if data.test is not None else (images[half:], labels[half:])
    judging = judging if len(judging[0]) else (images, labels)  # one image chooses and judges
    if measure == 'accuracy':
        right = float((outputs_of(model, images).argmax(dim=-1) == labels).double().mean())
        if right < max(LEAST, 1. / classes + 2. * (1. / classes * (1. - 1. / classes) / len(labels)) ** 0.5):
            measure, why = 'agreement', f'the model gets only {100 * right:.1f} % right, so they are not its classes'
    if measure != 'accuracy':
        data = replace(data, train=Mapped(data.train, unlabelled))

    def held(images: Tensor, labels: Tensor) -> Held:
        outputs = outputs_of(model, images)
        return Held(images, labels if measure == 'accuracy' else outputs.flatten(1).argmax(dim=-1), outputs)
    return Material(model, data, held(images[:half], labels[:half]), held(*judging),
                    held(*data.sample('train', max(len(judging[0]), SAMPLE))), measure, why)


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


def base_settings(model: nn.Module) -> OdeConfig:
    """The default settings, with a method that suits the model's blocks; raises TypeError if none does."""
    try:
        check_convertible(model)
    except ValueError:  # they cannot be split into attention and MLP
        base = replace(DEFAULT, method='euler')
        check_convertible(model, base)
        return base
    return DEFAULT


def suitable_settings(material: Material, size: Any, keep: float | None, minutes: float, progress: bool) -> OdeConfig:
    """Settings of a student of a size or, without one, that keeps a share or suits images and minutes."""
    if keep is not None:
        return smallest_size(material, keep, minutes / 4, progress)
    size = suitable(material, minutes) if size is None else size
    return choose_size(material.model, size, base_settings(material.model), init='svd_data')


def suitable(material: Material, minutes: float) -> float:
    """The share of the model's parameters that suits images and minutes: a quarter, or a half if they are few.

    From hub/lab/sizes.md: after 50,000 images, a quarter keeps 78 % and a half 91 %.
    """
    batch = material.learned.images[:BATCH]
    outputs_of(material.model, batch)
    started = time.perf_counter()
    outputs_of(material.model, batch)
    seen = 60. * SHARE * minutes / UPDATE * len(batch) / (time.perf_counter() - started)
    return 0.25 if material.data.count() >= MANY and seen >= SEEN else 0.5


def smallest_size(material: Material, keep: float, minutes: float, progress: bool) -> OdeConfig:
    """Settings of the smallest student that keeps a share of what is measured on the images that choose.

    A binary search over the number of parameters, between one shared block and the model itself, which is the answer if
    nothing else keeps enough. A student that does not keep it as initialised is calibrated, each for a fourth of the
    minutes.
    """
    model, choosing, measure = material.model, material.choosing, material.measure
    base = base_settings(model)
    exact = best = choose_size(model, 1., base, init='svd_data')
    low, high = predict_parameters(model, replace(exact, phases=1)), count_parameters(model)
    wanted = keep * value_of(model, choosing, measure)
    tried: list[OdeConfig] = [exact]
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, base, init='svd_data')
        if config in tried:
            break  # nothing lies between
        tried.append(config)
        student, _ = converted(material, config)
        value = value_of(student, choosing, measure)
        if value < wanted:
            calibrate_(student, model, material.data.train, minutes=minutes / TRIALS, progress=progress)
            value = value_of(student, choosing, measure)
        if progress:
            print(f'{count_parameters(student):,} parameters: {value:.1f} % {measure}, {wanted:.1f} % wanted')
        if value >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best


def converted(material: Material, config: OdeConfig) -> tuple[nn.Module, Conversion]:
    """A student, and what was done."""
    student = copy.deepcopy(material.model).requires_grad_(True)
    few = material.learned.images[:SAMPLE].to(next(student.parameters()).device)
    return student, convert_(student, config, images=few, keep_original=False)
