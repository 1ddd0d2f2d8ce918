"""Embeddings of a model over several step counts: how near the teacher's, and how useful."""
import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import check_labels
from ..ode.blocks import find_ode_blocks
from ..settings import one_line
from .results import NO_CLASS, EmbeddingResult, Evaluation, passes

NEIGHBOURS, TEMPERATURE = 20, 0.07
PENALTY = 1e-3


def evaluate_embeddings(
        model: nn.Module, loader: Iterable[Any], *, labelled: Iterable[Any] | None = None,
        class_embeddings: Tensor | None = None, steps: int | Sequence[int] | None = None,
        teacher: nn.Module | None = None, amp_dtype: torch.dtype | str | None = None, progress: bool = False,
) -> Evaluation[EmbeddingResult]:
    """Measure the outputs of a model, with or without classes, as embeddings, at several step counts.

    They are compared with the teacher's: cosine, squared error, and whether an image has the same nearest image.
    Images are also classified: with `labelled` ones, by the 20 nearest of them and by a linear classifier; with
    embeddings of the classes, such as CLIP's of their names, by the largest cosine (zero-shot).

    Args:
        model: [B, C, H, W] to embeddings [B, E]; it does not change.
        loader: As in `evaluate`; images alone without `labelled` and `class_embeddings`.
        labelled: Batches or a pair of other images and their labels, such as the training images.
        class_embeddings: Embedding of each class [classes, E], of any norm.
        steps, teacher, amp_dtype: As in `evaluate`.

    Returns:
        One EmbeddingResult for the teacher, if any, and one for each step count. Embeddings that are not finite count
        as 0, and as wrong, with a warning.

    Raises ImportError if `labelled` needs scikit-learn, and ValueError if the loader is empty, or gives the
    labelled images, or if there are fewer class embeddings than labels.

    Examples:
        >>> labelled = [(images + 1, torch.tensor([0, 1, 2, 3]))]  # other images
        >>> found = evaluate_embeddings(student, loader, labelled=labelled, teacher=teacher)
        >>> print(found)

    Source: k-NN with weights: arXiv 1805.01978; both protocols: DINO, arXiv 2104.14294.
    """
    if labelled is not None and find_spec('sklearn') is None:
        raise ImportError('k-NN and the linear classifier need scikit-learn. Type: pip install scikit-learn')
    scored = labelled is not None or class_embeddings is not None
    results = []
    reference = None
    for found, name, (ours, finite, labels), others in passes(
            model, loader, _row, steps=steps, teacher=teacher, others=labelled, labels=scored, amp_dtype=amp_dtype,
            progress=progress):
        if without := int((~finite).sum()):
            warnings.warn(f'{name}: the embeddings of {without} of {len(finite)} images are not finite. They count '
                          'as 0, and as wrong.', RuntimeWarning, stacklevel=2)
        if found['model'] == 'teacher':
            reference = ours, nearest(ours)
        if reference is not None:
            found.update(_compared(ours, finite, *reference))
        if scored:
            labels = check_labels(labels).masked_fill(~finite, NO_CLASS)
        if class_embeddings is not None:
            found['zero_shot'] = _zero_shot(ours, labels, torch.as_tensor(class_embeddings))
        if others:
            learned, usable, known = others
            if finite.any() and torch.equal(learned, ours):
                raise ValueError('labelled holds the images that are classified. Give others, such as the training '
                                 'images.')
            used = usable if usable.any() else slice(None)
            task = ours, labels, learned[used], check_labels(known)[used]
            found.update(knn=knn_accuracy(*task), probe=probe_accuracy(*task))
        results.append(EmbeddingResult(**found))
    return Evaluation(tuple(results))


