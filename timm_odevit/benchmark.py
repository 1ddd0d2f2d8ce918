"""Speed and memory, each figure measured beside what it is compared with, in one run."""
import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence

import timm
import torch
from torch import Tensor, nn

from .config import OdeConfig
from .convert import convert_, count_parameters

__all__ = ['Timing', 'benchmark', 'peak_memory']


@dataclass(frozen=True)
class Timing:
    """One line of the benchmark.

    Attributes:
        name: What was run.
        seconds: Median time of a call.
        ratio: Median over the rounds of its time over that of the line it is compared with; 1 for that line.
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

    The candidates take turns in every round, so that a change of the machine's speed falls on all of them.

    Args:
        model: timm name of the base.
        img_size: Image size in pixels.
        batch_size: Images per call.
        steps: Solver steps, and calls of the bare loop.
        rounds: Rounds, after two to warm up.
        device: Device.

    Returns:
        One Timing per candidate.
    """
    base: Any = timm.create_model(model, img_size=img_size, device=torch.device(device)).eval()
    native, ranked, lipschitz = copy.deepcopy(base), copy.deepcopy(base), copy.deepcopy(base)
    convert_(native, OdeConfig(steps=steps, T=steps), keep_original=False)
    convert_(ranked, OdeConfig(steps=steps, T=steps, time='low_rank', rank=8), keep_original=False)
    convert_(lipschitz, OdeConfig(field='lipschitz', method='euler', steps=steps, T=steps), keep_original=False)
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
        f'ODE-ViT, lipschitz, euler, {steps} steps': (lambda: lipschitz(images), lipschitz, forward),
    }
    times: Dict[str, List[float]] = {name: [] for name in candidates}
    for i in range(rounds + 2):
        for name, (call, _, _) in candidates.items():
            seconds = _time(call, device)
            if i >= 2:
                times[name].append(seconds)
    return [
        Timing(name, statistics.median(times[name]),
               statistics.median(a / b for a, b in zip(times[name], times[against], strict=True)),
               against, count_parameters(module))
        for name, (_, module, against) in candidates.items()]


@torch.inference_mode()
def peak_memory(model: nn.Module, images: Tensor, steps: Sequence[int]) -> Dict[int, int]:
    """Largest amount of memory that a forward pass has allocated at a time, beyond the parameters, per step count.

    Args:
        model: An ODE-ViT.
        images: Images [B, C, H, W].
        steps: Step counts.

    Returns:
        Bytes for each step count; the model's own step count is put back.
    """
    blocks: Any = model.blocks
    peaks: Dict[int, int] = {}
    for count in steps:
        with blocks.at(count):
            model(images)
            if images.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(images)
                peaks[count] = torch.cuda.max_memory_allocated() - before
            else:
                with torch.profiler.profile(profile_memory=True) as profile:
                    model(images)
                now = peak = 0
                for event in profile.profiler.kineto_results.events():
                    if event.name() == '[memory]':
                        now += event.nbytes()
                        peak = max(peak, now)
                peaks[count] = peak
    return peaks


def _time(call: Callable[[], Tensor], device: str) -> float:
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    return time.perf_counter() - start
