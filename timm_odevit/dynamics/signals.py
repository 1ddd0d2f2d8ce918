"""Numbers that might tell whether a model is right about an image, from its logits and from its dynamics."""
from typing import Any, Dict, Tuple

import torch
from torch import Tensor

from ..settings import checks_keywords
from .contraction import contraction_regions
from .flow import follow, norms
from .lyapunov import lyapunov_exponents

__all__ = ['signals']


@checks_keywords
def signals(model: Any, loader: Any, *, teacher: Any = None, sweeps: int = 2) -> Tuple[Dict[str, Tensor], Tensor]:
    """Measure each image of a loader, for `relations`.

    Args:
        model: timm model with one sequence of blocks and a head; an ODE-ViT or an ordinary ViT.
        loader: Batches of (images [B, C, H, W], normalised for the model; labels [B]).
        teacher: A model of the same width, tokens and normalisation of images, for the distance of the last states.
        sweeps: See `lyapunov_exponents`.

    Returns:
        By name, one number per image: 'confidence', the largest probability; 'entropy' of the probabilities, in nats;
        'margin' between the two largest logits; 'exponent', the largest one; 'radius' of the region of the class in its
        worst direction, relative to the norm of the state; 'acceleration', how much the last step differs from the one
        before it, relative to it; and with a teacher 'distance' of the last states, relative to the teacher's. And
        whether the image is classified correctly [B].

    Raises:
        TypeError: The model has no single sequence of blocks, or no head for a state.
        ValueError: There are no images or labels, or the model has a single step.
    """
    rows, correct = [], []
    for batch in loader:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f'The loader must give batches (images, labels); got a {type(batch).__name__}.')
        images, labels = batch
        with follow(model, images) as flow:
            states = flow.states()
            if len(states) < 3:
                raise ValueError('The acceleration compares two steps, and the model has one. Set more steps.')
            logits = flow.logits(states[-1])
            top = logits.topk(2, dim=1)
            probabilities = logits.softmax(dim=1)
            last, before = states[-1] - states[-2], states[-2] - states[-3]
            region = contraction_regions(flow, directions=1)
            row = {
                'confidence': probabilities.amax(dim=1),
                'entropy': -(probabilities * logits.log_softmax(dim=1)).sum(dim=1),
                'margin': top.values[:, 0] - top.values[:, 1],
                'exponent': lyapunov_exponents(flow, sweeps=sweeps).values[:, 0],
                'radius': region.worst / region.norm,
                'acceleration': norms(last - before) / norms(before),
            }
            if teacher is not None:
                with follow(teacher, images) as other:
                    theirs = other.states()[-1]
                row['distance'] = norms(states[-1] - theirs) / norms(theirs)
            rows.append(row)
            correct.append(top.indices[:, 0] == labels.to(top.indices))
    if not rows:
        raise ValueError('There are no images to measure on.')
    return {name: torch.cat([row[name].double() for row in rows]) for name in rows[0]}, torch.cat(correct)
