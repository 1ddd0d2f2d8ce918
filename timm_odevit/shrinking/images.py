"""What images there are, to learn from and to judge by, and what is measured on them."""
import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..convert.refusals import check_images
from ..data.arrays import ArrayLoader, array_images, array_loaders
from ..data.folders import folder_loaders, image_loaders
from ..data.preprocessing import count_held_out
from ..evaluation.accuracy import in_batches, is_pair, run_batches
from ..settings import one_line
from ..training.loaders import Unlabelled, draw

__all__ = ['SAMPLE', 'Held', 'Images', 'margin', 'outputs_of', 'read_images', 'score', 'scores', 'value_of']

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


class Images(NamedTuple):
    """Images to shrink a model by.

    Attributes:
        loader: Batches (images [B, C, H, W], labels [B]) to learn from.
        number: How many images that is.
        choosing: Images held out that choose the best state of a training.
        judging: Others, which judge the result: those of x_test, if the file has labels.
        learned: Some of those that are learned from, not augmented.
        measure: 'accuracy', if there are labels that are the model's; 'agreement' with its top-1 class, if it has
            classes; or 'cosine' with its embeddings.
        why: Why it is not accuracy, in a sentence.
    """
    loader: Any
    number: int
    choosing: Held
    judging: Held
    learned: Held
    measure: str
    why: str


def read_images(
        images: str | Path | Tensor | tuple[Tensor, Tensor], model: nn.Module, batch_size: int, embedding: bool = False,
) -> Images:
    """Read images, in any form that `shrink` takes; raises ValueError for none, or if they do not fit the model."""
    classes = 0 if embedding else getattr(model, 'num_classes', 0)
    if getattr(model, 'num_classes', 0) == 1:
        raise ValueError('The model has one output (num_classes=1), so every student would agree with it. Give a model '
                         'with two classes or more, or with embeddings.')
    why = '' if classes else "the model's outputs are embeddings"
    test = None
    if isinstance(images, Tensor) or is_pair(images):
        loader, learned, held = _tensors(images, batch_size)
        why = why or ('there are none' if isinstance(images, Tensor) else '')
    elif not isinstance(images, (str, Path)):
        raise ValueError('images must be a folder, an .npz, a tensor [N, C, H, W], or a pair of such and labels; got '
                         f'{type(images).__name__}.')
    else:
        loader, learned, held, test, why = _files(Path(images), model, batch_size, why)
    measure = 'accuracy' if classes and not why else 'agreement' if classes else 'cosine'
    most = max(2, min(HELD, NUMBERS // draw(held, 1)[0].numel()))
    pictures, labels = draw(held, most)
    half = (len(pictures) + 1) // 2 if test is None else most // 2
    others = (pictures[half:], labels[half:]) if test is None else draw(test, half)
    parts = [(pictures[:half], labels[:half]), others, draw(learned, max(len(others[0]), SAMPLE))]
    if not len(others[0]):  # one image does both
        parts[1] = parts[0]
    right = (outputs_of(model, pictures).flatten(1).argmax(dim=-1) == labels).double().mean().item()
    chance = 1. / max(classes, 1)
    if measure == 'accuracy' and right < max(LEAST, chance + 2. * (chance * (1. - chance) / len(labels)) ** 0.5):
        measure, why = 'agreement', f'the model gets only {100 * right:.1f} % right, so they are not its classes'
    if measure != 'accuracy':
        loader = Unlabelled(loader, batch_size)
    choosing, judging, known = (_held(model, *part, measure) for part in parts)
    return Images(loader, _count(learned), choosing, judging, known, measure, why)


def _held(model: nn.Module, images: Tensor, labels: Tensor, measure: str) -> Held:
    outputs = outputs_of(model, images)
    return Held(images, labels if measure == 'accuracy' else outputs.flatten(1).argmax(dim=-1), outputs)


def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """The outputs of a model for images [N, C, H, W], in batches, on the CPU."""
    found: list[Tensor] = []
    unlabelled = images, torch.zeros(len(images), dtype=torch.long)
    run_batches(model, in_batches(unlabelled), lambda outputs, _: found.append(outputs.cpu()))
    return torch.cat(found)


def scores(outputs: Tensor, held: Held, measure: str) -> Tensor:
    """What is measured of each image [N]: a cosine, or whether the class is right."""
    return (F.cosine_similarity(outputs.flatten(1), held.outputs.flatten(1), dim=-1) if measure == 'cosine'
            else outputs.argmax(dim=-1) == held.labels).detach().double()


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


def _tensors(images: Any, batch_size: int) -> tuple[Any, Any, Any]:
    """The loader to learn from, the same images, and those held out."""
    pictures, labels = (images, torch.zeros(len(images), dtype=torch.long)) if isinstance(images, Tensor) else images
    check_images(pictures)
    if len(labels) != len(pictures):
        raise ValueError(f'Each image needs one label; got {len(pictures)} images and {len(labels)} labels.')
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    held = count_held_out(len(pictures), HELD_OUT)  # none of one image, which then does both
    learned, others = (TensorDataset(pictures[i], labels[i].long()) for i in (order[held:], order[:held or None]))
    loader: Any = DataLoader(learned, min(batch_size, len(learned)), shuffle=True, drop_last=True)
    return loader, learned, others


def _files(path: Path, model: Any, batch_size: int, why: str) -> tuple[Any, Any, Any, Any, str]:
    """The loader to learn from, the same unaugmented, images held out, test images, and why labels do not count."""
    arrays, test = path.is_file(), None
    loader: Any
    held: Any
    if not why:
        try:
            if arrays:
                loader, held, test = array_loaders(path, model, batch_size=batch_size, held_out=HELD_OUT)
            else:
                loader, held = folder_loaders(path, model, batch_size=batch_size, held_out=HELD_OUT)
        except ValueError as e:
            why = one_line(e)
    if why:
        loader, held = (array_images if arrays else image_loaders)(
            path, model, batch_size=batch_size, held_out=HELD_OUT)
    learned = loader if arrays else copy.copy(loader.dataset)
    if not arrays:
        learned.transform, learned.training, held = held.dataset.transform, False, held.dataset
    if not len(loader):
        return _files(path, model, max(1, _count(learned)), why)
    return loader, learned, held, test, why


def _count(source: Any) -> int:
    return len(source.labels if isinstance(source, ArrayLoader) else source)
