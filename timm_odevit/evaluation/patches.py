"""patch_agreement: how alike the features of patches are in student and teacher."""
from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import renormalisation
from ..hooks import evaluating
from ..settings import checks_keywords
from .passes import in_batches, step_counts

__all__ = ['PatchAgreement', 'patch_agreement']


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


@checks_keywords
def patch_agreement(
        model: nn.Module,
        teacher: nn.Module,
        loader: Iterable[Any],
        *,
        steps: Optional[Union[int, Sequence[int]]] = None,
) -> Tuple[PatchAgreement, ...]:
    """Compare the last features of all patches, after the final norm, with the teacher's at the same places.

    Args:
        model: Student, or any timm model with `forward_intermediates`.
        teacher: timm model with the same grid of patches.
        loader: Batches (images [B, C, H, W], labels), normalised for the model; labels are ignored. Or one pair of
            tensors.
        steps: Step counts to measure; None for the model as it is. Only for an ODE-ViT.

    Returns:
        A PatchAgreement per step count.

    Raises:
        ValueError: The model has no steps to set, the grids or the features differ in shape, or there are no images.
    """
    counts = step_counts(model, steps)
    scale, shift = renormalisation(model, teacher)
    sums: List[Any] = [None] * len(counts)
    images_seen = 0
    with evaluating(model), evaluating(teacher), torch.inference_mode():
        for images, _ in in_batches(loader):
            if not len(images):
                continue
            images = images.to(next(model.parameters()))
            same = images if scale is None or shift is None else images * scale.to(images) + shift.to(images)
            theirs = _features(teacher, same.to(next(teacher.parameters()).dtype))
            images_seen += len(images)
            for i, (_, setting) in enumerate(counts):
                with setting():
                    ours = _features(model, images)
                if ours.shape != theirs.shape:
                    raise ValueError(f'The model gives features {list(ours.shape)}, the teacher {list(theirs.shape)}. '
                                     'Give a teacher with the same width and the same grid of patches.')
                found = torch.stack([F.cosine_similarity(ours, theirs, dim=1).double().sum(dim=0).cpu(),
                                     (_nearest(ours) == _nearest(theirs)).double().sum(dim=0).cpu()])
                if sums[i] is not None and sums[i].shape != found.shape:
                    raise ValueError(f'The images have grids of {list(sums[i].shape[1:])} and {list(found.shape[1:])} '
                                     'patches. Give images of one size.')
                sums[i] = found if sums[i] is None else sums[i] + found
    if not images_seen:
        raise ValueError('The loader gave no images.')
    return tuple(
        PatchAgreement(name, images_seen, (total[0] / images_seen).mean().item(),
                       100 * (total[1] / images_seen).mean().item(), (total[0] / images_seen).float())
        for (name, _), total in zip(counts, sums, strict=True))


def _features(model: Any, images: Tensor) -> Tensor:
    """The last features of the patches [B, D, H, W]."""
    found: Tensor = model.forward_intermediates(
        images, indices=1, norm=True, output_fmt='NCHW', intermediates_only=True)[-1]
    return found.float()


def _nearest(features: Tensor) -> Tensor:
    """The index [B, H, W] of the patch most similar to each, in the same image."""
    unit = F.normalize(features.flatten(2), dim=1)
    cosines = unit.transpose(1, 2) @ unit
    cosines.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    return cosines.argmax(dim=-1).unflatten(1, features.shape[2:])
