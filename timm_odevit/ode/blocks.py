"""OdeBlocks: the drop-in replacement for `model.blocks`."""
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .adaptive import Measured, solve_adaptive
from .config import WITH_HEAD, OdeConfig
from .fields import Context, Field
from .halting import Halts, Readout
from .methods import METHODS
from .reversible import can_reverse, run_reversibly
from .steps import Solver, Step

__all__ = ['OdeBlocks', 'count_parameters', 'find_ode_blocks']


class OdeBlocks(Halts, nn.Module):
    """One shared block that a solver evaluates: a sequence of K steps that replaces L transformer blocks.

    The shared field is registered once, as `shared`; the steps are modules without parameters, 'solver.0' to
    'solver.K-1', so hooks, feature extraction and FX find K layers. A step receives the field each time it is used: in
    `forward`, and in iteration and indexing, whose steps can be called as the host calls its blocks. `steps`, `method`
    and `config` may be set after training; this creates new steps (hooks on the old ones are lost). An adaptive method
    solves [0, T] in one call, and runs the steps only if the host asks for intermediate states.

    A forward pass changes nothing in the module, so several threads may run it at the same time.

    Args:
        shared: Vector field that all steps share.
        config: Settings, resolved (steps and T set).
        feature: `feature_info` entry of one block of the host: num_chs and reduction.
        t: Time at which the first step starts.
        before: Blocks of the base that are kept before the ODE.
        after: Blocks of the base that are kept after the ODE.
        readout: The host's logits [B, classes] for a last state [B, N, D]; None if it has none.
        prefix: How many tokens of the host come before those of the patches.

    Attributes:
        shared: The vector field.
        solver: The registered steps, without the field.
        before: The blocks of the base before the ODE.
        after: The blocks of the base after the ODE.

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
            readout: Optional[Readout] = None,
            prefix: int = 0,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.t = t
        self.readout = readout
        self.prefix = prefix
        self.before = nn.ModuleList(before)
        self.after = nn.ModuleList(after)
        self.feature_info = _FeatureInfo()  # shared with the host, so it stays correct when the steps change
        self._feature = dict(feature or {})
        self._measured = Measured()
        self._traced: Tuple[Solver, ...] = ()
        self._replicated: Tuple[Solver, ...] = ()
        self._lay(config)

    def _lay(self, config: OdeConfig) -> None:
        if config.tokens < 1 and not self.shared.has_attention_maps:
            raise ValueError(f"tokens={config.tokens:g} needs timm's plain attention, without windows, RoPE or a "
                             'position bias, and this block has another. Set tokens=1.')
        if config.halting is not None and self.after:
            raise ValueError(f"halting='{config.halting}' skips the rest of the model, but blocks are kept after the "
                             'ODE. Set halting=None.')
        if config.halting in WITH_HEAD and self.readout is None:
            raise ValueError(f"halting='{config.halting}' needs a model with one sequence of blocks, whose "
                             "`forward_head(norm(state))` gives its logits. Use 'acceleration' or 'residual'.")
        self.solver = Solver(config, self.t).train(self.training)
        kinds = (('before', self.before), ('solver', self.solver), ('after', self.after))
        names = [f'{kind}.{i}' for kind, modules in kinds for i in range(len(modules))]
        self.feature_info[:] = [{**self._feature, 'module': f'blocks.{name}'} for name in names]

    @property
    def _running(self) -> Solver:
        """The solver of this thread: inside `at`, the one that `at` made."""
        traced = torch.compiler.is_dynamo_compiling() and not _DYNAMO_READS_CONTEXT
        chosen = self._traced if traced else _AT.get().get(self, self._replicated)
        return chosen[-1] if chosen else self.solver

    def _replicate_for_data_parallel(self) -> Any:
        """A DataParallel replica, in its own thread, runs the same solver as the thread that replicates."""
        replica: Any = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._replicated = (self._running,)
        if self.config.halting in WITH_HEAD:
            raise ValueError(
                f"halting='{self.config.halting}' does not work in DataParallel. Use one process per device.")
        return replica

    @property
    def config(self) -> OdeConfig:
        """Settings; setting them creates new steps."""
        return self._running.config

    @config.setter
    def config(self, config: OdeConfig) -> None:
        if self in _AT.get():
            raise ValueError('Steps, method and config cannot be set inside `with blocks.at(...)`. Leave it first.')
        if config.field != self.config.field:
            raise ValueError(
                f"The shared block is a '{self.config.field}' field and cannot become '{config.field}'. Convert the "
                'original model again.')
        for name in ('time', 'rank', 'phases', 'boundaries', 'blocks'):
            now, wanted = getattr(self.config, name), getattr(config, name)
            if now != wanted:
                raise ValueError(
                    f'{name}={now!r} is fixed at conversion; got {wanted!r}. Convert the original model again.')
        self._lay(config)

    @property
    def settings(self) -> OdeConfig:
        """The settings that apply: `config`."""
        return self.config

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
        """Temporarily use another number of steps, in this thread only; hooks on the original steps do not fire.

        A backward pass that repeats the whole forward pass, as torch.utils.checkpoint around a model does, must also
        run inside; the gradient checkpointing of timm's models works per step and is not affected.
        """
        if steps is None:
            raise ValueError('steps must be a whole number of at least 1; got None.')
        solver = Solver(replace(self.config, steps=steps), self.t).train(self.training)
        if steps == self.steps:
            solver = self._running  # with its hooks
        try:
            _AT.set({**_AT.get(), self: (*_AT.get().get(self, ()), solver)})
            if not _DYNAMO_READS_CONTEXT:
                self._traced = (*self._traced, solver)
            yield
        finally:
            inside = _without(_AT.get().get(self, ()), solver)
            others = {module: solvers for module, solvers in _AT.get().items() if module is not self}
            _AT.set({**others, self: inside} if inside else others)
            self._traced = _without(self._traced, solver)

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
    def layers(self) -> List[int]:
        """The base's layer for each block of the sequence: the one in which a step starts, or a kept block's own."""
        last = self.config.blocks[1] if self.config.blocks else 0
        steps = [int(step.t + 1e-6) for step in self.bound_steps]
        return [*range(int(self.t) - len(self.before), int(self.t)), *steps,
                *range(last + 1, last + 1 + len(self.after))]

    @property
    def bound_steps(self) -> List[Step]:
        """The steps that this thread runs, each bound to the field; the kept blocks of the base are left out."""
        return list(self._running.bound(self.shared, self.prefix))

    @property
    def nfe(self) -> int:
        """Field evaluations of a forward pass; for an adaptive method, of this thread's last one, or 0 before it.

        Of images that halt earlier, `evaluations` has the mean in this thread's last pass. If a host calls adaptive
        steps one by one, each counts its own: `sum(s.evaluations for s in blocks)`.
        """
        if self.config.adaptive:
            return self._measured.evaluations
        return self.steps * METHODS[self.config.method].evaluations

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map the state before the first block [B, N, D] to the state after the last one [B, N, D].

        Args:
            x: The embedded tokens.
            *args: What the host passes to each of its blocks: masks, RoPE tables, ...
            **kwargs: Likewise.
        """
        for block in self.before:
            x = block(x, *args, **kwargs)
        if self.config.adaptive:
            x = self._solve(x, (self.t, self.end), args, kwargs)[-1]
        elif self.can_halt(self._running, x):
            pairs = list(self._in_context(args, kwargs))
            x = self.run_halting(pairs, x, self.config, self.readout)
        elif self._reverses(x):
            x = run_reversibly(self.bound_steps, x, self.shared.context(args, kwargs), self.shared)
        else:
            for step, context in self._in_context(args, kwargs):
                x = step(x, context)
        for block in self.after:
            x = block(x, *args, **kwargs)
        return x

    def _reverses(self, x: Any) -> bool:
        """Whether a backward pass may follow that undoes the steps: outside torch.compile and FX, and without hooks."""
        if self.method != 'reversible' or torch.compiler.is_compiling() or isinstance(x, torch.fx.Proxy):
            return False
        if not torch.is_grad_enabled() or any(step.hooked for step in self._running) or not can_reverse(self.shared):
            return False
        return bool(x.requires_grad) or any(p.requires_grad for p in self.shared.parameters())

    def trajectory(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All states of the ODE.

        Args:
            x: State at its start [B, N, D]: the embedded tokens, unless earlier blocks were kept.
            *args: What the host passes to each of its blocks: masks, RoPE tables, ...
            **kwargs: Likewise.

        Returns:
            The states at t = 0, T/K, ..., T [K + 1, B, N, D].
        """
        if self.config.adaptive:
            return self._solve(x, [*(step.t for step in self.bound_steps), self.end], args, kwargs)
        path = [x]
        for step, context in self._in_context(args, kwargs):
            path.append(step(path[-1], context))
        return torch.stack(path)

    def _in_context(self, args: Any, kwargs: Any) -> Iterator[Tuple[Step, Context]]:
        """Each step with the context that it is called with; every field is folded once."""
        contexts: Dict[int, Context] = {}
        for step in self.bound_steps:
            if id(step.field) not in contexts:
                contexts[id(step.field)] = step.field.context(args, kwargs, step.field.fold())
            yield step, contexts[id(step.field)]

    def _solve(self, x: Tensor, times: Sequence[float], args: Any, kwargs: Any) -> Tensor:
        states, self._measured.evaluations = solve_adaptive(
            self.shared, x, times, self.config, self.shared.context(args, kwargs))
        return states

    def __len__(self) -> int:
        return len(self.before) + len(self._running) + len(self.after)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.before, *self.bound_steps, *self.after])

    def __getitem__(self, index: Union[int, slice]) -> Any:
        modules = list(self)
        if not isinstance(index, slice):
            return modules[index]
        start, stop, stride = index.indices(len(modules))
        if stride != 1 or stop <= start:
            raise ValueError(f'A slice of {len(modules)} blocks must be consecutive and not empty; got {index}.')
        steps, T = self.config.grid
        ahead, chosen = len(self.before), modules[start:stop]
        low, high = max(start - ahead, 0), min(stop - ahead, steps)
        if high <= low:
            return nn.Sequential(*chosen)
        before, after = modules[start:ahead], modules[ahead + steps:stop]
        return OdeBlocks(
            self.shared, self.config.part(low, high), self._feature, self.t + low * T / steps, before, after, None,
            self.prefix).train(self.training)

    def extra_repr(self) -> str:
        return f'{self.method}, {self.steps} steps on [{self.t:g}, {self.end:g}]'


def _without(solvers: Tuple[Solver, ...], solver: Solver) -> Tuple[Solver, ...]:
    """The solvers, without the last occurrence of one of them."""
    last = max((i for i, other in enumerate(solvers) if other is solver), default=-1)
    return tuple(other for i, other in enumerate(solvers) if i != last)


# The solvers that `at` uses instead of a module's own, per thread and per asyncio task; the last one is active
_AT: ContextVar[Mapping[OdeBlocks, Tuple[Solver, ...]]] = ContextVar('at', default={})  # noqa: B039 (never changed in place)
# Before 2.15, torch.compile cannot read it: compiled models then follow the last `at` entered in any thread
_DYNAMO_READS_CONTEXT = tuple(int(part) for part in torch.__version__.split('.')[:2]) >= (2, 15)


class _FeatureInfo(list):
    """A list with a type of its own, because torch.export replaces the plain lists of a module with copies."""


def find_ode_blocks(model: nn.Module) -> List[OdeBlocks]:
    """The OdeBlocks of a model, in order; empty for a model that is not an ODE-ViT."""
    return [module for module in model.modules() if isinstance(module, OdeBlocks)]


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())
