"""A model and images to shrink it by, what is measured on those held out, and the students made of the model."""
import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert.block_kinds import find_stages
from ..convert.conversion import Conversion, convert_
from ..convert.planning import check_convertible, choose_size, predict_parameters, with_suitable_steps
from ..data.batches import DataConfig, Mapped, unlabelled
from ..data.read import Data, held_out_of, read_data, with_test
from ..evaluation.embeddings import nearest, without_classifiers
from ..hooks import evaluating
from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..saving.save import describe
from ..training.run import calibrate_

BATCH = 64
HELD = 2048  # images that choose and judge, at most
HELD_OUT = 0.2  # share held out, half to choose and half to judge, unless there are others
NUMBERS = 2 ** 28  # in the images held out: 1 GB
FEW = 100  # images to judge by: ± 10 points
LEAST_RIGHT = 0.2  # of the labels that a model must know, and more than by chance
SHARE = 0.45  # of the minutes for each student, at most
TRIALS = 4  # each halves the range of sizes that is left


class Held(NamedTuple):
    """Images, and what is measured on them, in percent."""
    images: Tensor  # [N, C, H, W]
    labels: Tensor  # [N]; if accuracy is not measured, the classes that the model gives
    outputs: Tensor  # of the model [N, ...]
    measure: str  # 'accuracy'; 'agreement' with the model's top-1 class; or 'cosine'

    def scores(self, outputs: Tensor) -> Tensor:
        """What is measured of each image [N]: a cosine, or whether the class is right."""
        return (F.cosine_similarity(outputs.flatten(1), self.outputs.flatten(1), dim=-1) if self.measure == 'cosine'
                else (outputs.argmax(dim=-1) == self.labels) & ~outputs.isnan().any(dim=-1)).double()

    def interval(self, scores: Tensor) -> float:
        """How far from the mean score its 95 % interval reaches; for shares, that of Agresti & Coull 1998."""
        return self._half(scores, (1., 1., 0., 0.))

    def margin(self, scores: Tensor, first: Tensor) -> float:
        """The same for the mean difference between two models; for shares, that of Agresti & Min 2005."""
        return self._half(scores - first, (0.5 ** 0.5, -0.5 ** 0.5))

    def neighbours(self, outputs: Tensor) -> float:
        """Images with the same nearest image as the model's, in percent; NaN without a cosine."""
        if self.measure != 'cosine' or len(outputs) < 2:
            return math.nan
        return 100. * float((nearest(outputs.flatten(1)) == nearest(self.outputs.flatten(1))).double().mean())

    def _half(self, values: Tensor, more: tuple[float, ...]) -> float:
        of = values if self.measure == 'cosine' else torch.cat([values, values.new_tensor(more)])
        return 196. * float(of.std(correction=0)) / len(of) ** 0.5 + 100. * abs(float(of.mean() - values.mean()))

    def value_of(self, model: nn.Module) -> float:
        return 100. * float(self.scores(_outputs(model, self.images)).mean())


class Material(NamedTuple):
    model: nn.Module
    built: tuple[str, dict[str, Any]]  # with which timm.create_model builds the model
    base: OdeConfig  # with a method that suits the model's blocks
    data: Data
    choosing: Held  # the best state of a training
    judging: Held  # the result
    learned: Held  # some of those to learn from, not augmented
    why: str  # why accuracy is not measured
    seen: bool  # whether the model may have been trained on the images that judge

    def __str__(self) -> str:
        measure, count = self.judging.measure, len(self.judging.images)
        most = 100. * self.judging.labels.bincount().max() / count
        return (f'{self.data.count():,} images to learn from, {len(self.choosing.images):,} to choose the best state, '
                f'{count:,} to judge by {measure}'
                + (measure == 'accuracy') * f' ({most:.1f} % by naming one class alone)'
                + (count < FEW) * ' (few: small differences mean nothing)'
                + (measure != 'accuracy') * f'; labels are not used, because {self.why}'
                + self.seen * '; the model may have been trained on some of these, and look better than it is: give '
                              'others, with test (--test)')


