"""What `fit` watches: loss, spectral norms, the precision of Muon; and records for TensorBoard."""
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.optim import muon
from torch import Tensor, nn

from ..dynamics.lipschitz import SpectralNorms
from ..hooks import evaluating, hooked
from ..ode.blocks import find_ode_blocks
from ..ode.with_steps import with_steps
from .resume import models_of

__all__ = ['NormWatch', 'autocast', 'check_loss_is_finite', 'muon_in_float32', 'scalars']


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Mixed precision in a dtype; nothing for None, also on devices that have none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def check_loss_is_finite(
        parts: dict[str, Tensor], images: Tensor, task: Any, epoch: int, batch: int, dtype: torch.dtype | None,
) -> None:
    """Raise FloatingPointError if the loss is not finite, with the step of an ODE-ViT at which it diverged."""
    if math.isfinite(parts['loss'].item()):
        return
    if not torch.isfinite(images).all():
        raise FloatingPointError(f'Images of batch {batch + 1} in epoch {epoch + 1} are not finite, nor is the loss. '
                                 'Check the data.')
    found = ', '.join(f'{key} {part.item():.4g}' for key, part in parts.items())
    raise FloatingPointError(
        f'The loss is not finite in epoch {epoch + 1}, batch {batch + 1} ({found}). '
        f'{_divergence(task, images, dtype)}Lower lr, or use amp bfloat16 or None and a model that is not in float16.')


@torch.no_grad()
def _divergence(task: Any, images: Tensor, dtype: torch.dtype | None) -> str:
    """A sentence that says where an ODE-ViT's state stops being finite; empty for other models and other causes."""
    model = models_of(task)['model']
    odes = find_ode_blocks(model)
    if not odes or odes[0].config.adaptive:
        return ''
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        return 'The weights of the model are not finite. '
    view = with_steps(model, getattr(task, 'drawn', [ode.steps for ode in odes]))  # which failed
    found: list[str] = []

    def watch(where: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            if not found and not torch.isfinite(out).all():
                found.append(where)
        return hook
    hooks: list[Any] = []
    step: Any
    for ode in find_ode_blocks(view):
        for i, step in enumerate(ode.solver):
            where = f'step {i + 1} of {ode.steps}, from t = {step.t:g} to {step.t + step.h:g}'
            hooks.append((step, 'after', watch(where)))
    with evaluating(view), hooked(*hooks), autocast(images.device, dtype):
        view(images)
    return f'The field diverges: the state is not finite after {found[0]}. ' if found else ''


_lock, _fits = threading.Lock(), 0  # in progress, in all threads
_newtonschulz: Any = None  # timm's own, during these


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """Make timm's Muon multiply in float32 on a CPU: most CPUs emulate bfloat16, which is 30 times slower."""
    global _fits, _newtonschulz
    with _lock:
        if _fits == 0:
            _newtonschulz = muon.zeropower_via_newtonschulz
            muon.zeropower_via_newtonschulz = _in_float32
        _fits += 1
    try:
        yield
    finally:
        with _lock:
            _fits -= 1
            if _fits == 0:
                muon.zeropower_via_newtonschulz = _newtonschulz


def _in_float32(G: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _newtonschulz(G, *args, **({'dtype': torch.float32, **kwargs} if G.device.type == 'cpu' else kwargs))


class NormWatch:
    """The largest spectral norm of each weight of the blocks within an epoch, from one power iteration per update.

    Args:
        model: The model in training.
        alarm: Norm above which to warn, once for each weight; None watches nothing.
    """

    def __init__(self, model: nn.Module, alarm: float | None) -> None:
        self.alarm = alarm
        self.norms = None if alarm is None else SpectralNorms(model)
        self.largest: dict[str, float] = {}
        self.warned: set = set()

    def update(self, epoch: int) -> None:
        """Look at the weights after an update; the first look takes more iterations, to come near the norms."""
        if self.norms is None or self.alarm is None:
            return
        for name, value in self.norms.update(1 if self.norms.vectors else 50).items():
            self.largest[name] = max(value, self.largest.get(name, 0.))
            if value > self.alarm and name not in self.warned:
                self.warned.add(name)
                warnings.warn(f'Epoch {epoch + 1}: the spectral norm of {name} is {value:.3g}, above norm_alarm='
                              f'{self.alarm:g}.', RuntimeWarning, stacklevel=2)

    def take(self) -> dict[str, float]:
        """The largest norms since the last call, as entries of an epoch's record."""
        found = {f'norm of {name}': value for name, value in self.largest.items()}
        self.largest = {}
        return found


@contextmanager
def scalars(folder: Path | None) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yields a function that adds the record of an epoch to `folder/tensorboard`, if TensorBoard is installed."""
    writer: Any = None

    def add(record: dict[str, float]) -> None:
        nonlocal writer
        if folder is None or find_spec('tensorboard') is None:
            return
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(folder / 'tensorboard')  # type: ignore[no-untyped-call]
        for name, value in record.items():
            if name != 'epoch':
                writer.add_scalar(name.replace(' of ', '/'), value, record['epoch'])
        writer.flush()
    try:
        yield add
    finally:
        if writer is not None:
            writer.close()
