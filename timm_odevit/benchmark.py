"""Speed and memory; figures that are compared are measured side by side in one run."""
import copy
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Sequence, Tuple

import timm
import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from .convert.conversion import convert_
from .convert.merge import merge_
from .data.preprocessing import data_config
from .ode.blocks import count_parameters, find_ode_blocks
from .ode.config import OdeConfig
from .training.trajectory_task import TrajectoryDistillationTask

__all__ = ['Timing', 'benchmark', 'benchmark_models', 'benchmark_training', 'peak_memory', 'peak_of']


@dataclass(frozen=True)
class Timing:
    """One line of the benchmark.

    Attributes:
        name: What was run.
        seconds: Median time of a call.
        ratio: Median over the rounds of its time divided by that of the line it is compared with; 1 for that line.
        against: Name of the line it is compared with.
        parameters: Number of parameters.
    """
    name: str
    seconds: float
    ratio: float
    against: str
    parameters: int


@torch.inference_mode()
def benchmark(
        model: str = 'vit_tiny_patch16_224',
        *,
        img_size: int = 224,
        batch_size: int = 8,
        steps: int = 12,
        rounds: int = 20,
        device: str = 'cpu',
) -> List[Timing]:
    """Time the solver's loop against a bare loop of the same block, and ODE-ViTs against their base.

    The candidates take turns in every round, so a change in the machine's speed affects all of them.

    Args:
        model: timm name of the base.
        img_size: Image size in pixels.
        batch_size: Images per call.
        steps: Solver steps, and calls of the bare loop.
        rounds: Rounds, after two warm-up rounds.
        device: Device.

    Returns:
        One Timing per candidate.
    """
    base: Any = timm.create_model(model, img_size=img_size, device=torch.device(device)).eval()
    native, ranked, lipschitz = copy.deepcopy(base), copy.deepcopy(base), copy.deepcopy(base)
    convert_(native, OdeConfig(steps=steps, T=steps), keep_original=False)
    convert_(ranked, OdeConfig(steps=steps, T=steps, time='low_rank', rank=8), keep_original=False)
    convert_(lipschitz, OdeConfig(field='lipschitz', method='euler', steps=steps, T=steps), keep_original=False)
    merged = copy.deepcopy(ranked)
    merge_(merged)
    images = torch.randn(batch_size, base.in_chans, img_size, img_size, device=device)
    count = base.patch_embed.num_patches + base.num_prefix_tokens
    tokens = torch.randn(batch_size, count, base.embed_dim, device=device)
    block = native.blocks.shared.block

    def bare() -> Tensor:
        x = tokens
        for _ in range(steps):
            x = block(x)
        return x

    loop, forward = f'bare loop of {steps} block calls', f'{model}, {len(base.blocks)} blocks'
    candidates: Dict[str, tuple] = {
        loop: (bare, block, loop),
        f'OdeBlocks, native, lie_trotter, {steps} steps': (lambda: native.blocks(tokens), native.blocks, loop),
        forward: (lambda: base(images), base, forward),
        f'ODE-ViT, native, lie_trotter, {steps} steps': (lambda: native(images), native, forward),
        f'ODE-ViT, native, lie_trotter, {steps} steps, rank 8': (lambda: ranked(images), ranked, forward),
        f'ODE-ViT, native, lie_trotter, {steps} steps, rank 8, merged': (lambda: merged(images), merged, forward),
        f'ODE-ViT, lipschitz, euler, {steps} steps': (lambda: lipschitz(images), lipschitz, forward),
    }
    return _in_turns(candidates, rounds, 2, device)


@torch.inference_mode()
def benchmark_models(
        models: Dict[str, nn.Module],
        *,
        batch_size: int = 1,
        rounds: int = 50,
        device: str = 'cpu',
) -> List[Timing]:
    """Time models as they are, and those whose block depends on time also merged, against the first one.

    Args:
        models: Models by name, each with the image size that it was made for.
        batch_size: Images per call.
        rounds: Rounds in which the models take turns, after five warm-up rounds.
        device: Device of the models.

    Returns:
        One Timing per model.
    """
    timed = {}
    for name, model in models.items():
        timed[name] = model.eval()
        if any(blocks.shared.depends_on_time and not blocks.config.adaptive for blocks in find_ode_blocks(model)):
            timed[f'{name}, merged'] = copy.deepcopy(model)
            merge_(timed[f'{name}, merged'])
    first = next(iter(timed))
    candidates: Dict[str, tuple] = {
        name: (partial(model, torch.randn(batch_size, *data_config(model)['input_size'], device=device)), model, first)
        for name, model in timed.items()}
    return _in_turns(candidates, rounds, 5, device)