def prepare(source: Any, model: nn.Module, test: Any = None, embedding: bool = False) -> Material:
    """Read images, in any form that `shrink` takes; raises TypeError or ValueError for what it cannot take."""
    host, (model,) = model, without_classifiers(model) if embedding else (model,)
    classes = getattr(model, 'num_classes', 0)
    if classes == 1:
        raise ValueError('The model has one output (num_classes=1), with which every student would agree. Give a model '
                         'with classes or embeddings.')
    if next(model.parameters()).dtype == torch.float16:
        raise ValueError('Training needs more precision than float16. Call model.float() first.')
    try:
        base = DEFAULT
        check_convertible(model)
    except ValueError:  # its blocks cannot be split into attention and MLP
        base = replace(DEFAULT, method='euler')
        check_convertible(model, base)
    built = describe(model)[:2]  # refuses what cannot be saved
    known = held_out_of(model)
    data = read_data(source, model, DataConfig(batch_size=BATCH), labels=False if embedding else None,
                     held_out=HELD_OUT, judging=0. if test is not None else min(HELD_OUT / 2, known or HELD_OUT / 2))
    data = data if test is None else with_test(data, test, model)
    if data.val is None:
        raise ValueError('shrink holds images out, which it cannot do for a loader. Give a folder, an .npz or tensors.')
    measure, why = 'accuracy' if data.labelled else 'agreement', data.why
    if embedding or not classes:
        measure = 'cosine'
        why = f"the model's outputs{', without its head,' * (model is not host)} are embeddings"
    most = max(1, min(HELD, NUMBERS // data.sample('val', 1)[0].numel()) // 2)
    (images, labels), judging = (data.sample(part, most) for part in ('val', 'test'))
    if measure == 'accuracy':
        right = float((_outputs(model, images).argmax(dim=-1) == labels).double().mean())
        if right < max(LEAST_RIGHT, 1. / classes + 2. * (1. / classes * (1. - 1. / classes) / len(labels)) ** 0.5):
            measure, why = 'agreement', f'the model gets only {100 * right:.1f} % right, so they are not its classes'
    if measure != 'accuracy':
        data = replace(data, train=Mapped(data.train, unlabelled), classes=None)

    def held(images: Tensor, labels: Tensor) -> Held:
        outputs = _outputs(model, images)
        return Held(images, labels if measure == 'accuracy' else outputs.flatten(1).argmax(dim=-1), outputs, measure)
    seen = not known and data.held_out > 0 and 'test' not in data.words and measure == 'accuracy'
    return Material(model, built, base, data, held(images, labels), held(*judging),
                    held(*data.sample('train', len(judging[0]))), why, seen)


@torch.no_grad()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    device = next(model.parameters()).device
    with evaluating(model):
        return torch.cat([model(batch.to(device)).float().cpu() for batch in images.split(BATCH)])


def suitable_settings(material: Material, size: Any, keep: float | None, minutes: float, progress: bool) -> OdeConfig:
    """Settings of a student of a size or, without one, with a quarter of the blocks, or that keeps a share."""
    if keep is not None:
        return smallest_size(material, keep, minutes / 4, progress)
    try:
        return choose_size(material.model, 0.25 if size is None else size, material.base)
    except ValueError:
        if size is not None:
            raise
        return with_suitable_steps(material.model, material.base)  # fewer than four blocks


def smallest_size(material: Material, keep: float, minutes: float, progress: bool) -> OdeConfig:
    """Settings of the smallest student that keeps a share of what is measured on the images that choose.

    A binary search between one shared block and the model itself. A student that does not keep it as initialised is
    calibrated, each for a fourth of the minutes.
    """
    model, choosing = material.model, material.choosing
    best = choose_size(model, 1., material.base)
    low, high = predict_parameters(model, replace(best, phases=1)), count_parameters(model)
    wanted = keep * choosing.value_of(model)
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, material.base)
        student = converted(material, config).model
        value = choosing.value_of(student)
        if value < wanted:
            calibrate_(student, model, material.data.train, minutes=minutes / TRIALS, progress=progress)
            value = choosing.value_of(student)
        if progress:
            print(f'{count_parameters(student):,} parameters: {value:.1f} % {choosing.measure}, {wanted:.1f} % wanted')
        if value >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best


def converted(material: Material, config: OdeConfig) -> Conversion:
    return convert_(copy.deepcopy(material.model).requires_grad_(True), config, keep_original=False)


def plain_student(
        model: Any, built: tuple[str, dict[str, Any]], parameters: int, base: OdeConfig = DEFAULT,
) -> nn.Module | None:
    """A model with a few of a model's blocks, evenly spaced, and about so many parameters.

    None if timm cannot build the model so.
    """
    sites = find_stages(model)
    blocks = sites[0].blocks
    outside = count_parameters(model) - sum(map(count_parameters, blocks))
    count = min(len(blocks) - 1, max(1, round((parameters - outside) / count_parameters(blocks[0]))))
    if len(sites) > 1 or count < 1:
        return None
    prefix = sites[0].prefix
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    for i, layer in enumerate(torch.linspace(0, len(blocks) - 1, count).round().int().tolist()):
        state.update({f'{prefix}{i}.{name}': tensor for name, tensor in blocks[layer].state_dict().items()})
    try:
        plain: Any = timm.create_model(built[0], **{**built[1], 'depth': count})
        plain.load_state_dict(state)
    except (AssertionError, RuntimeError, TypeError, ValueError):  # depth is no keyword, or other tensors depend on it
        return None
    plain.pretrained_cfg = plain.default_cfg = dict(model.pretrained_cfg)
    return convert_(plain.to(next(model.parameters())), replace(base, phases=count), keep_original=False).model
