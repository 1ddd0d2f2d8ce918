"""The optimizer and the schedule of a training, from timm."""
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from typing import Any

import torch
from timm.optim import Muon, create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from .config import FitConfig

__all__ = ['create_optimizer', 'create_schedule']


def create_optimizer(model: nn.Module, config: FitConfig) -> Any:
    """timm's optimizer; Muon multiplies in float32 on a CPU, since most CPUs emulate bfloat16, 30 times slower."""
    optimizer = create_optimizer_v2(
        model, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, layer_decay=config.layer_decay)
    if type(optimizer) is not Muon or next(model.parameters()).device.type != 'cpu':
        return optimizer
    return _muon_in_float32()(optimizer.param_groups, **optimizer.defaults)


@cache
def _muon_in_float32() -> Any:
    """timm's Muon from a copy of its module, since it takes the dtype of its products from there."""
    spec: Any = find_spec('timm.optim.muon')
    own: Any = module_from_spec(spec)
    spec.loader.exec_module(own)
    own.zeropower_via_newtonschulz = partial(own.zeropower_via_newtonschulz, dtype=torch.float32)
    return own.Muon


def create_schedule(optimizer: Any, config: FitConfig, updates: int) -> Any:
    """timm's schedule of the learning rate over epochs of so many updates; see `step_update`."""
    return create_scheduler_v2(
        optimizer, sched=config.sched, num_epochs=config.epochs or 1,
        warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]
        warmup_lr=config.min_lr, min_lr=config.min_lr, step_on_epochs=False, updates_per_epoch=updates)[0]
