"""merge_: for deployment, merge the weights of every step into ordinary blocks, in place, and back."""
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import nn

from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.fields import Field
from ..ode.methods import Step
from ..ode.skeleton import copy_module
from ..ode.time_dependence import MERGED, MergedField, TimeField
from .replacements import Replacements

__all__ = ['Merged', 'check_not_merged', 'merge_', 'merged_bytes']


def merge_(model: nn.Module) -> 'Merged':
    """Give each step of an ODE-ViT with a time-dependent block its own merged weights, in place, for deployment.

    Without it, a layer's residuals are added to the shared weights before every evaluation. That keeps only one block
    in memory but takes time, which matters with few tokens. Merged in advance, the model is about as fast as its base
    and takes as much memory: one block per step, or one for each time at which a step evaluates its field;
    `merged_bytes(model)` predicts how much. The blocks are ordinary frozen modules, which hooks, ONNX and quantisation
    handle like any others. A merged model has a fixed number of steps and cannot be saved or trained: call `restore()`
    first.

    Args:
        model: ODE-ViT with time 'low_rank' and a fixed-step method.

    Returns:
        A Merged: print it for the memory, call its `restore()` to undo.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: It is already merged, its block does not depend on time, or the method is adaptive.

    Examples:
        >>> merged = merge_(student)
        >>> print(merged)
        >>> logits = student(images)
        >>> merged.restore()
    """
    hosts = _hosts(model)
    after, replacements = merged_bytes(model), list[Any]()
    for host, name in hosts:
        merged = _merged(getattr(host, name))
        replacements.append((host, name, merged))
        if getattr(host, 'feature_info', None) is getattr(host, name).feature_info:
            replacements.append((host, 'feature_info', merged.feature_info))
    blocks = tuple(new for *_, new in replacements if isinstance(new, OdeBlocks))
    parts = [part for host, name in hosts for part in getattr(host, name).shared.modules()]
    if any(hasattr(part, name) for part in parts for name in ('set_input_size', 'set_window_size')):
        replacements.append((model, 'set_input_size', _refuse_size))  # before the model has changed anything else
    done = Merged(model, blocks, _bytes(model), after, Replacements(model, replacements))
    done._replacements.put()
    return done


def _merged(ode: OdeBlocks) -> OdeBlocks:
    """The blocks with frozen weights for every time at which a step evaluates its field."""
    fields = []
    for step in ode.solver:
        times = _times(step)
        at_times = [_frozen(step.field, t, step.interval) for t in times]
        fields.append(at_times[0] if len(times) == 1 else MergedField(at_times, times))
    table = MergedField(fields, [step.t for step in ode.solver]).requires_grad_(False)
    for module in (table, *(field for field in fields if isinstance(field, MergedField))):
        module.training = ode.shared.training
    merged = OdeBlocks(table, ode.config, ode.feature, ode.t, [*ode.before], [*ode.after], ode.readout,
                       ode.num_prefix_tokens)
    for old, new in zip((ode, ode.solver, *ode.solver), (merged, merged.solver, *merged.solver), strict=True):
        new.training = old.training
        new.__dict__.update({name: value.copy() if isinstance(value, dict) else value
                             for name, value in vars(old).items() if 'hook' in name and 'state_dict' not in name})
    return merged


def _times(step: Step) -> list[float]:
    """The times for which a step needs weights: one if they are averaged over the step."""
    return [step.t] if step.interval is not None else [step.t + node * step.h for node in step.nodes]


def _frozen(field: TimeField, t: float, interval: tuple[float, float] | None) -> Field:
    """A copy of a field as it is at t, or on average over an interval, with weights of its own."""
    base = copy_module(field.base, hooks=True)
    tensors = {**dict(base.named_parameters()), **dict(base.named_buffers())}
    with torch.no_grad():
        for name, value in field.at(t, interval=interval).items():
            tensors[name].copy_(value)
    return base


@dataclass(eq=False, repr=False)
class Merged:
    """The result of `merge_`: a report to print, and a way to undo it.

    Attributes:
        model: The merged model.
        blocks: Its merged blocks: one sequence, or one per stage.
        bytes_before: Memory of the model's weights before.
        bytes_after: Memory of the model's weights after.
    """
    model: nn.Module
    blocks: tuple[OdeBlocks, ...]
    bytes_before: int
    bytes_after: int
    _replacements: Replacements

    def restore(self) -> None:
        """Put the OdeBlocks back, with the parameters they had, on the model's device and for its image size.

        Raises:
            ValueError: The model no longer holds these merged blocks, or its dtype has changed.
        """
        self._replacements.restore('the merged blocks', 'shared block is')

    def __repr__(self) -> str:
        return f'Merged({type(self.model).__name__}, {self.bytes_before:,} -> {self.bytes_after:,} bytes)'

    def _repr_html_(self) -> str:
        return f'<pre>{escape(str(self))}</pre>'

    def __str__(self) -> str:
        count = sum(len(blocks) for blocks in self.blocks)
        return (f'{type(self.model).__name__}: merged into {count} blocks\n'
                f'  memory      {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB')


def merged_bytes(model: nn.Module) -> int:
    """Predict the memory in bytes of a model's weights after `merge_(model)`, without merging.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: It cannot be merged; see `merge_`.

    Examples:
        >>> print(f'{merged_bytes(student) / 1e6:.2f} MB')
    """
    total = _bytes(model)
    for host, name in _hosts(model):
        ode = getattr(host, name)
        total -= _bytes(ode.shared)
        total += sum(len(_times(step)) * _bytes(step.field.base) for step in ode.solver)
    return total


def check_not_merged(model: nn.Module) -> None:
    """Raise ValueError for a model that `merge_` has merged."""
    if any(blocks.merged for blocks in find_ode_blocks(model)):
        raise ValueError(MERGED)


def _hosts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that hold OdeBlocks, each with the attribute's name; raise if any cannot be merged."""
    check_not_merged(model)
    found: list[tuple[nn.Module, str]] = [(host, name) for host in model.modules()
                                          for name, child in host.named_children() if isinstance(child, OdeBlocks)]
    if not found:
        raise TypeError(f'Cannot merge {type(model).__name__}: it is not an ODE-ViT. Give a converted model.')
    for host, name in found:
        ode: Any = getattr(host, name)
        if ode.config.adaptive:
            raise ValueError(f"'{ode.method}' chooses its own times, so nothing can be merged in advance. Set a "
                             "fixed-step method first, such as model.blocks.method = 'rk4'.")
        if not ode.shared.depends_on_time:
            raise ValueError('There is nothing to merge: the shared block does not depend on time.')
    return found


def _refuse_size(*args: Any, **kwargs: Any) -> None:
    raise ValueError(MERGED)


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
