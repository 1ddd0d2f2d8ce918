"""Spectral norms of the weights of a vector field, cheap enough to watch in training."""
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..ode.blocks import find_ode_blocks
from ..ode.time_dependence import TimeField, bare_name, residual_key
from ..settings import whole

__all__ = ['SpectralNorms', 'spectral_norms']


class _Weight(NamedTuple):
    """Rows of a matrix that has a value for each layer: shared [M, N] + up [L, M, r] down [L, r, N]."""
    name: str
    shared: Tensor
    up: Optional[Tensor]
    down: Optional[Tensor]
    rows: slice

    def times(self, v: Tensor) -> Tensor:
        """W v for v [L, N]."""
        found = v @ self.shared[self.rows].T
        if self.up is None or self.down is None:
            return found
        return found + (self.up[:, self.rows] @ (self.down @ v[..., None]))[..., 0]

    def transposed_times(self, u: Tensor) -> Tensor:
        """W^T u for u [L, M]."""
        found = u @ self.shared[self.rows]
        if self.up is None or self.down is None:
            return found
        return found + (self.down.mT @ (self.up[:, self.rows].mT @ u[..., None]))[..., 0]


class SpectralNorms:
    """The largest singular value of every weight matrix in the blocks of a model, by power iteration.

    Each call of `update` goes on from the vectors of the last, so that after a small change of the weights one
    iteration is enough. A joint projection to queries, keys and values counts as three matrices. With a residual for
    each layer, a weight's norm is the largest over the layers.

    Args:
        model: ODE-ViT, whose shared blocks are measured, or any model with `blocks`, each of which is.
        seed: Seed of the first vectors.

    Raises:
        TypeError: The model has no blocks, or no matrices in them.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model, self.seed = model, seed
        self.vectors: Dict[str, Tensor] = {}
        if not isinstance(model, nn.Module) or not _weights(model):
            raise TypeError(f'A {type(model).__name__} has no blocks with weight matrices.')

    @torch.no_grad()
    def update(self, iterations: int = 1) -> Dict[str, float]:
        """Iterate, and return the norms by the name of the weight, a lower bound that converges from below."""
        iterations = whole(1)('iterations', iterations)
        found = {}
        for weight in _weights(self.model):
            v = self.vectors.get(weight.name)
            if v is None:
                generator = torch.Generator().manual_seed(self.seed)
                layers = 1 if weight.up is None else len(weight.up)
                v = torch.randn(layers, weight.shared.shape[1], generator=generator)
            v = v.to(weight.shared)
            for _ in range(iterations):
                v = v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
                u = weight.times(v)
                norm, v = u.norm(dim=1), weight.transposed_times(u)
            self.vectors[weight.name] = v
            found[weight.name] = float(norm.max())
        return found


def spectral_norms(model: nn.Module, *, iterations: int = 100) -> Dict[str, float]:
    """The largest singular value of every weight matrix in the blocks of a model.

    Args:
        model: See SpectralNorms.
        iterations: Iterations of the power method.

    Returns:
        The norms by the name of the weight, such as 'attn.qkv.weight (queries)' or, of a model with several blocks,
        'blocks.3.mlp.fc1.weight'.

    Raises:
        TypeError: The model has no blocks with weight matrices.
    """
    return SpectralNorms(model).update(iterations)


def _weights(model: Any) -> List[_Weight]:
    odes = find_ode_blocks(model)
    shared: List[Any] = [part for ode in odes for part in ode.shared.phases]
    owners = shared if odes else list(getattr(model, 'blocks', ()))
    found = []
    for i, owner in enumerate(owners):
        timed = isinstance(owner, TimeField)
        for name, p in (owner.base if timed else owner).named_parameters():
            if p.ndim != 2:
                continue
            key, short = residual_key(name), bare_name(name).removeprefix('block.')
            up, down = (owner.up[key], owner.down[key]) if timed and key in owner.up else (None, None)
            label = short if len(owners) == 1 else f'blocks.{i}.{short}'
            thirds = ('queries', 'keys', 'values') if short.endswith('qkv.weight') else ('',)
            size = len(p) // len(thirds)
            for j, third in enumerate(thirds):
                rows = slice(j * size, (j + 1) * size)
                found.append(_Weight(f'{label} ({third})' if third else label, p, up, down, rows))
    return found
