"""merge_: for deployment, merge the weights of every step into ordinary blocks, in place, and back."""
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Iterator, List, Optional, Tuple

from torch import Tensor, nn

from ..ode.adaptive import Measured
from ..ode.blocks import OdeBlocks
from ..ode.config import OdeConfig
from ..ode.halting import Halts, Readout
from ..ode.steps import Step, pass_of
from ..ode.time_dependence import TabulatedField
from ..settings import checks_keywords
from .replacements import Replacements, image_size, resize_again

__all__ = ['Merged', 'MergedBlocks', 'check_not_merged', 'merge_', 'merged_bytes', 'merged_steps']


_MERGED = 'This model is merged. Call restore() on its Merged first.'
_OF_ODE_BLOCKS = ('at', 'config', 'method', 'nfe', 'shared', 'solver', 'steps', 'trajectory')


class MergedBlocks(Halts, nn.Sequential):
    """The steps of a solver, each with frozen weights of its own: ordinary modules, called in sequence.

    Attributes:
        layers: For each block, the layer of the base, as in OdeBlocks.
        merged: The settings of the OdeBlocks, of which tokens and halting still apply.
    """
    layers: List[int]
    merged: OdeConfig
    start: float
    readout: Optional[Readout]
    prefix: int

    @property
    def settings(self) -> OdeConfig:
        """The settings that apply: `merged`."""
        return self.merged

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        blocks = list(self)
        ahead = len(blocks) - self.merged.grid[0]  # nothing is kept after steps that can halt
        if self.can_halt(blocks[ahead:], x):
            for block in blocks[:ahead]:
                x = block(x)
            pairs = [(step, step.field.context((), {})) for step in blocks[ahead:]]
            return self.run_halting(pairs, x, self.merged, self.readout)
        for block in blocks:
            x = block(x)
        return x

    def __iter__(self) -> Iterator[Any]:
        shared = pass_of(self.merged, self.start, self.prefix)
        for block in super().__iter__():
            yield block.bound(block.field, shared) if shared is not None and isinstance(block, Step) else block

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            steps = [isinstance(block, Step) for block in super().__iter__()]
            first, last = (sum(steps[:i]) for i in index.indices(len(steps))[:2])
            found.layers = self.layers[index]
            found.merged = self.merged.part(first, last) if first < last else replace(self.merged, halting=None)
            found.start = self.start + first * self.merged.grid[1] / self.merged.grid[0]
            found.readout, found.prefix, found._measured = None, self.prefix, Measured()
        return found

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ODE_BLOCKS:
            raise AttributeError(f'{name}: {_MERGED}')
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_ODE_BLOCKS:
            raise ValueError(f'{name}: {_MERGED}')
        super().__setattr__(name, value)


@checks_keywords
def merge_(model: nn.Module) -> 'Merged':
    """Give each step of an ODE-ViT with a time-dependent block its own merged weights, in place, for deployment.

    A block that depends on time is merged with the residuals of a layer before every evaluation. That keeps only one
    block in memory but takes time, which matters with few tokens. Merged in advance, the model is about as fast as its
    base and takes as much memory: one block per step, or one for each time at which a step evaluates its field;
    `merged_bytes(model)` predicts how much. The blocks are ordinary frozen modules, which hooks, TorchScript, ONNX and
    quantisation handle like any others. A merged model has a fixed number of steps and cannot be saved or trained:
    call `restore()` first.

    Args:
        model: ODE-ViT with time 'vectors' or 'low_rank' and a fixed-step method.

    Returns:
        A Merged: print it for the memory, call its `restore()` to undo.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: It is already merged, its block does not depend on time, or the method is adaptive.
    """
    hosts = _hosts(model)
    after, replacements = merged_bytes(model), []
    for host, name in hosts:
        ode: OdeBlocks = getattr(host, name)
        steps = merged_steps(ode)
        for step in steps:
            step.requires_grad_(False)
        blocks = MergedBlocks(*ode.before, *steps, *ode.after)
        blocks.training, blocks.layers = ode.training, ode.layers
        blocks.merged, blocks.start, blocks.readout, blocks.prefix = ode.config, ode.t, ode.readout, ode.prefix
        blocks._measured = Measured()
        replacements.append((host, name, blocks))
    infos: List[Any] = []
    for host, name in hosts:
        info: Any = getattr(host, 'feature_info', None)
        if info is getattr(host, name).feature_info:
            infos.append((host, 'feature_info', [{**f, 'module': f'{name}.{i}'} for i, f in enumerate(info)]))
    merged = tuple(blocks for *_, blocks in replacements)
    if any(hasattr(part, 'set_input_size') for host, name in hosts for part in getattr(host, name).shared.modules()):
        infos.append((model, 'set_input_size', _refuse_size))  # before the model has changed anything else
    done = Merged(model, merged, _bytes(model), after, Replacements([*replacements, *infos]), image_size(model))
    done._replacements.put()
    return done


