"""Embeddings and features of a model, ODE-ViT or not, over several step counts: how near the teacher's, how useful."""
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import renormalisation
from ..hooks import evaluating
from .accuracy import NO_CLASS, check_same_images, in_batches, lineup, run_batches, views
from .results import EmbeddingResult, Evaluation

__all__ = ['PatchAgreement', 'evaluate_embeddings', 'knn_accuracy', 'nearest', 'patch_agreement', 'probe_accuracy']

CHUNK = 1024  # images that are compared with all others at once
NEIGHBOURS, TEMPERATURE = 20, 0.07
PENALTY, ITERATIONS = 1e-3, 100


def evaluate_embeddings(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        labelled: Iterable[Any] | None = None,
        class_embeddings: Tensor | None = None,
        steps: int | Sequence[int] | None = None,
        teacher: nn.Module | None = None,
        amp_dtype: torch.dtype | None = None,
        progress: bool = False,
        data: str = '',
        trained_at: Sequence[int] = (),
) -> Evaluation[EmbeddingResult]:
    """Measure the outputs of a model, with or without classes, as embeddings, at several step counts.

    The counterpart of `evaluate` for what has no classes. Without labels, embeddings are compared with the teacher's:
    cosine, squared error, and whether an image has the same nearest image. With labelled images to learn from, the
    images of `loader` are also classified, by their 20 nearest labelled images and by a linear classifier; with one
    embedding per class, such as those of the classes' names from the text tower of a CLIP, by the class of the largest
    cosine (zero-shot classification).

    Args:
        model: Model to measure, [B, C, H, W] to embeddings [B, E].
        loader: Batches (images [B, C, H, W], labels [B]), in the same order each time; the labels count only with
            `labelled` or `class_embeddings`. Or one pair of tensors, images [N, C, H, W] and labels [N].
        labelled: The same kind of batches, of other images, whose labels are used; such as the training images.
        class_embeddings: Embedding of each class [classes, E], of any norm.
        steps, teacher, amp_dtype, progress, data, trained_at: As in `evaluate`.

    Returns:
        An Evaluation with one EmbeddingResult for the teacher, if any, and one for each step count.

    Raises:
        ValueError: The model has no steps to set, the loader is empty or shuffled, or the embeddings of the teacher or
            of the classes have another size, or are not as many as the labels need.

    Examples:
        >>> labelled = [(images + 1, torch.tensor([0, 1, 2, 3]))]  # other images
        >>> found = evaluate_embeddings(student, loader, labelled=labelled, teacher=teacher)
        >>> print(found)

    Source: k-NN with weights: arXiv 1805.01978; both protocols: DINO, arXiv 2104.14294.
    """
    models = lineup(model, steps, teacher)
    loader, labelled = (in_batches(each, len(models)) for each in (loader, labelled))
    results: list[EmbeddingResult] = []
    reference = None
    for kind, name, of, normalisation in models:
        options: dict[str, Any] = dict(amp_dtype=amp_dtype, progress=progress, normalisation=normalisation)
        ours = _embed(of, loader, name=name, **options)
        if kind == 'teacher':
            reference = ours
        elif reference is not None:
            check_same_images(reference.marks, ours.marks)
        knn = probe = zero_shot = None
        labels = ours.labels
        if labelled is not None or class_embeddings is not None:
            labels = _check_labels(labels).masked_fill(~ours.finite, NO_CLASS)
        if class_embeddings is not None:
            zero_shot = _zero_shot(ours.values, labels, class_embeddings)
        if labelled is not None:
            others = _embed(of, labelled, name=f'{name}, labelled', **options)
            learned, known = _memory(others)
            if torch.equal(others.marks, ours.marks):
                raise ValueError('labelled holds the images that are classified. Give others, such as the training '
                                 'images.')
            knn = knn_accuracy(ours.values, labels, learned, known)
            probe = probe_accuracy(ours.values, labels, learned, known)
        results.append(EmbeddingResult(
            model=kind, knn=knn, probe=probe, zero_shot=zero_shot, **_compared(ours, reference), **ours.about))
    return Evaluation(tuple(results), data, tuple(trained_at))


class _Embedded(NamedTuple):
    """Embeddings [N, E] and labels [N] of all images, on the CPU; which are finite; the images' marks; what it took."""
    values: Tensor
    labels: Tensor
    finite: Tensor
    marks: Tensor
    about: dict[str, Any]