@torch.inference_mode()
def peak_memory(model: nn.Module, images: Tensor, steps: Sequence[int]) -> Dict[int, int]:
    """Peak memory that a forward pass allocates, beyond the parameters, per step count.

    Args:
        model: An ODE-ViT.
        images: Images [B, C, H, W].
        steps: Step counts.

    Returns:
        Bytes for each step count; the model keeps its own step count.
    """
    blocks: Any = model.blocks
    peaks: Dict[int, int] = {}
    for count in steps:
        with blocks.at(count):
            model(images)
            peaks[count] = peak_of(partial(model, images), str(images.device))
    return peaks


def benchmark_training(
        model: str = 'vit_tiny_patch16_224',
        *,
        img_size: int = 224,
        batch_size: int = 8,
        rounds: int = 10,
        device: str = 'cpu',
) -> Tuple[List[Timing], Dict[str, int]]:
    """Time a training step of the base and distillation steps of ODE-ViTs, including the teacher's forward pass.

    Args:
        model: timm name of the base.
        img_size: Image size in pixels.
        batch_size: Images per step.
        rounds: Rounds in which the candidates take turns, after one warm-up round.
        device: Device.

    Returns:
        One Timing per candidate, against the base; and for each, the peak memory in bytes that its forward and backward
        pass allocates, beyond parameters and gradients.
    """
    base: Any = timm.create_model(model, img_size=img_size, device=torch.device(device))
    images = torch.randn(batch_size, base.in_chans, img_size, img_size, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    against = f'{model}, cross-entropy'
    configs = {'native': OdeConfig(), 'native, rank 8': OdeConfig(time='low_rank', rank=8),
               'lipschitz': OdeConfig(field='lipschitz', method='euler')}
    tasks: Dict[str, Any] = {against: ClassificationTask(
        copy.deepcopy(base), nn.CrossEntropyLoss(), device=torch.device(device), verbose=False)}
    for name, config in configs.items():
        for checkpointed in (False, True) if name == 'native' else (False,):
            student = copy.deepcopy(base)
            convert_(student, config, keep_original=False)
            student.set_grad_checkpointing(checkpointed)
            title = f"ODE-ViT, {name}, distillation{', gradient checkpointing' if checkpointed else ''}"
            tasks[title] = TrajectoryDistillationTask(student, copy.deepcopy(base), verbose=False)

    def step(task: Any) -> Tensor:
        for p in task.parameters():
            if p.grad is not None:
                p.grad.zero_()
        loss = task(images, labels)['loss']
        loss.backward()
        return loss
    candidates = {name: (partial(step, task.train()), task.get_eval_model(), against) for name, task in tasks.items()}
    timings = _in_turns(candidates, rounds, 1, device)
    return timings, {name: peak_of(call, device) for name, (call, _, _) in candidates.items()}


def _in_turns(candidates: Dict[str, tuple], rounds: int, warm_up: int, device: str) -> List[Timing]:
    """Time calls, which take turns in every round; each with its module and the name of what it is compared with."""
    times: Dict[str, List[float]] = {name: [] for name in candidates}
    for _ in range(warm_up + rounds):
        for name, (call, _, _) in candidates.items():
            times[name].append(_time(call, device))
    times = {name: seconds[warm_up:] for name, seconds in times.items()}
    return [
        Timing(name, statistics.median(times[name]),
               statistics.median(a / b for a, b in zip(times[name], times[against], strict=True)),
               against, count_parameters(module))
        for name, (_, module, against) in candidates.items()]


def peak_of(call: Callable[[], Any], device: str) -> int:
    """Peak memory in bytes that a call allocates; it must have run once before."""
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == '[memory]':
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _time(call: Callable[[], Tensor], device: str) -> float:
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    return time.perf_counter() - start
