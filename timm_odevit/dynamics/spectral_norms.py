"""Spectral norms of the weights of a vector field, cheap enough to watch in training."""
from typing import Any

import torch
from torch import Tensor, nn

from ..ode.blocks import find_ode_blocks
from ..ode.time_dependence import TimeField, bare_name
from ..settings import integer

__all__ = ['SpectralNorms', 'spectral_norms']


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
        self.vectors: dict[str, Tensor] = {}
        if not isinstance(model, nn.Module) or not _weights(model):
            raise TypeError(f'A {type(model).__name__} has no blocks with weight matrices.')

    @torch.no_grad()
    def update(self, iterations: int = 1) -> dict[str, float]:
        """Iterate, and return the norms by the name of the weight, a lower bound that converges from below."""
        iterations = integer(1)('iterations', iterations)
        found = {}
        for name, weight in _weights(self.model).items():
            first = torch.randn(weight.shape[::2], generator=torch.Generator().manual_seed(self.seed))
            v = self.vectors.get(name, first).to(weight)[..., None]  # [L, N, 1]
            for _ in range(iterations):
                v = v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
                u = weight @ v
                norm, v = u.norm(dim=1), weight.mT @ u
            self.vectors[name] = v[..., 0]
            found[name] = float(norm.max())
        return found


def spectral_norms(model: nn.Module, *, iterations: int = 100) -> dict[str, float]:
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


@torch.no_grad()
def _weights(model: Any) -> dict[str, Tensor]:
    """Every matrix, with a value for each layer [L, M, N]; L is 1 without residuals."""
    odes = find_ode_blocks(model)
    blocks: list[Any] = [field for ode in odes for field in ode.shared.phases] if odes else list(
        getattr(model, 'blocks', ()))
    found = {}
    for i, block in enumerate(blocks):
        timed = isinstance(block, TimeField)
        layers = [block.at(layer) for layer in block.layers] if timed else []
        for name, p in (block.base if timed else block).named_parameters():
            if p.ndim != 2:
                continue
            values = torch.stack([layer.get(name, p) for layer in layers]) if layers else p[None]
            short = bare_name(name).removeprefix('block.')
            label = short if len(blocks) == 1 else f'blocks.{i}.{short}'
            if short.endswith('qkv.weight'):
                found.update({f'{label} ({what})': part for what, part in zip(
                    ('queries', 'keys', 'values'), values.chunk(3, dim=1), strict=True)})
            else:
                found[label] = values
    return found
