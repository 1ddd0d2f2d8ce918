"""OdeBlocks: the drop-in for `model.blocks`."""
import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Union

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Field
from .methods import METHODS
from .solvers import Step, make_steps, solve_adaptive

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

    Shape: [B, N, D] to [B, N, D].

    Source: ODE-ViT, arXiv 2511.16501.
    """

    def __init__(
            self,
            shared: Field,
            config: OdeConfig,
            feature: Optional[Dict[str, Any]] = None,
            t: float = 0.,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.t = t
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
        steps = make_steps(self.shared, config, self.t)
        for name in [name for name in self._modules if name != 'shared']:
            del self._modules[name]
        for i, step in enumerate(steps):
            self.add_module(str(i), step.train(self.training))
        self.feature_info[:] = [{**self._feature, 'module': f'blocks.{i}'} for i in range(len(steps))]
        self._config = config
        self._evaluations = 0

    @property
    def steps(self) -> int:
        """Number K of steps on [0, T]: the compute dial."""
        return self.config.grid[0]

    @steps.setter
    def steps(self, steps: int) -> None:
        if steps is None:
            raise ValueError('steps must be a whole number of at least 1; got None.')
        self.config = replace(self.config, steps=steps)

    @contextmanager
    def at(self, steps: int) -> Iterator[None]:
        """Run with another number of steps for a while; the present steps, with their hooks, are put back after it."""
        config, modules, features = self._config, dict(self._modules), list(self.feature_info)
        try:
            if steps != self.steps:
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
    def nfe(self) -> int:
        """Field evaluations of a forward pass; for an adaptive method those of the last one, 0 before the first.

        Where a host calls adaptive steps one by one, each counts its own: `sum(s.evaluations for s in blocks)`.
        """
        if self.config.adaptive:
            return self._evaluations
        return self.steps * METHODS[self.config.method].evaluations

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """Take the state at t = 0 [B, N, D] to t = T [B, N, D]."""
        weights = self.shared.fold()
        if self.config.adaptive:
            states, self._evaluations = solve_adaptive(
                self.shared, x, (self.t, self.end), self.config, (attn_mask, is_causal, weights))
            return states[-1]
        for step in self._steps():
            x = step(x, attn_mask, is_causal, weights)
        return x

    def trajectory(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """All states on the way.

        Args:
            x: State at t = 0, the embedded tokens [B, N, D].
            attn_mask: Attention mask, as the host's blocks take it.
            is_causal: Causal attention, as the host's blocks take it.

        Returns:
            The states at t = 0, T/K, ..., T [K + 1, B, N, D].
        """
        weights = self.shared.fold()
        if self.config.adaptive:
            times = [*(step.t for step in self), self.end]
            states, self._evaluations = solve_adaptive(
                self.shared, x, times, self.config, (attn_mask, is_causal, weights))
            return states
        path = [x]
        for step in self:
            path.append(step(path[-1], attn_mask, is_causal, weights))
        return torch.stack(path)

    def _steps(self) -> List[Any]:
        return [self._modules[str(i)] for i in range(len(self))]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps())

    def __getitem__(self, index: Union[int, slice]) -> Union[Step, 'OdeBlocks']:
        if not isinstance(index, slice):
            return self._steps()[index]
        start, stop, stride = index.indices(len(self))
        if stride != 1 or stop <= start:
            raise ValueError(f'A slice of {len(self)} ODE steps must be consecutive and not empty; got {index}.')
        steps, T = self.config.grid
        config = replace(self.config, steps=stop - start, T=(stop - start) * T / steps)
        return OdeBlocks(self.shared, config, self._feature, self.t + start * T / steps).train(self.training)

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
    clone = copy.copy(model)
    clone.__dict__.pop('__prepare_scriptable__', None)
    clone._modules = dict(model._modules)
    steps = nn.Sequential(*make_steps(blocks.shared, blocks.config, blocks.t, own=True))
    for module in (steps, *steps):
        module.training = blocks.training
    clone._modules['blocks'] = steps
    return clone
