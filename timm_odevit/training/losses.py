"""The parts of the distillation loss."""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import over_processes, rank_and_world
from ..dynamics.lipschitz import log_softmax_bound

__all__ = ['embedding_loss', 'jasmin_loss', 'logit_loss', 'trajectory_loss']


def trajectory_loss(
        student: Tensor,
        teacher: Tensor,
        num_prefix_tokens: int,
        has_class_token: bool,
        weights: Sequence[float],
) -> Tensor:
    """Squared error between hidden states, relative to the teacher's variance over the batch of all processes.

    Args:
        student: Hidden state [B, N, D].
        teacher: Hidden state [B, N, D].
        num_prefix_tokens: Number of class and register tokens, which come first.
        has_class_token: Whether the first token is a class token.
        weights: Weights of class token, registers and patches; weights of absent groups are shared among the others.

    Returns:
        Weighted mean of the groups, dimensionless: 0 for equal states, 1 for a student that explains nothing.
    """
    if student.shape != teacher.shape:
        raise ValueError(f'The student has a state {list(student.shape)}, the teacher {list(teacher.shape)}. Give both '
                         'the same images and the same tokens.')
    cls = 1 if has_class_token else 0
    bounds = ((0, cls), (cls, num_prefix_tokens), (num_prefix_tokens, student.shape[1]))
    loss, total = student.new_zeros((), dtype=torch.float32), 0.
    for (start, stop), weight in zip(bounds, weights, strict=True):
        if stop > start and weight > 0:
            s, t = student[:, start:stop].float(), teacher[:, start:stop].float()
            loss = loss + weight * F.mse_loss(s, t) / _variance(t).clamp_min(1e-12)
            total += weight
    if total == 0.:
        raise ValueError(
            'The token weights are 0 for every kind of token that the model has; set patch_weight above 0.')
    return loss / total


def _variance(x: Tensor) -> Tensor:
    if rank_and_world()[1] == 1:
        return x.var(correction=0)
    moments = over_processes(torch.stack([x.mean(), x.square().mean()]).double())
    return (moments[1] - moments[0].square()).float()


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.) -> Tensor:
    """Kullback-Leibler divergence of the student's class probabilities from the teacher's, in nats per image.

    Args:
        student: Logits [B, C].
        teacher: Logits [B, C].
        temperature: Divides both; the result is multiplied by its square.

    Source: Hinton, Vinyals & Dean, arXiv 1503.02531.
    """
    s = F.log_softmax(student.float() / temperature, dim=-1)
    t = F.log_softmax(teacher.float() / temperature, dim=-1)
    return F.kl_div(s, t, reduction='batchmean', log_target=True) * temperature ** 2


def embedding_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the cosine of two embeddings, plus their squared error relative to the teacher's variance.

    The variance is one number for all dimensions, over the batch of all processes, so that a few dimensions with large
    values keep their proportion, as PHI-S does; its rotation of the dimensions would not change a squared error.

    Args:
        student: Embeddings [B, E].
        teacher: Embeddings [B, E].

    Returns:
        Mean over the images, dimensionless: 0 for equal embeddings.

    Source: PHI-S, arXiv 2410.01680 (one scale for all dimensions).
    """
    s, t = student.float().flatten(1), teacher.float().flatten(1)
    angle = 1. - F.cosine_similarity(s, t, dim=-1)
    spread = _variance(t - over_processes(t.mean(dim=0)))
    return angle.mean() + F.mse_loss(s, t) / spread.clamp_min(1e-12)


def jasmin_loss(attention: Tensor, k: int = 0) -> Tensor:
    """JaSMin: how large the Jacobian of softmax rows is.

    The loss is log g_1 for k = 0, and log(g_1 / g_k) for k >= 2, which spreads a row over k tokens; see
    `log_softmax_bound`.

    Args:
        attention: Probabilities before dropout, in float32 [..., heads, N, N].
        k: 0, or 2 to N.

    Returns:
        The maximum over the query rows, averaged over everything else, in nats.

    Raises:
        ValueError: k is out of range, or 1, which makes the loss 0 for any attention.

    Source: arXiv 2507.07814.
    """
    n = attention.shape[-1]
    if k == 1 or not 0 <= k <= n:
        raise ValueError(
            f'k must be 0, or 2 to {n} with {n} tokens (k = 1 makes the loss 0 for any attention); got {k!r}.')
    g = log_softmax_bound(attention, k)
    rows = g[..., 0] if k == 0 else g[..., 0] - g[..., k - 1]
    return rows.amax(dim=-1).mean()
