"""What is compared: models at several step counts, merged, compiled; training steps."""
import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from ..convert.conversion import convert_
from ..convert.merge import merge_
from ..data.preprocessing import data_config
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.config import OdeConfig
from ..ode.blocks import OdeBlocks as Halts
from ..training.tasks import StepwiseTask, TrajectoryDistillationTask
from .products import products_of
from .timing import Call, Setting

__all__ = ['Candidate', 'Images', 'conversions', 'evaluations_of', 'forward_passes', 'noise', 'training_steps']

Images = Callable[[nn.Module, int], Tensor]
DIAL = (0.25, 0.5, 2.)  # of a model's own step count
SAMPLE = 32  # images over which a time is averaged, if it depends on the images
CONVERSIONS = {
    'ODE-ViT': OdeConfig(),
    'ODE-ViT, rank 8': OdeConfig(time='low_rank', rank=8),
    'ODE-ViT, lipschitz': OdeConfig(field='lipschitz', method='euler'),
}


@dataclass(frozen=True)
class Candidate:
    """One call to be timed.

    Attributes:
        name: What is run.
        against: Name of the candidate that it is compared with.
        model: The model that runs.
        prepare: Makes the calls for a batch size, over whose times the mean is taken: one, or one per batch of images.
        setting: A context in which the call runs.
        part_of: Name of the candidate whose passes these calls are a part of, and whose evaluations they have.
    """
    name: str
    against: str
    model: nn.Module
    prepare: Callable[[int], List[Call]]
    setting: Setting = nullcontext
    part_of: str = ''


def noise(model: nn.Module, batch_size: int) -> Tensor:
    """Random images [B, C, H, W] that a model takes, in its dtype and on its device."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    return torch.randn(batch_size, *data_config(model)['input_size'], dtype=like.dtype, device=like.device)


def conversions(base: nn.Module) -> Dict[str, nn.Module]:
    """ODE-ViTs converted from a model: autonomous, with residuals per layer, and with the paper's block."""
    made: Dict[str, nn.Module] = {}
    for name, config in CONVERSIONS.items():
        made[name] = copy.deepcopy(base)
        convert_(made[name], config, keep_original=False)
    return made


def forward_passes(
        models: Dict[str, nn.Module],
        images: Optional[Images],
        steps: Optional[Sequence[int]],
        compiled: Optional[str],
) -> List[Candidate]:
    """Forward passes of models, compared with the first one.

    An ODE-ViT is also run with other numbers of steps, merged if its block depends on time, and without halting if it
    halts. The products are those of the first model, and of the first ODE-ViT.

    Args:
        models: Models by name, in eval mode.
        images: The images for a model and a number; None for one batch of random ones.
        steps: Step counts; None for a quarter, half and twice those of a model whose block does not depend on time.
        compiled: Mode of torch.compile, to run the models compiled, too; None for not.
    """
    against = next(iter(models))
    found: List[Candidate] = []
    with_products = {against, *[name for name, model in models.items() if find_ode_blocks(model)][:1]}

    def add(name: str, model: nn.Module, call: Any = None, setting: Setting = nullcontext) -> None:
        run = model if call is None else call
        found.append(Candidate(
            name, against, model, lambda size: [partial(run, x) for x in batches(model, size)], setting))

    def batches(model: nn.Module, size: int) -> Sequence[Tensor]:
        return [noise(model, size)] if images is None else images(model, max(size, SAMPLE // size * size)).split(size)

    for name, model in models.items():
        add(name, model)
        if name in with_products:
            found.append(Candidate(f'{name}, products alone', against, model, lambda size, model=model: [  # type: ignore[misc]
                products_of(model, x) for x in batches(model, size)], part_of=name))
        blocks = find_ode_blocks(model)
        for count in _dial(blocks, steps):
            add(f'{name}, K = {count}', model, setting=partial(blocks[0].at, count))
        if any(ode.config.halting for ode in blocks):
            add(f'{name}, without halting', _without_halting(model))
        if any(ode.shared.depends_on_time and not ode.config.adaptive for ode in blocks):
            merged = copy.deepcopy(model)
            merge_(merged)
            add(f'{name}, merged', merged)
        if compiled is not None:
            own = copy.deepcopy(model)
            add(f'{name}, compiled', own, torch.compile(own, mode=compiled))
    return found


def training_steps(base: nn.Module, name: str) -> List[Candidate]:
    """Training steps: of a model by cross-entropy and, compared with it, of ODE-ViTs that follow it.

    Of the autonomous ODE-ViT also with gradient checkpointing, and step by step.
    """
    against, device = f'{name}, cross-entropy', next(base.parameters()).device
    found: List[Candidate] = []

    def add(title: str, task: Any) -> None:
        def prepare(batch_size: int) -> List[Call]:
            images, target = noise(base, batch_size), torch.zeros(batch_size, dtype=torch.long, device=device)
            return [partial(_step, task.train(), images, target)]
        found.append(Candidate(title, against, task.get_eval_model(), prepare))

    add(against, ClassificationTask(copy.deepcopy(base), nn.CrossEntropyLoss(), device=device, verbose=False))
    for title, student in conversions(base).items():
        add(f'{title}, distillation', TrajectoryDistillationTask(student, copy.deepcopy(base), verbose=False))
    for title, kind, way in (('distillation', TrajectoryDistillationTask, 'gradient checkpointing'),
                             ('stepwise', StepwiseTask, '')):
        own: Any = copy.deepcopy(base)
        convert_(own, keep_original=False)
        if way == 'gradient checkpointing':
            own.set_grad_checkpointing(True)
        task = kind(own, copy.deepcopy(base), verbose=False)
        add(', '.join(filter(None, ('ODE-ViT', title, way))), task)
    return found


def evaluations_of(model: nn.Module) -> Optional[float]:
    """Blocks that an image went through in this thread's last forward pass, on average; None if not known."""
    found: List[Any] = [module for module in model.modules() if isinstance(module, Halts)]
    if found:
        return sum(blocks.evaluations + len(blocks) - blocks.config.grid[0] for blocks in found)
    plain = getattr(model, 'blocks', None)
    return float(len(plain)) if isinstance(plain, (nn.Sequential, nn.ModuleList)) else None


def _dial(blocks: Sequence[OdeBlocks], steps: Optional[Sequence[int]]) -> List[int]:
    """The step counts, other than its own, with which a model is run."""
    if len(blocks) != 1 or blocks[0].config.adaptive:
        return []
    own = blocks[0].steps
    if steps is None and blocks[0].shared.depends_on_time:
        return []
    return sorted({*(steps or [max(1, round(own * share)) for share in DIAL])} - {own})


def _without_halting(model: nn.Module) -> nn.Module:
    own = copy.deepcopy(model)
    for blocks in find_ode_blocks(own):
        blocks.config = replace(blocks.config, halting=None)
    return own


def _step(task: Any, images: Tensor, target: Any) -> None:
    for p in task.parameters():
        if p.grad is not None:
            p.grad.zero_()
    task(images, target)['loss'].backward()
