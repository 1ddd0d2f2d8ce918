"""How alike the states at different times are, of one model or of two."""
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..settings import one_of
from .flow import Flow, Images, batches, follow

__all__ = ['Similarity', 'state_similarity']


@dataclass(frozen=True, repr=False)
class Similarity:
    """Likeness of the states at each time of a model and those at each time of another.

    Attributes:
        values: At most 1; NaN where states do not differ between images, for CKA [K + 1, L + 1].
        times: The times of the rows [K + 1].
        other_times: The times of the columns [L + 1].
        images: Number of images.
        kind: 'cka' or 'cosine'.
        own: Whether a model is compared with itself.
    """
    values: Tensor
    times: Tensor
    other_times: Tensor
    images: int
    kind: str
    own: bool

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        return (f'Similarity({self.kind}, {self.images} images, {rows} x {columns} states; the last two '
                f'{self.values[-1, -1]:.3f}, the first and the last {self.values[0, -1]:.3f})')


def state_similarity(
        model: Any,
        images: Images = None,
        *,
        other: Any = None,
        kind: str = 'cka',
        batch_size: int = 64,
) -> Similarity:
    """Likeness of the states at all pairs of times, over all tokens, from batches of images.

    'cka' compares how images lie to one another, so the two models may differ in width; it needs many images: between
    independent states, its standard deviation is about 0.7 with 4 images, 0.2 with 8 and 0.02 with 64. 'cosine' is the
    mean cosine of each token with itself at the other time, from any number of images.

    Args:
        model, images: See `timm_odevit.dynamics`.
        other: Another model; None for the model itself.
        kind: 'cka' or 'cosine'.
        batch_size: Images at a time; for 'cka' at least 4, and a last batch of fewer than 4 is left out.

    Raises:
        ValueError: kind is unknown; there are fewer than 4 images in a batch ('cka'); or the two models have states of
            different shapes ('cosine').

    Source: CKA, arXiv 1905.00414; the unbiased estimate from batches, arXiv 2010.15327; cosines, Raptor, arXiv
    2512.19941.
    """
    one_of(list(_KINDS))('kind', kind)
    compare = _KINDS[kind]
    totals: List[Tensor] = []
    times: Tuple[Tuple[float, ...], ...] = ()
    count = 0
    for batch in [None] if isinstance(model, Flow) else batches(images, batch_size):
        ours, times_of = _states(model, batch)
        theirs, other_times = (ours, times_of) if other is None else _states(other, batch)
        size = len(ours[0])
        if kind == 'cka' and size < 4:
            continue
        found = compare(ours, theirs)
        totals = [a + size * b for a, b in zip(totals or [0.] * len(found), found, strict=True)]  # type: ignore
        count, times = count + size, (times_of, other_times)
    if not totals:
        raise ValueError('CKA compares at least 4 images at a time. Give more images, or a larger batch_size.')
    values = totals[0] / count
    if kind == 'cka':
        both, first, second = totals
        values = both / (first[:, None] * second[None]).sqrt()
        values = values.where(values.isfinite(), torch.nan)
    rows, columns = (torch.tensor(part, dtype=torch.float64) for part in times)
    return Similarity(values, rows, columns, count, kind, other is None)


def _states(model: Any, images: Any) -> Tuple[List[Tensor], Tuple[float, ...]]:
    with follow(model, images) as flow, torch.no_grad():
        return flow.states(), flow.times


def _cosines(ours: List[Tensor], theirs: List[Tensor]) -> Tuple[Tensor, ...]:
    if ours[0].shape != theirs[0].shape:
        raise ValueError(f"Cosines compare tokens one by one, but the states have the shapes {list(ours[0].shape)} and "
                         f"{list(theirs[0].shape)}. Use kind='cka'.")
    a, b = (torch.stack([F.normalize(x.flatten(0, -2).float(), dim=-1) for x in states]) for states in (ours, theirs))
    return (torch.einsum('ktd,ltd->kl', a, b).double() / a.shape[1],)


def _cka(ours: List[Tensor], theirs: List[Tensor]) -> Tuple[Tensor, ...]:
    """The unbiased HSIC of all pairs of states, and of those of each model with themselves."""
    a, b = _grams(ours), _grams(theirs)
    return _hsic(a, b), _hsic(a, a).diagonal(), _hsic(b, b).diagonal()


def _grams(states: List[Tensor]) -> Tensor:
    """The products of all pairs of images, U-centred: rows and columns without the diagonal sum to 0 [K + 1, B, B]."""
    flat = torch.stack([x.flatten(1).double() for x in states])
    gram = flat @ flat.transpose(1, 2)
    n = gram.shape[-1]
    off = gram * (1 - torch.eye(n).to(gram))
    rows = off.sum(dim=-1, keepdim=True) / (n - 2)
    found = off - rows - rows.transpose(-2, -1) + off.sum(dim=(-2, -1), keepdim=True) / ((n - 1) * (n - 2))
    return found * (1 - torch.eye(n).to(gram))


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    n = a.shape[-1]
    return torch.einsum('kij,lij->kl', a, b) / (n * (n - 3))


_KINDS: Dict[str, Callable[[List[Tensor], List[Tensor]], Tuple[Tensor, ...]]] = {'cka': _cka, 'cosine': _cosines}
