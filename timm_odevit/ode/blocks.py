"""OdeBlocks: the drop-in replacement for `model.blocks`; views of a model with another number of steps."""
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..settings import shown
from .config import OdeConfig
from .fields import Context, Field, hooked
from .halting import Readout, run_halting
from .methods import METHODS, Step
from .solver import Solver, solve_adaptive
from .views import shallow_copy, view


class Counts(threading.local):
    """What the last pass of each thread took: evaluations, if adaptive; steps of each image [B], if they may halt."""
    evaluations = 0
    steps: Tensor | None = None

    def __reduce__(self) -> Any:
        return Counts, ()


class _FeatureInfo(list):
    """A list with a type of its own, because torch.export replaces the plain lists of a module with copies."""


class OdeBlocks(nn.Module):
    """A sequence of K steps of a solver, on one field, `shared`, that replaces transformer blocks.

    The steps are modules, 'solver.0' to 'solver.K-1', so hooks, feature extraction and FX find K layers. `steps`,
    `method` and `config` may be set at any time, which makes new steps (hooks on the old ones are lost). An adaptive
    method solves [0, T] in one call, and runs the steps only if one has a hook or the host asks for them. `before` and
    `after` are kept blocks of the base; `readout` maps a final state to the host's logits.
    """
    solver: Any

    def __init__(
            self, shared: Field, config: OdeConfig, feature: dict[str, Any], t: float,
            before: Sequence[nn.Module], after: Sequence[nn.Module], readout: Readout | None, num_prefix_tokens: int,
    ) -> None:
        super().__init__()
        self.shared, self.t, self.readout, self.num_prefix_tokens = shared, t, readout, num_prefix_tokens
        self.before, self.after = nn.ModuleList(before), nn.ModuleList(after)
        self.feature_info = _FeatureInfo()  # shared with the host, so it stays correct when the steps change
        self.feature = feature  # the host's `feature_info` entry of one block, if any
        self._counts = Counts()
        self._make_steps(config)

    def _make_steps(self, config: OdeConfig) -> None:
        if config.tokens < 1 and not self.shared.has_attention_maps:
            raise ValueError(f'tokens={config.tokens:g} needs plain attention: no windows, RoPE or position bias. Set '
                             'tokens=1.')
        if config.halting and self.after:
            raise ValueError('Images may leave after any step, but this model has blocks after the ODE that they would '
                             'skip. Leave halting at None.')
        if config.halting and self.readout is None:
            raise ValueError('Halting needs a model with one sequence of blocks, whose logits are '
                             'forward_head(norm(state)). Leave halting at None.')
        self._use(config, Solver(config, self.shared, self.t, self.num_prefix_tokens).train(self.training))

    def _use(self, config: OdeConfig, solver: nn.ModuleList) -> None:
        self._config, self.solver = config, solver
        self.feature_info[:] = [{**self.feature, 'module': f'blocks.{kind}.{i}'} for kind in (
            'before', 'solver', 'after') for i in range(len(getattr(self, kind)))]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == 'shared' and 'solver' in self._modules:  # by a wrapper, say: the steps must hold it, too
            if not isinstance(value, Field) and len(getattr(value, 'phases', '..')) > 1:
                raise TypeError('Steps call one shared block each, a Field or what passes on its attributes. Wrap '
                                'blocks.shared or, of several, each of blocks.shared.fields.')
            for step in self.solver:
                step.set_field(value)
        super().__setattr__(name, value)

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError('An ODE-ViT cannot run in DataParallel. Use DistributedDataParallel.')

    @property
    def config(self) -> OdeConfig:
        return self._config

    @config.setter
    def config(self, config: OdeConfig) -> None:
        for name in ('field', 'phases', 'blocks', 'init'):
            now, new = getattr(self.config, name), getattr(config, name)
            if now != new:
                raise ValueError(
                    f'{name}={now!r} is fixed at conversion; got {new!r}. Convert the original model again.')
        self._make_steps(config)

    @property
    def steps(self) -> int:
        """Number K; setting it trades accuracy for compute."""
        return self.config.steps_and_end[0]

    @steps.setter
    def steps(self, steps: int) -> None:
        self.config = replace(self.config, steps=steps)

    @property
    def method(self) -> str:
        return self.config.method

    @method.setter
    def method(self, method: str) -> None:
        self.config = replace(self.config, method=method)

    @property
    def end(self) -> float:
        return self.t + self.config.steps_and_end[1]

    @property
    def fewest_steps(self) -> int:
        """One for each shared block that applies before the end."""
        return 1 + sum(self.t + 1e-6 < t < self.end - 1e-6 for t in self.shared.borders)

    @property
    def layers(self) -> list[int]:
        """The base's layer that each block is, or in which a step starts."""
        first, after = int(self.t), 1 + (self.config.blocks[1] if self.config.blocks else 0)
        return [*range(first - len(self.before), first), *(int(step.t + 1e-6) for step in self.solver),
                *range(after, after + len(self.after))]

    @property
    def nfe(self) -> int:
        """Field evaluations of a forward pass; for an adaptive method, of this thread's last, 0 if a hook asked for the
        steps. Passes in which the host calls the steps (checkpoints, forward_intermediates) do not count."""
        return self._counts.evaluations if self.config.adaptive else self.steps * METHODS[self.method].evaluations

    @property
    def evaluations(self) -> float:
        """Field evaluations of this thread's last pass, on average over its images."""
        taken = self.steps_taken
        if self.config.halting is None or taken is None or not len(taken):
            return self.nfe
        return float(taken.float().mean()) * METHODS[self.method].evaluations

    @property
    def steps_taken(self) -> Tensor | None:
        """Steps of each image [B] in this thread's last eager pass, if images could halt in it."""
        return self._counts.steps

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """From the state before the first block [B, N, D] to that after the last; blocks take the other arguments."""
        taken = None
        for block in self.before:
            x = block(x, *args, **kwargs)
        if self.config.adaptive and not self._hooked:
            x = self._solve(x, [self.t, self.end], args, kwargs)[-1]
        elif self.readout is not None and self._halts(x):
            x, taken = run_halting([*self._steps(args, kwargs)], x, self.readout, self.config.halting_threshold)
        else:
            for step, context in self._steps(args, kwargs):
                x = step(x, context)
        if not torch.compiler.is_compiling():
            self._counts.steps = taken
            if self._hooked:  # what adaptive steps take is not counted
                self._counts.evaluations = 0
        for block in self.after:
            x = block(x, *args, **kwargs)
        return x

    def trajectory(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The state at the start of the ODE [B, N, D], and that after each step [K + 1, B, N, D]."""
        if self.config.adaptive:
            return self._solve(x, [*(step.t for step in self.solver), self.end], args, kwargs)
        path = [x]
        for step, context in self._steps(args, kwargs):
            path.append(step(path[-1], context))
        return torch.stack(path)

    def _steps(self, args: Any, kwargs: Any) -> Iterator[tuple[Step, Context]]:
        """Each step with its context; every field is folded once."""
        field, context = None, Context({})
        for step in self.solver:
            if step.field is not field:
                field = step.field
                context = field.context(args, kwargs, field.fold())
            yield step, context

    def _solve(self, x: Tensor, times: list[float], args: Any, kwargs: Any) -> Tensor:
        context = self.shared.context(args, kwargs)
        states, self._counts.evaluations = solve_adaptive(self.shared, x, times, self.config, context)
        return states

    def _halts(self, x: Any) -> bool:
        # a graph has no values, and a hook on a step sees all images
        return (self.config.halting is not None and not self.shared.training and not isinstance(x, torch.fx.Proxy)
                and not x.is_meta and not self._hooked)

    @property
    def _hooked(self) -> bool:
        return any(map(hooked, self.solver))

    def twin(self) -> 'OdeBlocks':
        twin = shallow_copy(self)
        twin._counts, twin.feature_info = Counts(), _FeatureInfo()
        return twin

    def __len__(self) -> int:
        return len(self.before) + len(self.solver) + len(self.after)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.before, *self.solver, *self.after])

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return list(self)[index]
        start, stop, stride = index.indices(len(self))
        ahead = len(self.before)
        low, high = max(start - ahead, 0), min(stop - ahead, len(self.solver))
        if high <= low or stride != 1:
            return nn.Sequential(*list(self)[index])
        part, first, last = self.twin(), self.solver[low], self.solver[high - 1]
        T = last.t + last.h - first.t
        config = replace(self.config, steps=high - low, T=T, halting=None,
                         tokens=1. - T / (self.end - self.t) * (1. - self.config.tokens))  # merged as fast as here
        part.t, part.readout = first.t, None
        part.before, part.after = self.before[start:], self.after[:max(stop - ahead - len(self.solver), 0)]
        part._use(config, nn.ModuleList([*self.solver][low:high]))  # the same steps, with their hooks
        return part

    def extra_repr(self) -> str:
        return f'{self.method}, {self.steps} steps on [{self.t:g}, {self.end:g}]'


def find_ode_blocks(model: nn.Module) -> list[OdeBlocks]:
    """In order; none for a model that is not an ODE-ViT, TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a timm model; got {shown(model)}. Build it with timm.create_model.')
    return [module for module in model.modules() if isinstance(module, OdeBlocks)]


def the_ode(model: nn.Module) -> Any:
    """Its only OdeBlocks, or TypeError."""
    odes = find_ode_blocks(model)
    if len(odes) != 1:
        raise TypeError(f'Give an ODE-ViT with one sequence of blocks; this {type(model).__name__} has {len(odes)}.')
    return odes[0]


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def with_steps(model: nn.Module, steps: int | Sequence[int]) -> Any:
    """A view of an ODE-ViT with another number of steps, or one for each stage; the model does not change.

    The view, a shallow copy of the same class, shares all weights and follows every later change of them. `train()`,
    `eval()` and hooks on either reach the other's layers, too, but for hooks on the model's steps, and a view of a
    compiled model is not compiled.

    Raises TypeError if the model is not an ODE-ViT, ValueError for a number that is not allowed.

    Examples:
        >>> half = with_steps(student, student.blocks.steps // 2)
        >>> agreement = (half(images).argmax(1) == student(images).argmax(1)).float().mean()
    """
    model = getattr(model, '_orig_mod', model)
    stages = find_ode_blocks(model)
    if not stages:
        raise TypeError(f'{type(model).__name__} has no steps: it is not an ODE-ViT. Give a converted model.')
    counts: list[Any] = list(steps) if isinstance(steps, (list, tuple)) else [steps] * len(stages)
    if len(counts) != len(stages):
        raise ValueError(f'steps must be a whole number, or one for each of {len(stages)} stages; got {steps!r}.')
    twins = {ode: ode.twin() for ode in stages}
    for twin, count in zip(twins.values(), counts, strict=True):
        twin.steps = count
    return view(model, twins)