def without_classifiers(*models: Any) -> Any:
    """Copies without heads, or ValueError, if the head of the last with one is a classifier; else the models.

    A head without a bias, or with one of zeros, is a projection, such as CLIP's.
    """
    headed = [model for model in models if getattr(model, 'num_classes', 0)]
    bias = getattr(headed[-1].get_classifier(), 'bias', True) if headed else None  # two heads are a tuple
    if bias is None or not torch.as_tensor(bias).any():
        return models
    models = copy.deepcopy(models)
    for model in models:
        if getattr(model, 'num_classes', 0):
            try:
                model.reset_classifier(0)
                for ode in find_ode_blocks(model):  # without classes, no image can halt
                    ode.config = replace(ode.config, halting=None)
            except Exception as e:
                raise ValueError(f'The head of this {type(model).__name__} cannot be left out: {one_line(e)}. Give '
                                 'one without.') from e
    return models


def _row(outputs: Tensor, labels: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings [B, E], 0 where they are not finite; whether they are [B]; and labels [B]."""
    outputs = outputs.flatten(1)
    finite = outputs.isfinite().all(dim=1)
    return outputs.masked_fill(~finite[:, None], 0.), finite, finite if labels is None else labels


def _compared(ours: Tensor, finite: Tensor, theirs: Tensor, near: Tensor) -> dict[str, float]:
    if ours.shape != theirs.shape:
        raise ValueError(f'The model gives embeddings {list(ours.shape)}, the teacher {list(theirs.shape)}. Give a '
                         'teacher with the same output.')
    found: dict[str, float] = {}
    if ours.shape[1] > 1:  # the cosine of two numbers is 1 or -1
        found['cosine'] = 1. if ours is theirs else F.cosine_similarity(ours, theirs, dim=-1).mean().item()
    if len(ours) > 1:  # one image has no variance, and no neighbour
        variance = (theirs - theirs.mean(dim=0)).square().mean().clamp_min(1e-12)
        found['error'] = (F.mse_loss(ours, theirs) / variance).item()
        if 'cosine' in found:
            same = ours is theirs or ((nearest(ours) == near) & finite).double().mean().item()
            found['neighbours'] = 100. * same
    return found


def nearest(embeddings: Tensor) -> Tensor:
    """The index [N] of the other image whose embedding has the largest cosine with each image's [N, E]."""
    unit = F.normalize(embeddings, dim=-1)
    return torch.cat([(unit[rows] @ unit.T).scatter_(1, rows[:, None], -torch.inf).argmax(dim=-1)
                      for rows in torch.arange(len(unit), device=unit.device).split(1024)])


def knn_accuracy(embeddings: Tensor, labels: Tensor, learned: Tensor, known: Tensor) -> float:
    """Top-1 accuracy in percent, on embeddings [N, E] with labels [N], of the 20 nearest of those learned [M, E].

    They vote for their known labels [M] with weight exp(cosine / 0.07).
    """
    from sklearn.neighbors import KNeighborsClassifier
    model = KNeighborsClassifier(min(NEIGHBOURS, len(learned)), metric='cosine', algorithm='brute',
                                 weights=lambda distances: np.exp((1 - distances) / TEMPERATURE))
    return 100 * float(model.fit(learned, known).score(embeddings, labels))


def probe_accuracy(embeddings: Tensor, labels: Tensor, learned: Tensor, known: Tensor) -> float:
    """The same of a linear classifier: logistic regression on standardised embeddings, by L-BFGS."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    # C weighs the sum of the losses of the images against half the squared weights, PENALTY the squared weights alone
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.5 / PENALTY / len(learned), max_iter=100))
    return 100 * float(model.fit(learned, known).score(embeddings, labels))


def _zero_shot(embeddings: Tensor, labels: Tensor, classes: Tensor) -> float:
    needed = int(labels.max()) + 1
    if classes.shape[1:] != embeddings.shape[1:] or len(classes) < needed or not classes.isfinite().all():
        raise ValueError(f'class_embeddings must be finite numbers [{needed} classes or more, {embeddings.shape[1]}]; '
                         f'got {list(classes.shape)}.')
    cosines = embeddings @ F.normalize(classes.detach().to(embeddings), dim=-1).T
    return 100 * (cosines.argmax(dim=-1) == labels).double().mean().item()