def _embed(model: nn.Module, loader: Any, name: str, **options: Any) -> _Embedded:
    embeddings: list[Tensor] = []
    labels: list[Tensor] = []

    def each(outputs: Tensor, given: Tensor) -> None:
        embeddings.append(outputs.flatten(1).cpu())
        labels.append(given.cpu())
    about, marks = run_batches(model, loader, each, name=name, **options)
    values = torch.cat(embeddings)
    finite = values.isfinite().all(dim=1)
    if not finite.all():
        warnings.warn(f'{name}: the embeddings of {int((~finite).sum())} of {len(values)} images are not finite. They '
                      'count as 0, and as wrong.', RuntimeWarning, stacklevel=3)
    return _Embedded(values.masked_fill(~finite[:, None], 0.), torch.cat(labels), finite, marks, about)


def _memory(labelled: _Embedded) -> tuple[Tensor, Tensor]:
    """Embeddings and labels to learn from: those that are finite, if any is."""
    labels = _check_labels(labelled.labels)
    if len(labels) < 2:
        raise ValueError('labelled has one image. Give two or more, such as the training images.')
    used = labelled.finite if labelled.finite.any() else ~labelled.finite
    return labelled.values[used], labels[used]


def _check_labels(labels: Tensor) -> Tensor:
    if labels.is_floating_point() or int(labels.min()) < 0:
        raise ValueError(f'Labels are whole numbers from 0; the data has {labels.min():g}, in {labels.dtype}.')
    return labels.long()


def _compared(ours: _Embedded, theirs: _Embedded | None) -> dict[str, Any]:
    """How near the embeddings are; None where there is nothing to compare: one image has no variance, no neighbour."""
    if theirs is None:
        return dict(cosine=None, error=None, neighbours=None)
    a, b = ours.values, theirs.values
    if a.shape != b.shape:
        raise ValueError(f'The model gives embeddings {list(a.shape)}, the teacher {list(b.shape)}. Give a teacher '
                         'with the same output.')
    cosine = 1. if ours is theirs else F.cosine_similarity(a, b, dim=-1).mean().item()
    if len(a) < 2:
        return dict(cosine=cosine, error=None, neighbours=None)
    variance = (b - b.mean(dim=0)).square().mean().clamp_min(1e-12)
    same = (nearest(a) == nearest(b)) & (ours.finite | (ours is theirs))
    return dict(cosine=cosine, error=(F.mse_loss(a, b) / variance).item(), neighbours=100 * same.double().mean().item())


def nearest(embeddings: Tensor) -> Tensor:
    """The index [N] of the image whose embedding has the largest cosine with that of each other image [N, E]."""
    unit, found = F.normalize(embeddings, dim=-1), []
    for start in range(0, len(unit), CHUNK):
        cosines = unit[start:start + CHUNK] @ unit.T
        rows = torch.arange(len(cosines))
        cosines[rows, start + rows] = -torch.inf
        found.append(cosines.argmax(dim=-1))
    return torch.cat(found)


def knn_accuracy(embeddings: Tensor, labels: Tensor, learned: Tensor, known: Tensor) -> float:
    """Top-1 accuracy in percent of the 20 nearest labelled images, which vote with weight exp(cosine / 0.07).

    Args:
        embeddings: Embeddings to classify [N, E].
        labels: Their classes [N].
        learned: Embeddings of labelled images [M, E].
        known: Their classes [M].
    """
    memory, classes = F.normalize(learned, dim=-1), int(max(known.max(), labels.max())) + 1
    right = 0
    for part, truth in zip(F.normalize(embeddings, dim=-1).split(CHUNK), labels.split(CHUNK), strict=True):
        cosines, nearby = (part @ memory.T).topk(min(NEIGHBOURS, len(memory)), dim=-1)
        votes = torch.zeros(len(part), classes).scatter_add_(1, known[nearby], (cosines / TEMPERATURE).exp())
        right += int((votes.argmax(dim=-1) == truth).sum())
    return 100 * right / len(labels)


def probe_accuracy(embeddings: Tensor, labels: Tensor, learned: Tensor, known: Tensor) -> float:
    """Top-1 accuracy in percent of a linear classifier: logistic regression on standardised embeddings, by L-BFGS.

    Args: those of `knn_accuracy`.
    """
    classes = int(max(known.max(), labels.max())) + 1
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        embeddings, labels, learned, y = (given.clone() for given in (embeddings, labels, learned, known))
        mean, std = learned.mean(dim=0), learned.std(dim=0, correction=0).clamp_min(1e-6)
        x = (learned - mean) / std
        weight = torch.zeros(classes, x.shape[1] + 1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=ITERATIONS, line_search_fn='strong_wolfe')

        def logits(z: Tensor) -> Tensor:
            return F.linear(z, weight[:, 1:], weight[:, 0])

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(logits(x), y) + PENALTY * weight[:, 1:].square().sum()
            value.backward()
            return value
        optimizer.step(loss)
        right = logits((embeddings - mean) / std).argmax(dim=-1) == labels
    return 100 * right.double().mean().item()


