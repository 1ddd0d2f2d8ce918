"""Measurements on calibration images: spans of similar layers, and the inputs of linear layers."""
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hooks import evaluating, hooked, watch_blocks
from .initialisation import Moments

__all__ = ['check_images', 'input_moments', 'layer_distances', 'similarity_boundaries', 'split']


def check_images(images: Any) -> None:
    """Raise ValueError for anything but a batch of images [B, C, H, W]."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not len(images):
        found = f'{images.dtype} {list(images.shape)}' if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f'images must be a floating-point tensor [N, C, H, W], normalised for the model; got {found}.')
    if not images.is_meta and not torch.isfinite(images).all():
        raise ValueError('images must be finite; some values are not.')


def layer_distances(model: nn.Module, blocks: Sequence[nn.Module], images: Tensor) -> Tensor:
    """1 - cosine of the hidden states after each pair of blocks, averaged over tokens and images [L, L].

    Args:
        model: Any timm model.
        blocks: Its L blocks.
        images: Calibration images [B, C, H, W].

    Source: Raptor, arXiv 2512.19941.
    """
    with watch_blocks([blocks]) as seen, evaluating(model), torch.no_grad():
        model(images)
    # [L, B N, D]
    states = torch.stack([F.normalize(state.flatten(0, -2).float(), dim=-1) for state in seen[0][0][1:]])
    return 1 - torch.einsum('itd,jtd->ij', states, states) / states.shape[1]


def split(distances: Tensor, spans: int) -> list[int]:
    """Cut L layers into consecutive spans with the least sum of distances between layers of the same span.

    Exact, by dynamic programming over the last cut.

    Args:
        distances: Distance between each pair of layers, symmetric [L, L].
        spans: Number of spans, at most L.

    Returns:
        The first layer of each span except the first.
    """
    L = len(distances)
    d = distances.double().triu(1)
    cost = [[float(d[a:b, a:b].sum()) for b in range(L + 1)] for a in range(L + 1)]  # of the span [a, b)
    best = [cost[0][b] for b in range(L + 1)]
    cuts: list[list[int]] = [[] for _ in range(L + 1)]
    for count in range(2, spans + 1):
        options = {b: min((best[a] + cost[a][b], a) for a in range(count - 1, b)) for b in range(count, L + 1)}
        best = [options[b][0] if b in options else float('inf') for b in range(L + 1)]
        cuts = [[*cuts[options[b][1]], options[b][1]] if b in options else [] for b in range(L + 1)]
    return cuts[L]


def similarity_boundaries(model: nn.Module, blocks: Sequence[nn.Module], images: Tensor, spans: int) -> list[int]:
    """First layer of each span except the first, for spans of similar hidden states."""
    return split(layer_distances(model, blocks, images), spans)


def input_moments(model: nn.Module, blocks: Sequence[nn.Module], images: Tensor, first: int = 0) -> Moments:
    """Second moment x^T x / n [N, N] of the inputs of every linear layer of the blocks.

    Args:
        model: Any timm model.
        blocks: Consecutive blocks of the model.
        images: Calibration images [B, C, H, W].
        first: Layer of the first block.

    Returns:
        The moments by layer and parameter name, such as (3, 'block.mlp.fc1.weight').
    """
    moments: Moments = {}

    def watch(key: tuple[int, str]):
        def hook(_: nn.Module, args: Any) -> None:
            x = args[0].flatten(0, -2).float()
            moments[key] = moments.get(key, torch.zeros((), device=x.device)) + x.T @ x / len(x)
        return hook
    linears = [((first + i, f'block.{name}.weight'), module) for i, block in enumerate(blocks)
               for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    with hooked(*((module, 'before', watch(key)) for key, module in linears)):
        with evaluating(model), torch.no_grad():
            model(images)
    return moments
