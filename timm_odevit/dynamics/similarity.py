"""How alike the states at different times are, of one model or of two."""
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from ..convert.measure import split
from ..settings import checks_keywords
from .flow import Images, batches, follow

__all__ = ['Similarity', 'state_similarity']


@dataclass(frozen=True, repr=False)
class Similarity:
    """Linear CKA of the states at each time of a model with those at each time of another.

    Attributes:
        cka: Between 0 and 1, but for the noise of few images [K + 1, L + 1].
        times: The times of the rows [K + 1].
        other_times: The times of the columns [L + 1].
        images: Number of images.
    """
    cka: Tensor
    times: Tensor
    other_times: Tensor
    images: int

    def spans(self, count: int) -> List[float]:
        """The times at which spans of similar states begin, but for the first, if the states are cut into `count`.

        Raises:
            ValueError: The matrix compares two models, or has fewer rows than spans.
        """
        rows = len(self.cka)
        if not torch.equal(self.times, self.other_times) or not torch.allclose(self.cka, self.cka.T, atol=1e-6):
            raise ValueError('Spans are those of one model. Compare it with itself: state_similarity(model, images).')
        if type(count) is not int or not 1 <= count <= rows:
            raise ValueError(f'count must be 1 to {rows}, the number of states; got {count!r}.')
        return [float(self.times[i]) for i in split(1 - self.cka, count)]

    def __repr__(self) -> str:
        rows, columns = self.cka.shape
        return (f'Similarity({self.images} images, {rows} x {columns} states; CKA of the last two states '
                f'{self.cka[-1, -1]:.3f}, of the first and the last {self.cka[0, -1]:.3f})')


@checks_keywords
def state_similarity(model: Any, images: Images, *, other: Any = None, batch_size: int = 64) -> Similarity:
    """Linear CKA between the states at all pairs of times, over all tokens, from batches of images.

    Args:
        model: timm model with one sequence of blocks, an ODE-ViT or an ordinary ViT.
        images: Images [B, C, H, W], normalised for the model, on its device; or a loader of such batches.
        other: Another model of the same normalisation of images, of any width and depth; None for the model itself.
        batch_size: Images at a time, at least 4; a last batch of fewer than 4 images is left out.

    Returns:
        Similarity.

    Raises:
        TypeError: A model has no single sequence of blocks.
        ValueError: There are fewer than 4 images in a batch.

    Source: CKA, arXiv 1905.00414; the unbiased estimate from batches, arXiv 2010.15327.
    """
    total: Optional[Tuple[Tensor, Tensor, Tensor]] = None
    times: Tuple[Tuple[float, ...], ...] = ()
    count = 0
    for batch in batches(images, batch_size):
        if len(batch) < 4:
            continue
        ours, own = _grams(model, batch)
        theirs, others = (ours, own) if other is None else _grams(other, batch)
        found = (_hsic(ours, theirs), _hsic(ours, ours).diagonal(), _hsic(theirs, theirs).diagonal())
        total = found if total is None else tuple(a + b for a, b in zip(total, found, strict=True))  # type: ignore
        count, times = count + len(batch), (own, others)
    if total is None:
        raise ValueError('CKA compares at least 4 images at a time. Give more images, or a larger batch_size.')
    both, first, second = total
    cka = both / (first[:, None] * second[None]).clamp_min(1e-30).sqrt()
    rows, columns = (torch.tensor(part, dtype=torch.float64) for part in times)
    return Similarity(cka, rows, columns, count)


def _grams(model: Any, images: Tensor) -> Tuple[Tensor, Tuple[float, ...]]:
    """The products of all pairs of images [K + 1, B, B], centred and without the diagonal, and the times."""
    with follow(model, images) as flow:
        flat = torch.stack([x.flatten(1).double() for x in flow.states()])
        return _centred(flat @ flat.transpose(1, 2)), flow.times


def _centred(gram: Tensor) -> Tensor:
    """U-centred: rows and columns without the diagonal sum to 0."""
    n = gram.shape[-1]
    off = gram * (1 - torch.eye(n).to(gram))
    rows = off.sum(dim=-1, keepdim=True) / (n - 2)
    found = off - rows - rows.transpose(-2, -1) + off.sum(dim=(-2, -1), keepdim=True) / ((n - 1) * (n - 2))
    return found * (1 - torch.eye(n).to(gram))


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    """The unbiased HSIC of all pairs [K + 1, L + 1]."""
    n = a.shape[-1]
    return torch.einsum('kij,lij->kl', a, b) / (n * (n - 3))