@dataclass(eq=False, repr=False)
class Merged:
    """The result of `merge_`: a report to print, and a way to undo it.

    Attributes:
        model: The merged model.
        blocks: Its MergedBlocks: one, or one per stage.
        bytes_before: Memory of the model's weights before.
        bytes_after: Memory of the model's weights after.
    """
    model: nn.Module
    blocks: Tuple[MergedBlocks, ...]
    bytes_before: int
    bytes_after: int
    _replacements: Replacements
    _size: Any

    def restore(self) -> None:
        """Put the OdeBlocks back, with the parameters they had, on the model's device and for its image size.

        Raises:
            ValueError: The model no longer holds these merged blocks, or its dtype has changed.
        """
        modules = set(self.model.modules())
        if not modules.issuperset(self.blocks):
            raise ValueError('This model no longer holds the merged blocks: it was restored or changed.')
        originals = self._replacements.before[:len(self.blocks)]
        now, then = (next(p for p in module.parameters() if p.is_floating_point())
                     for module in (self.blocks[0], originals[0]))
        if now.dtype != then.dtype:
            raise ValueError(
                f'The model is now {now.dtype}, its shared block is {then.dtype}. Call model.to({then.dtype}) first.')
        for ode in originals:
            ode.to(now.device).train(self.blocks[0].training)
        self._replacements.take_off(partial(resize_again, self.model, self._size))

    def __repr__(self) -> str:
        return f'Merged({type(self.model).__name__}, {self.bytes_before:,} -> {self.bytes_after:,} bytes)'

    def __str__(self) -> str:
        count = sum(len(blocks) for blocks in self.blocks)
        return (f'{type(self.model).__name__}: merged into {count} blocks\n'
                f'  memory      {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB')


@checks_keywords
def merged_bytes(model: nn.Module) -> int:
    """Predict the memory in bytes of a model's weights after `merge_(model)`, without merging.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: It cannot be merged; see `merge_`.
    """
    total = _bytes(model)
    for host, name in _hosts(model):
        ode = getattr(host, name)
        total -= _bytes(ode.shared)
        total += sum(len(step.nodes) * _bytes(ode.shared.select(step.t).base) for step in ode.bound_steps)
    return total


def merged_steps(blocks: OdeBlocks) -> List[Step]:
    """The steps of a fixed-step method as modules that own their field, merged if it depends on time."""
    made: List[Any] = []
    for bound in blocks.bound_steps:
        made.append(step := bound.apart())
        field: Any = blocks.shared.select(step.t)
        if field.depends_on_time:
            times = [step.t + node * step.h for node in step.nodes]
            fields = [field.snapshot(t) for t in times]
            field = fields[0] if len(fields) == 1 else TabulatedField(fields, times).train(field.training)
        step.field = field
        step.training = blocks.training
    return made


def check_not_merged(model: nn.Module) -> None:
    """Raise ValueError for a model that `merge_` has merged."""
    if any(isinstance(module, MergedBlocks) for module in model.modules()):
        raise ValueError(_MERGED)


def _hosts(model: nn.Module) -> List[Tuple[nn.Module, str]]:
    """The modules that hold OdeBlocks, each with the attribute's name; raise if any cannot be merged."""
    check_not_merged(model)
    found: List[Tuple[nn.Module, str]] = [(host, name) for host in model.modules()
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
    raise ValueError(_MERGED)


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
