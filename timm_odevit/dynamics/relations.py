"""Which measures of an image go with the model being right about it."""
from dataclasses import dataclass
from typing import Dict, List

import torch
from torch import Tensor

from ..settings import checks_keywords

__all__ = ['Relation', 'auroc', 'relations']


@dataclass(frozen=True)
class Relation:
    """How well a measure separates images that are classified correctly from the others.

    Attributes:
        name: Name of the measure.
        auroc: Area under the ROC curve: the probability that it is larger for an image that is classified correctly
            than for one that is not; 0.5 is chance.
        low: Lower end of the bootstrap interval.
        high: Upper end of the bootstrap interval.
        images: Number of images for which there is a measure.
    """
    name: str
    auroc: float
    low: float
    high: float
    images: int

    @property
    def related(self) -> bool:
        """Whether the interval excludes chance."""
        return self.low > 0.5 or self.high < 0.5

    def __str__(self) -> str:
        found = '' if self.related else ', no relation: the interval contains chance'
        return f'{self.name}: AUROC {self.auroc:.3f} [{self.low:.3f}, {self.high:.3f}] on {self.images} images{found}'


@checks_keywords
def relations(
        measures: Dict[str, Tensor],
        correct: Tensor,
        *,
        resamples: int = 1000,
        level: float = 0.95,
        seed: int = 0,
) -> List[Relation]:
    """How measures of images relate to correctness, with bootstrap intervals; images without one (NaN) are left out.

    Args:
        measures: By name, one number per image [B]; give the softmax confidence too, as the one to beat.
        correct: Whether each image is classified correctly [B].
        resamples: Bootstrap samples of the images.
        level: Probability of the percentile interval.
        seed: Seed of the samples.

    Returns:
        One Relation per measure.

    Raises:
        ValueError: An argument is out of range, the lengths differ, or all images or none are classified correctly.
    """
    if type(resamples) is not int or resamples < 1 or not 0 < level < 1:
        raise ValueError('resamples must be a whole number of at least 1, and level lie between 0 and 1; got '
                         f'{resamples!r} and {level!r}.')
    found = []
    for name, values in measures.items():
        if values.shape != correct.shape or values.ndim != 1:
            raise ValueError(f"'{name}' must have one number for each of the {len(correct)} images; got "
                             f'{list(values.shape)}.')
        there = ~values.isnan()
        score, right = values[there].double(), correct[there].bool()
        if right.all() or not right.any():
            raise ValueError(f"All images or none of those with '{name}' are classified correctly, so nothing can be "
                             'told apart. Give more images.')
        generator = torch.Generator().manual_seed(seed)
        samples: List[float] = []
        while len(samples) < resamples:
            chosen = torch.randint(len(score), (len(score),), generator=generator)
            if right[chosen].any() and not right[chosen].all():
                samples.append(auroc(score[chosen], right[chosen]))
        ends = torch.tensor(samples, dtype=torch.float64).quantile(
            torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
        found.append(Relation(name, auroc(score, right), ends[0], ends[1], len(score)))
    return found


def auroc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: the share of pairs in which the positive one has the larger score, ties as halves.

    Args:
        score: Numbers [B].
        positive: Which of them belong to the positive class [B]; at least one does, and one does not.
    """
    others = score[~positive].sort().values
    below, up_to = (torch.searchsorted(others, score[positive], right=right) for right in (False, True))
    return float((below + up_to).double().mean() / (2 * len(others)))
