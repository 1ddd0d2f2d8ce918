"""OdeBlocks: the drop-in replacement for `model.blocks`; views of a model with another number of steps."""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..settings import shown
from .config import HALTING, OdeConfig
from .fields import Context, Field
from .halting import Readout, run_halting
from .methods import METHODS, Step
from .skeleton import shallow_copy, view
from .solver import Counts, Solver, solve_adaptive
from .time_dependence import MERGED, MergedField

__all__ = ['OdeBlocks', 'count_parameters', 'find_ode_blocks', 'with_steps']


class OdeBlocks(nn.Module):
    """One shared block that a solver evaluates: a sequence of K steps that replaces L transformer blocks.

    The steps are modules, 'solver.0' to 'solver.K-1', so hooks, feature extraction and FX find K layers; they refer to
    one field, `shared`. `steps`, `method` and `config` may be set at any time, which makes new steps (hooks on the old
    ones are lost). An adaptive method solves [0, T] in one call, and runs the steps only if the host asks for
    intermediate states.

    Args:
        shared: Vector field that all steps share.
        config: Settings, resolved (steps and T set).
        feature: `feature_info` entry of one block of the host.
        t: Time at which the first step starts.
        before, after: Blocks of the base that are kept before and after the ODE.
        readout: Maps a final state [B, N, D] to the host's logits [B, classes]; None if it has no head.
        num_prefix_tokens: How many tokens of the host come before those of the patches.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    solver: Any

    def __init__(
            self,
            shared: Field,
            config: OdeConfig,
            feature: dict[str, Any] | None = None,
            t: float = 0.,
            before: Sequence[nn.Module] = (),
            after: Sequence[nn.Module] = (),
            readout: Readout | None = None,
            num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.shared, self.t, self.readout, self.num_prefix_tokens = shared, t, readout, num_prefix_tokens
        self.before, self.after = nn.ModuleList(before), nn.ModuleList(after)
        self.feature_info = _FeatureInfo()  # shared with the host, so it stays correct when the steps change
        self.feature = dict(feature or {})
        self._counts = Counts()
        self._make_steps(config)

    def _make_steps(self, config: OdeConfig) -> None:
        if config.tokens < 1 and not self.shared.has_attention_maps:
            raise ValueError(f"tokens={config.tokens:g} needs timm's plain attention (no windows, RoPE or position "
                             'bias), which this block does not use. Set tokens=1.')
        if config.halting and self.after:
            raise ValueError(f"halting='{config.halting}' lets images leave after any step, but this model has blocks "
                             'after the ODE that they would skip. Set halting=None.')
        if config.halting and HALTING[config.halting].needs_head and self.readout is None:
            raise ValueError(f"halting='{config.halting}' needs a model with one sequence of blocks, whose "
                             "`forward_head(norm(state))` gives its logits. Use 'acceleration'.")
        self.solver = Solver(config, self.shared, self.t, self.num_prefix_tokens).train(self.training)
        self._config = config
        self.feature_info[:] = [{**self.feature, 'module': f'blocks.{kind}.{i}'} for kind in (
            'before', 'solver', 'after') for i in range(len(getattr(self, kind)))]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == 'shared' and 'solver' in self._modules:  # by a wrapper, say: the steps must hold it, too
            for step in self.solver:
                step.set_field(value)
        super().__setattr__(name, value)

    @property
    def config(self) -> OdeConfig:
        """Settings; setting them creates new steps."""
        return self._config

    @config.setter
    def config(self, config: OdeConfig) -> None:
        if self.merged:
            raise ValueError(MERGED)
        for name in ('field', 'time', 'rank', 'phases', 'boundaries', 'blocks'):
            now, new = getattr(self.config, name), getattr(config, name)
            if now != new:
                raise ValueError(
                    f'{name}={now!r} is fixed at conversion; got {new!r}. Convert the original model again.')
        self._make_steps(config)

    @property
    def steps(self) -> int:
        """Number K of steps of the ODE; setting it trades accuracy for compute."""
        return self.config.steps_and_end[0]

    @steps.setter
    def steps(self, steps: int) -> None:
        if steps is None:
            raise ValueError('steps must be a whole number of at least 1; got None.')
        self.config = replace(self.config, steps=steps)

    @property
    def method(self) -> str:
        return self.config.method

    @method.setter
    def method(self, method: str) -> None:
        self.config = replace(self.config, method=method, adjoint=self.config.adjoint and method not in METHODS)

    @property
    def end(self) -> float:
        """Time at which the last step ends, in blocks of the base."""
        return self.t + self.config.steps_and_end[1]

    @property
    def merged(self) -> bool:
        """Whether every step has merged weights of its own, see `merge_`."""
        return isinstance(self.shared, MergedField)

    @property
    def layers(self) -> list[int]:
        """The layer of the base that each block of the sequence is, or, of a step, in which it starts."""
        first, after = int(self.t), 1 + (self.config.blocks[1] if self.config.blocks else 0)
        return [*range(first - len(self.before), first), *(int(step.t + 1e-6) for step in self.solver),
                *range(after, after + len(self.after))]

    @property
    def nfe(self) -> int:
        """Field evaluations of a forward pass; for an adaptive method, of this thread's last pass, or 0."""
        if self.config.adaptive:
            return self._counts.evaluations
        return self.steps * METHODS[self.config.method].evaluations

    @property
    def evaluations(self) -> float:
        """Field evaluations of this thread's last pass, on average over its images."""
        taken = self.steps_taken
        if self.config.adaptive or self.config.halting is None or taken is None or not len(taken):
            return self.nfe
        return float(taken.float().mean()) * METHODS[self.config.method].evaluations

    @property
    def steps_taken(self) -> Tensor | None:
        """Steps of each image [B] in this thread's last forward pass in which images could halt; may be set to None."""
        return self._counts.steps

    @steps_taken.setter
    def steps_taken(self, steps: Tensor | None) -> None:
        self._counts.steps = steps

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """From the state before the first block [B, N, D] to that after the last; blocks take the other arguments."""
        taken = None
        for block in self.before:
            x = block(x, *args, **kwargs)
        if self.config.adaptive:
            x = self._solve(x, [self.t, self.end], args, kwargs)[-1]
        elif self._halts(x):
            rule = HALTING[str(self.config.halting)](self.readout)
            x, taken = run_halting(list(self._steps(args, kwargs)), x, rule, self.config.halting_threshold)
        else:
            for step, context in self._steps(args, kwargs):
                x = step(x, context)
        if not torch.compiler.is_compiling():
            self._counts.steps = taken
        for block in self.after:
            x = block(x, *args, **kwargs)
        return x

    def trajectory(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All states of the ODE, at t = 0, T/K, ..., T [K + 1, B, N, D], for that at its start [B, N, D]."""
        if self.config.adaptive:
            return self._solve(x, [*(step.t for step in self.solver), self.end], args, kwargs)
        path = [x]
        for step, context in self._steps(args, kwargs):
            path.append(step(path[-1], context))
        return torch.stack(path)

    def _steps(self, args: Any, kwargs: Any) -> Iterator[tuple[Step, Context]]:
        """Each step with the context that it is called with in one pass; every field is folded once."""
        field, context = None, Context({})
        for step in self.solver:
            if step.field is not field:
                field = step.field
                context = field.context(args, kwargs)._replace(weights=field.fold())
            yield step, context

    def _solve(self, x: Tensor, times: list[float], args: Any, kwargs: Any) -> Tensor:
        context = self.shared.context(args, kwargs)
        states, self._counts.evaluations = solve_adaptive(self.shared, x, times, self.config, context)
        return states

    def _halts(self, x: Any) -> bool:
        """Whether images may halt in this pass, by the values of their states and past no hook."""
        return (self.config.halting is not None and not self.training and not isinstance(x, torch.fx.Proxy)
                and not x.is_meta and not any(step._forward_hooks or step._forward_pre_hooks for step in self.solver))

    def with_config(self, config: OdeConfig) -> 'OdeBlocks':
        """A shallow copy that shares the field and the kept blocks, but has steps of its own."""
        twin = shallow_copy(self)
        twin._counts, twin.feature_info = Counts(), _FeatureInfo()
        twin.config = config
        return twin

    def __len__(self) -> int:
        return len(self.before) + len(self.solver) + len(self.after)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.before, *self.solver, *self.after])

    def __getitem__(self, index: int | slice) -> Any:
        modules = list(self)
        if not isinstance(index, slice):
            return modules[index]
        start, stop, stride = index.indices(len(modules))
        if stride != 1 or stop <= start:
            raise ValueError(f'A slice of {len(modules)} blocks must be consecutive and not empty; got {index}.')
        ahead, steps = len(self.before), len(self.solver)
        low, high = max(start - ahead, 0), min(stop - ahead, steps)
        if high <= low:
            return nn.Sequential(*modules[start:stop])
        part = OdeBlocks(
            self.shared, self.config.part(low, high), self.feature, self.solver[low].t, modules[start:ahead],
            modules[ahead + steps:stop], None, self.num_prefix_tokens)
        part.solver = nn.ModuleList([*self.solver][low:high])  # the same steps, with their hooks
        for new in (part, part.before, part.solver, part.after):  # not what they share with this one
            new.training = self.training
        return part

    def extra_repr(self) -> str:
        return f'{self.method}, {self.steps} steps on [{self.t:g}, {self.end:g}]'


class _FeatureInfo(list):
    """A list with a type of its own, because torch.export replaces the plain lists of a module with copies."""


def find_ode_blocks(model: nn.Module) -> list[OdeBlocks]:
    """The OdeBlocks of a model, in order; none for one that is not an ODE-ViT, TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a timm model; got {shown(model)}. Build it with timm.create_model.')
    return [module for module in model.modules() if isinstance(module, OdeBlocks)]


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())


def with_steps(model: nn.Module, steps: int | Sequence[int]) -> Any:
    """A view of an ODE-ViT with another number of steps: it shares all weights, but has steps of its own.

    The view follows every later change of the weights. Hooks on the model's steps do not fire in it, and a view of a
    compiled model is not compiled.

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
    stages = find_ode_blocks(model)
    if not stages:
        raise TypeError(f'{type(model).__name__} has no steps: it is not an ODE-ViT. Give a converted model.')
    counts: list[Any] = list(steps) if isinstance(steps, (list, tuple)) else [steps] * len(stages)
    if len(counts) != len(stages) or None in counts:
        raise ValueError(f'steps must be a whole number of at least 1, or one for each of {len(stages)} stages; got '
                         f'{steps!r}.')
    return view(model, {
        ode: ode.with_config(replace(ode.config, steps=count)) for ode, count in zip(stages, counts, strict=True)})