def _zero_shot(embeddings: Tensor, labels: Tensor, classes: Tensor) -> float:
    if not isinstance(classes, Tensor):
        raise ValueError(f'class_embeddings must be a tensor [classes, E]; got {type(classes).__name__}.')
    if not classes.isfinite().all():
        raise ValueError('class_embeddings must be finite; some values are not.')
    if classes.ndim != 2 or classes.shape[1] != embeddings.shape[1] or len(classes) <= int(labels.max()):
        raise ValueError(
            f'class_embeddings have the shape {list(classes.shape)}; expected one row for each of the labels 0 to '
            f'{int(labels.max())} or more, [classes, {embeddings.shape[1]}].')
    cosines = embeddings @ F.normalize(classes.detach().to(embeddings), dim=-1).T
    return 100 * (cosines.argmax(dim=-1) == labels).double().mean().item()


@dataclass(frozen=True, eq=False)
class PatchAgreement:
    """The agreement of the patches' features at one step count.

    Attributes:
        name: The step count, in words.
        images: Number of images.
        cosine: Mean cosine between the feature of a patch and the teacher's.
        match: Share of the patches whose most similar other patch in the image is the one that the teacher finds, in
            percent: what correspondence and grouping depend on.
        map: The mean cosine at each place [H, W].
    """
    name: str
    images: int
    cosine: float
    match: float
    map: Tensor

    def __str__(self) -> str:
        return (f'{self.name}: cosine {self.cosine:.4f}, the same nearest patch for {self.match:.1f} % of the patches '
                f'of {self.images:,} images')


def patch_agreement(
        model: nn.Module, teacher: nn.Module, loader: Iterable[Any], *,
        steps: int | Sequence[int] | None = None,
) -> tuple[PatchAgreement, ...]:
    """Compare the last features of all patches, after the final norm, with the teacher's at the same places.

    Args:
        model: Student, or any timm model with `forward_intermediates`.
        teacher: timm model with the same grid of patches.
        loader: Batches of images [B, C, H, W], normalised for the model, or (images, labels), whose labels are
            ignored. Or one pair of tensors.
        steps: Step counts to measure; None for the model as it is. Only for an ODE-ViT.

    Returns:
        A PatchAgreement per step count.

    Raises:
        ValueError: The model has no steps to set, the grids or the features differ in shape, or there are no images.

    Examples:
        >>> for found in patch_agreement(student, teacher, loader, steps=(6, 12)):
        ...     print(found)
    """
    measured = views(model, steps)
    normalisation = renormalisation(model, teacher)
    sums: list[list[Tensor]] = [[] for _ in measured]  # for each batch, the sums over its images [2, H, W]
    count = 0
    with evaluating(model), evaluating(teacher), torch.inference_mode():
        for batch in in_batches(loader):
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            if not len(images):
                continue
            images = images.to(next(model.parameters()))
            same = images if normalisation is None else normalisation(images)
            theirs = _features(teacher, same.to(next(teacher.parameters()).dtype))
            count += len(images)
            for found, (_, view) in zip(sums, measured, strict=True):
                with evaluating(view):
                    found.append(_agreement(_features(view, images), theirs))
                if found[0].shape != found[-1].shape:
                    raise ValueError(f'The images have grids of {list(found[0].shape[1:])} and '
                                     f'{list(found[-1].shape[1:])} patches. Give images of one size.')
    if not count:
        raise ValueError('The loader gave no images.')
    means = [torch.stack(found).sum(dim=0) / count for found in sums]
    return tuple(PatchAgreement(name, count, mean[0].mean().item(), 100 * mean[1].mean().item(), mean[0].float())
                 for (name, _), mean in zip(measured, means, strict=True))


def _features(model: Any, images: Tensor) -> Tensor:
    """The last features of the patches [B, D, H, W]."""
    found: Tensor = model.forward_intermediates(
        images, indices=1, norm=True, output_fmt='NCHW', intermediates_only=True)[-1]
    return found.float()


def _agreement(ours: Tensor, theirs: Tensor) -> Tensor:
    """Cosines, and whether the most similar other patch is the same, summed over the images [2, H, W]."""
    if ours.shape != theirs.shape:
        raise ValueError(f'The model gives features {list(ours.shape)}, the teacher {list(theirs.shape)}. Give a '
                         'teacher with the same width and the same grid of patches.')

    def most_similar(features: Tensor) -> Tensor:
        unit = F.normalize(features.flatten(2), dim=1)
        cosines = unit.transpose(1, 2) @ unit
        cosines.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        return cosines.argmax(dim=-1).unflatten(1, features.shape[2:])
    cosine, same = F.cosine_similarity(ours, theirs, dim=1), most_similar(ours) == most_similar(theirs)
    return torch.stack([cosine.cpu().double().sum(dim=0), same.cpu().double().sum(dim=0)])
