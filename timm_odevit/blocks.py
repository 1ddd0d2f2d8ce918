"""OdeBlocks: the drop-in for `model.blocks`."""
import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field, NativeField, PostNormField
from .methods import METHODS
from .solvers import Step, make_steps, solve_adaptive
from .time_dependence import TimeField

__all__ = ['OdeBlocks', 'find_ode_blocks', 'scriptable_copy']


class OdeBlocks(nn.Module):
    """One shared block that a solver evaluates: the sequence of its K steps, in place of L transformer blocks.

    The shared field is registered once, as `shared`; the steps are modules '0' to 'K-1' without parameters, so that
    hooks, feature extraction and FX find K layers. `steps`, `method` and `config` may be set after training, which
    lays new steps (hooks on the old ones are gone). An adaptive method solves [0, T] in one go, and calls the steps
    only where the host asks for states in between.

    Args:
        shared: Vector field that all steps share.
        config: Settings, resolved (steps and T set).
        feature: `feature_info` entry of one block of the host: num_chs and reduction.
        t: Time at which the first step starts.
        before: Blocks of the base that stay as they are, ahead of the ODE.
        after: Blocks of the base that stay as they are, behind the ODE.

    Shape: [B, N, D] to [B, N, D].

    Source: ODE-ViT, arXiv 2511.16501.
    """

    def __init__(
            self,
            shared: Field,
            config: OdeConfig,
            feature: Optional[Dict[str, Any]] = None,
            t: float = 0.,
            before: Sequence[nn.Module] = (),
            after: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.shared = shared
        self.t = t
        if before:
            self.before = nn.ModuleList(before)
        if after:
            self.after = nn.ModuleList(after)
        self.feature_info = _FeatureInfo()  # the host's list too, so that it stays true when the steps change
        self._feature = dict(feature or {})
        self._evaluations = 0  # of the last adaptive solution
        self.config = config

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == 'shared' and '_config' in self.__dict__:  # a wrapper took its place: let the steps use it
            self.config = self._config

    @property
    def config(self) -> OdeConfig:
        """Settings; setting them lays the steps anew."""
        return self._config

    @config.setter
    def config(self, config: OdeConfig) -> None:
        if '_config' in self.__dict__ and config.field != self.config.field:
            raise ValueError(
                f"The shared block is a '{self.config.field}' field and cannot become '{config.field}'. Convert anew.")
        for name in ('time', 'rank', 'phases', 'boundaries', 'blocks') if '_config' in self.__dict__ else ():
            now, wanted = getattr(self.config, name), getattr(config, name)
            if now != wanted:
                raise ValueError(
                    f'{name} is what the shared blocks were made for: {now!r}, not {wanted!r}. Convert anew.')
        steps = make_steps(self.shared, config, self.t)
        for name in [name for name in self._modules if name.isdigit()]:
            del self._modules[name]
        for i, step in enumerate(steps):
            self.add_module(str(len(self._kept('before')) + i), step.train(self.training))
        self.feature_info[:] = [{**self._feature, 'module': f'blocks.{name}'} for name, _ in self._sequence()]
        self._config = config
        self._evaluations = 0

    @property
    def steps(self) -> int:
        """Number K of steps of the ODE: the compute dial."""
        return self.config.grid[0]

    @steps.setter
    def steps(self, steps: int) -> None:
        if steps is None:
            raise ValueError('steps must be a whole number of at least 1; got None.')
        self.config = replace(self.config, steps=steps)

    @contextmanager
    def at(self, steps: int) -> Iterator[None]:
        """Run with another number of steps for a while; the present steps, with their hooks, are put back after it."""
        if steps == self.steps:
            yield
            return
        config, modules, features = self._config, dict(self._modules), list(self.feature_info)
        try:
            self.steps = steps
            yield
        finally:
            self._modules.clear()
            self._modules.update(modules)
            self.feature_info[:] = features
            self._config = config

    @property
    def method(self) -> str:
        """Integration method."""
        return self.config.method

    @method.setter
    def method(self, method: str) -> None:
        adaptive = method not in METHODS
        self.config = replace(self.config, method=method, adjoint=self.config.adjoint and adaptive)

    @property
    def end(self) -> float:
        """Time at which the last step ends, in blocks of the base."""
        return self.t + self.config.grid[1]

    @property
    def cache_merged(self) -> bool:
        """Keep the merged weights of a block that depends on time between forward passes without gradients.

        Takes the memory of one block per step (lie_trotter, euler) or per evaluation (others), and saves the time of
        merging, which counts with few tokens. Weights that change are merged anew. Off unless set.
        """
        return any(field.cache is not None for field in self.shared.modules() if isinstance(field, TimeField))

    @cache_merged.setter
    def cache_merged(self, value: bool) -> None:
        for field in self.shared.modules():
            if isinstance(field, TimeField):
                field.cache = {} if value else None

    @property
    def layers(self) -> List[int]:
        """For each block of the sequence, the layer of the base: the one in which a step starts, or its own."""
        before, after = len(self._kept('before')), len(self._kept('after'))
        last = self.config.blocks[1] if self.config.blocks else 0
        steps = [int(step.t + 1e-6) for step in self._steps()]
        return [*range(int(self.t) - before, int(self.t)), *steps, *range(last + 1, last + 1 + after)]

    @property
    def nfe(self) -> int:
        """Field evaluations of a forward pass; for an adaptive method those of the last one, 0 before the first.

        Where a host calls adaptive steps one by one, each counts its own: `sum(s.evaluations for s in blocks)`.
        """
        if self.config.adaptive:
            return self._evaluations
        return self.steps * METHODS[self.config.method].evaluations

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take the state ahead of the first block [B, N, D] to the state behind the last one [B, N, D].

        Args:
            x: The embedded tokens.
            *args: What the host hands to each of its blocks: masks, RoPE tables, ...
            **kwargs: Likewise.
        """
        for block in self._kept('before'):
            x = block(x, *args, **kwargs)
        if self.config.adaptive:
            x = self._solve(x, (self.t, self.end), args, kwargs)[-1]
        else:
            for step, context in self._in_context(args, kwargs):
                x = step(x, context)
        for block in self._kept('after'):
            x = block(x, *args, **kwargs)
        return x

    def trajectory(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All states of the ODE.

        Args:
            x: State at its start [B, N, D]: the embedded tokens, unless blocks ahead of it were kept.
            *args: What the host hands to each of its blocks: masks, RoPE tables, ...
            **kwargs: Likewise.

        Returns:
            The states at t = 0, T/K, ..., T [K + 1, B, N, D].
        """
        if self.config.adaptive:
            return self._solve(x, [*(step.t for step in self._steps()), self.end], args, kwargs)
        path = [x]
        for step, context in self._in_context(args, kwargs):
            path.append(step(path[-1], context))
        return torch.stack(path)

    def _in_context(self, args: Any, kwargs: Any) -> Iterator[Tuple[Any, Context]]:
        """The steps with what each is called with; every field is folded once."""
        contexts: Dict[int, Context] = {}
        for step in self._steps():
            if id(step.field) not in contexts:
                contexts[id(step.field)] = step.field.context(args, kwargs, step.field.fold())
            yield step, contexts[id(step.field)]

    def _solve(self, x: Tensor, times: Sequence[float], args: Any, kwargs: Any) -> Tensor:
        context = self.shared.context(args, kwargs, self.shared.fold())
        states, self._evaluations = solve_adaptive(self.shared, x, times, self.config, context)
        return states

    def _kept(self, name: str) -> List[nn.Module]:
        kept = self._modules.get(name)
        return list(kept) if isinstance(kept, nn.ModuleList) else []

    def _steps(self) -> List[Any]:
        return [module for name, module in self._modules.items() if name.isdigit()]

    def _sequence(self) -> List[Tuple[str, Any]]:
        """Names and modules of all blocks, in order."""
        steps = [(name, module) for name, module in self._modules.items() if name.isdigit()]
        before, after = ([(f'{where}.{i}', module) for i, module in enumerate(self._kept(where))]
                         for where in ('before', 'after'))
        return [*before, *steps, *after]

    def __len__(self) -> int:
        return len(self._sequence())

    def __iter__(self) -> Iterator[Any]:
        return iter([module for _, module in self._sequence()])

    def __getitem__(self, index: Union[int, slice]) -> Any:
        modules = list(self)
        if not isinstance(index, slice):
            return modules[index]
        start, stop, stride = index.indices(len(modules))
        if stride != 1 or stop <= start:
            raise ValueError(f'A slice of {len(modules)} blocks must be consecutive and not empty; got {index}.')
        steps, T = self.config.grid
        ahead, chosen = len(self._kept('before')), modules[start:stop]
        low, high = max(start - ahead, 0), min(stop - ahead, steps)
        if high <= low:
            return nn.Sequential(*chosen)
        config = replace(self.config, steps=high - low, T=(high - low) * T / steps)
        before, after = modules[start:ahead], modules[ahead + steps:stop]
        return OdeBlocks(
            self.shared, config, self._feature, self.t + low * T / steps, before, after).train(self.training)

    def extra_repr(self) -> str:
        return f'{self.method}, {self.steps} steps on [{self.t:g}, {self.end:g}]'


class _FeatureInfo(list):
    """A list, in a type of its own because torch.export replaces the plain lists of a module by copies."""


def find_ode_blocks(model: nn.Module) -> List[OdeBlocks]:
    """The OdeBlocks of a model, in order; empty for a model that is not an ODE-ViT."""
    return [module for module in model.modules() if isinstance(module, OdeBlocks)]


def scriptable_copy(model: nn.Module) -> nn.Module:
    """The model as `torch.jit.script` wants it: a shallow copy whose steps each own the shared field.

    TorchScript iterates over registered modules only, and knows no reference to a module beside them. The copy shares
    every parameter with the model, and `torch.jit.script` leaves the model itself as it is.

    Raises:
        ValueError: The method is adaptive; torchdiffeq cannot be scripted.
    """
    blocks: Any = model.blocks
    if blocks.config.adaptive:
        raise ValueError(
            f"TorchScript cannot hold the adaptive method '{blocks.method}'. Set a fixed-step method first, such as "
            "model.blocks.method = 'rk4'.")
    unscriptable = {type(f).__name__ for f in blocks.shared.modules() if isinstance(f, NativeField)
                    and type(f) not in (NativeField, PostNormField)}
    if unscriptable:
        raise ValueError(f"TorchScript cannot hold a {' or '.join(sorted(unscriptable))}. Use torch.export instead.")
    timed = any(isinstance(f, TimeField) for f in blocks.shared.modules())
    if timed and blocks.method not in ('euler', 'lie_trotter'):
        raise ValueError(
            f"TorchScript holds one set of weights per step, and '{blocks.method}' needs several where the block "
            "depends on time. Use euler, lie_trotter, or torch.export.")
    clone = copy.copy(model)
    clone.__dict__.pop('__prepare_scriptable__', None)
    clone._modules = dict(model._modules)
    steps = [_Scriptable(step) for step in make_steps(blocks.shared, blocks.config, blocks.t, own=True)]
    sequence = nn.Sequential(*blocks._kept('before'), *steps, *blocks._kept('after'))
    for module in (sequence, *steps, *(step.step for step in steps)):
        module.training = blocks.training
    clone._modules['blocks'] = sequence
    return clone


class _Scriptable(nn.Module):
    """A step in the signature of timm's ViT block, since TorchScript knows no *args."""

    if TYPE_CHECKING:
        step: Any

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        return self.step.advance(x, Context(attn_mask, is_causal, None, {}))
