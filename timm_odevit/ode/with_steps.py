"""with_steps: a view of a model with another number of steps."""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .blocks import OdeBlocks, find_ode_blocks
from .skeleton import shallow_copy, tied_to

__all__ = ['with_steps']


def with_steps(model: nn.Module, steps: int | Sequence[int]) -> Any:
    """A view of an ODE-ViT with another number of steps: it shares all weights, but has steps of its own.

    The view follows every later change of the weights; several threads may each use one at the same time. Hooks on the
    model's steps do not fire in it, and a view of a compiled model is not compiled.

    Args:
        model: An ODE-ViT; it does not change.
        steps: Number K of steps, or one for each stage.

    Returns:
        A shallow copy of the model, of the same class.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: The number of steps is not allowed, or the model is merged.

    Examples:
        >>> half = with_steps(student, student.blocks.steps // 2)
        >>> agreement = (half(images).argmax(1) == student(images).argmax(1)).float().mean()
    """
    model = getattr(model, '_orig_mod', model)
    blocks = find_ode_blocks(model)
    if not blocks:
        raise TypeError(f'{type(model).__name__} has no steps: it is not an ODE-ViT. Give a converted model.')
    counts: list[Any] = list(steps) if isinstance(steps, (list, tuple)) else [steps] * len(blocks)
    if len(counts) != len(blocks) or None in counts:
        raise ValueError(f'steps must be a whole number of at least 1, or one for each of {len(blocks)} stages; got '
                         f'{steps!r}.')
    views = {ode: ode.with_config(replace(ode.config, steps=count)) for ode, count in zip(blocks, counts, strict=True)}
    return _view(model, views)


def _view(module: Any, views: dict[OdeBlocks, OdeBlocks]) -> Any:
    """A shallow copy of a module in which OdeBlocks are replaced; the module itself if it has none."""
    if module in views:
        return views[module]
    changed = {name: _view(child, views) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in changed.items()):
        return module
    twin = shallow_copy(module)
    twin._modules.update(changed)
    for ode, view in views.items():
        view.readout = tied_to(twin, module, view.readout)
        if module.__dict__.get('feature_info') is ode.feature_info:
            twin.feature_info = view.feature_info
    for name, child in changed.items():  # children bound to their host, such as RoPE, which makes a table per step
        tied = {key: tied_to(twin, module, value) for key, value in child.__dict__.items()}
        if child is module._modules[name] and any(tied[key] is not value for key, value in child.__dict__.items()):
            twin._modules[name] = shallow_copy(child)
            twin._modules[name].__dict__.update(tied)
    return twin
