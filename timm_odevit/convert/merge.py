"""merge_: for deployment, merge the weights of every step into ordinary blocks, in place, and back."""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ode.blocks import MERGED, OdeBlocks, find_ode_blocks
from ..ode.fields import Field, copy_module
from ..ode.time_dependence import MergedField, TimeField

__all__ = ['Merged', 'Replacements', 'check_not_merged', 'hosts_of', 'merge_', 'merged_bytes']


class Replacements:
    """Attributes of a model and of its parts, given as owner, name and new value; the first value is a module.

    They are replaced together, at construction, and restored together.
    """
    what = ''

    def __init__(self, model: nn.Module, rows: Sequence[tuple[Any, str, Any]]) -> None:
        self.model: Any = model
        self._rows = [(owner, name, new, _own(owner, name)) for owner, name, new in rows]
        self._training = model.training
        for owner, name, new in rows:
            setattr(owner, name, new)

    def restore(self) -> None:
        """Undo the replacements; what is put back follows the model's device and its mode.

        Raises ValueError if the model no longer holds what replaced it.
        """
        modules = [row for row in self._rows if isinstance(row[2], nn.Module)]
        if any(_own(owner, name) is not module for owner, name, module, _ in modules):
            raise ValueError(f'This model no longer holds {self.what}: it was restored already, or what was put in '
                             'later must be restored first.')
        device = next(modules[0][2].parameters()).device
        for _, _, _, module in modules:
            module.to(device)
            if self.model.training != self._training:
                module.train(self.model.training)
        for owner, name, _, value in self._rows:
            if value is None:  # what the class defines
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    """An attribute of a module itself, not of its class; None if it has none."""
    return owner._modules.get(name, vars(owner).get(name))


class Merged(Replacements):
    """The result of `merge_`: the merged `blocks`, one sequence or one per stage, and bytes of the model's weights."""
    what = 'the merged blocks'

    def __init__(self, model: nn.Module, rows: Sequence[tuple[Any, str, Any]]) -> None:
        self.blocks: tuple[OdeBlocks, ...] = tuple(new for _, name, new in rows if name == 'blocks')
        self.bytes_before, self.bytes_after = _bytes(model), merged_bytes(model)
        super().__init__(model, rows)

    def __repr__(self) -> str:
        return (f'{type(self.model).__name__}: merged into {sum(map(len, self.blocks))} blocks\n'
                f'  memory      {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB')


def merge_(model: nn.Module) -> Merged:
    """Give each step of an ODE-ViT with time='low_rank' its own merged weights, in place, for deployment.

    Merged, a model is about as fast as its base and takes as much memory, which `merged_bytes(model)` predicts. Its
    number of steps is fixed, and it cannot be saved or trained: call `restore()` of the returned Merged first.

    Raises TypeError if the model is not an ODE-ViT, ValueError if it is already merged, its block does not depend on
    time, or the method is adaptive.

    Examples:
        >>> merged = merge_(student)
        >>> print(merged)
        >>> logits = student(images)
        >>> merged.restore()
    """
    hosts = _mergeable(model)
    rows: list[tuple[Any, str, Any]] = [(host, 'blocks', _merged(ode)) for host, ode in hosts]
    rows += [(host, 'feature_info', new.feature_info) for (host, ode), (_, _, new) in zip(hosts, rows, strict=True)
             if getattr(host, 'feature_info', None) is ode.feature_info]
    parts = [part for _, ode in hosts for part in ode.shared.modules()]
    if any(hasattr(part, name) for part in parts for name in ('set_input_size', 'set_window_size')):
        rows.append((model, 'set_input_size', partial(_refuse, model)))
    return Merged(model, rows)


def _merged(ode: OdeBlocks) -> OdeBlocks:
    """The blocks with the frozen weights of each step."""
    fields = [_frozen(step.field, step.interval) for step in ode.solver]
    starts = [step.t for step in ode.solver]
    table = MergedField(fields, starts, range(len(fields)), starts[1:])
    merged = OdeBlocks(table.requires_grad_(False).train(ode.shared.training), ode.config, ode.feature, ode.t,
                       [*ode.before], [*ode.after], ode.readout, ode.num_prefix_tokens)
    for old, new in zip((ode, ode.solver, *ode.solver), (merged, merged.solver, *merged.solver), strict=True):
        new.training = old.training
        new.__dict__.update({name: value.copy() if isinstance(value, dict) else value
                             for name, value in vars(old).items() if 'hook' in name and 'state_dict' not in name})
    return merged


def _frozen(field: TimeField, interval: tuple[float, float]) -> Field:
    """A copy of a field with weights of its own: the mean over an interval."""
    base = copy_module(field.base, hooks=True)
    tensors = {**dict(base.named_parameters()), **dict(base.named_buffers())}
    with torch.no_grad():
        for name, value in field.at(interval[0], interval=interval).items():
            tensors[name].copy_(value)
    return base


def merged_bytes(model: nn.Module) -> int:
    """Predict the memory in bytes of a model's weights after `merge_(model)`; raises what `merge_` raises.

    Examples:
        >>> print(f'{merged_bytes(student) / 1e6:.2f} MB')
    """
    return _bytes(model) + sum(sum(_bytes(step.field.base) for step in ode.solver) - _bytes(ode.shared)
                               for _, ode in _mergeable(model))


def _refuse(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """In place of a method that a merged model does not have."""
    raise ValueError(MERGED)


def check_not_merged(model: nn.Module) -> None:
    if any(blocks.merged for blocks in find_ode_blocks(model)):
        raise ValueError(MERGED)


def hosts_of(model: nn.Module) -> list[tuple[nn.Module, OdeBlocks]]:
    """The OdeBlocks of a model, each with the module that holds it."""
    return [(host, blocks) for host in model.modules()
            if isinstance(blocks := host._modules.get('blocks'), OdeBlocks)]


def _mergeable(model: nn.Module) -> list[tuple[nn.Module, OdeBlocks]]:
    check_not_merged(model)
    hosts = hosts_of(model)
    if not hosts:
        raise TypeError(f'Cannot merge {type(model).__name__}: it is not an ODE-ViT.')
    for _, ode in hosts:
        if ode.config.adaptive or not ode.shared.depends_on_time:
            why = f"'{ode.method}' chooses its own times" if ode.config.adaptive else (
                'the shared block does not depend on time')
            raise ValueError(f'There is nothing to merge: {why}.')
    return hosts


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
