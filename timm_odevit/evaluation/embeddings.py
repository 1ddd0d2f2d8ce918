"""Embeddings of a model, ODE-ViT or not, over several step counts: how near the teacher's, and how useful."""
import warnings
from typing import Any, Iterable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import renormalisation
from ..settings import checks_keywords
from .passes import NOTHING, Passes, check_same_images, in_batches, step_counts
from .results import EmbeddingResult, Evaluation

__all__ = ['evaluate_embeddings', 'knn_accuracy', 'nearest', 'probe_accuracy']

CHUNK = 1024  # images that are compared with all others at once
NEIGHBOURS, TEMPERATURE = 20, 0.07
PENALTY, ITERATIONS = 1e-3, 100


@checks_keywords
def evaluate_embeddings(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        labelled: Optional[Iterable[Any]] = None,
        class_embeddings: Optional[Tensor] = None,
        steps: Optional[Union[int, Sequence[int]]] = None,
        teacher: Optional[nn.Module] = None,
        amp_dtype: Optional[torch.dtype] = None,
        progress: bool = False,
        data: str = '',
        trained_at: Sequence[int] = (),
) -> Evaluation[EmbeddingResult]:
    """Measure the embeddings of a model without classes, or of any other's outputs, at several step counts.

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
        class_embeddings: Embedding of each class [classes, E], of any length.
        steps: Step counts to measure; None for the model as it is. Only for an ODE-ViT.
        teacher: Model to compare with; measured first, on the same images, normalised for it.
        amp_dtype: Run under autocast in this dtype, such as torch.bfloat16.
        progress: Show a progress bar.
        data: What the images are, for tables and plots.
        trained_at: Step counts that the model was trained with, to be marked in tables and plots.

    Returns:
        An Evaluation with one EmbeddingResult for the teacher, if any, and one for each step count.

    Raises:
        ValueError: The model has no steps to set, the loader is empty or shuffled, or the embeddings of the teacher or
            of the classes have another size, or are not as many as the labels need.

    Source: k-NN with weights: arXiv 1805.01978; both protocols: DINO, arXiv 2104.14294.
    """
    counts = step_counts(model, steps)
    loader, labelled = (in_batches(each, len(counts) + (teacher is not None)) for each in (loader, labelled))
    found: List[EmbeddingResult] = []
    reference: Any = None

    def measure(of: nn.Module, name: str, kind: str, renormalised: Any = (None, None)) -> Any:
        embeddings, labels, finite, marks, about = _embed(of, loader, amp_dtype, progress, name, renormalised)
        if reference is not None:
            check_same_images([reference[1], marks])
        if labelled is not None or class_embeddings is not None:
            _check_labels(labels)
        labels = labels.masked_fill(~finite, NOTHING)
        knn = probe = None
        zero_shot = None if class_embeddings is None else _zero_shot(embeddings, labels, class_embeddings)
        if labelled is not None:
            learned, known, usable, _, _ = _embed(of, labelled, amp_dtype, progress, f'{name}, labelled', renormalised)
            _check_labels(known)
            if len(known) < 2:
                raise ValueError('labelled has one image. Give two or more, such as the training images.')
            learned, known = (learned[usable], known[usable]) if usable.any() else (learned, known)
            knn = knn_accuracy(embeddings, labels, learned, known)
            probe = probe_accuracy(embeddings, labels, learned, known)
        compared: Any = dict(cosine=1., error=0., neighbours=100.) if kind == 'teacher' else _compared(
            embeddings, None if reference is None else reference[0], finite)
        found.append(EmbeddingResult(model=kind, knn=knn, probe=probe, zero_shot=zero_shot, **compared, **about))
        return embeddings, marks

    if teacher is not None:
        reference = measure(teacher, 'teacher', 'teacher', renormalisation(model, teacher))
    for name, setting in counts:
        with setting():
            measure(model, name, 'model' if teacher is None else 'student')
    return Evaluation(tuple(found), data, tuple(trained_at))


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


def nearest(embeddings: Tensor) -> Tensor:
    """The index [N] of the image whose embedding has the largest cosine with that of each other image [N, E]."""
    unit, found = F.normalize(embeddings, dim=-1), []
    for start in range(0, len(unit), CHUNK):
        cosines = unit[start:start + CHUNK] @ unit.T
        rows = torch.arange(len(cosines))
        cosines[rows, start + rows] = -torch.inf
        found.append(cosines.argmax(dim=-1))
    return torch.cat(found)


def _check_labels(labels: Tensor) -> None:
    if int(labels.min()) < 0:
        raise ValueError(f'The data has the label {int(labels.min())}. Labels are numbers from 0.')


def _compared(ours: Tensor, theirs: Optional[Tensor], finite: Tensor) -> dict:
    if theirs is None:
        return dict(cosine=None, error=None, neighbours=None)
    if ours.shape != theirs.shape:
        raise ValueError(f'The model gives embeddings {list(ours.shape)}, the teacher {list(theirs.shape)}. Give a '
                         'teacher with the same output.')
    spread = (theirs - theirs.mean(dim=0)).square().mean().clamp_min(1e-12)
    same = None
    if len(ours) > 1:
        same = 100 * ((nearest(ours) == nearest(theirs)) & finite).double().mean().item()
    return dict(cosine=F.cosine_similarity(ours, theirs, dim=-1).mean().item(),
                error=(F.mse_loss(ours, theirs) / spread).item(), neighbours=same)


def _embed(
        model: nn.Module, loader: Any, amp_dtype: Any, progress: bool, name: str, renormalised: Any,
) -> Tuple[Tensor, Tensor, Tensor, Any, Any]:
    """Embeddings [N, E] and labels [N] of all images, on the CPU; which are finite; the images' marks; what it took."""
    embeddings: List[Tensor] = []
    labels: List[Tensor] = []

    def each(outputs: Tensor, given: Tensor) -> None:
        embeddings.append(outputs.flatten(1).cpu())
        labels.append(given.cpu().long())
    passes = Passes(model, loader, amp_dtype, progress, name, renormalised)
    about = passes.run(each)
    found = torch.cat(embeddings)
    finite = found.isfinite().all(dim=1)
    if not finite.all():
        warnings.warn(f'{name}: the embeddings of {int((~finite).sum())} of {len(found)} images are not finite. They '
                      'count as 0, and as wrong.', RuntimeWarning, stacklevel=4)
    return found.masked_fill(~finite[:, None], 0.), torch.cat(labels), finite, passes.marks, about
