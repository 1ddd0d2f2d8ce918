"""What `fit` watches besides the loss: the spectral norms of the blocks' weights; and records for TensorBoard."""
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Optional

from torch import nn

from ..dynamics.spectral_norms import SpectralNorms

__all__ = ['NormWatch', 'Scalars']


class NormWatch:
    """The largest spectral norm of each weight of the blocks within an epoch, from one power iteration per update.

    Args:
        model: The model in training.
        alarm: Norm above which to warn, once for each weight; None watches nothing.
    """

    def __init__(self, model: nn.Module, alarm: Optional[float]) -> None:
        self.alarm = alarm
        self.norms = None if alarm is None else SpectralNorms(model)
        self.largest: Dict[str, float] = {}
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

    def take(self) -> Dict[str, float]:
        """The largest norms since the last call, as entries of an epoch's record."""
        found = {f'norm of {name}': value for name, value in self.largest.items()}
        self.largest = {}
        return found


class Scalars:
    """Records of epochs for TensorBoard, in the folder 'tensorboard' of a run; nothing if it is not installed."""

    def __init__(self, folder: Optional[Path]) -> None:
        self.folder = folder if find_spec('tensorboard') is not None else None
        self.writer: Any = None

    def __enter__(self) -> 'Scalars':
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, record: Dict[str, float]) -> None:
        """Add the record of an epoch."""
        if self.folder is None:
            return
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(self.folder / 'tensorboard')  # type: ignore[no-untyped-call]
        for name, value in record.items():
            if name != 'epoch':
                self.writer.add_scalar(name.replace(' of ', '/'), value, record['epoch'])
        self.writer.flush()
