"""Time, memory and size of models, measured side by side; what `odevit benchmark` does."""
import copy
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ._version import __version__
from .data.preprocessing import data_config
from .files import markdown_table
from .ode.blocks import count_parameters, find_ode_blocks, with_steps
from .settings import integer, one_of

Images = Callable[[nn.Module, int], Tensor]
SAMPLE = 32  # images over which a time is averaged, if it depends on the images


@dataclass(frozen=True)
class Timing:
    name: str  # the model, and in which state it ran
    batch_size: int
    seconds: float  # median of a call
    iqr: float  # interquartile range of the seconds
    ratio: float  # median over rounds of its time divided by the first model's
    evaluations: float | None  # of the shared block, for an image, on average
    peak: int  # bytes that a call allocates
    parameters: int
    size: int  # bytes of the weights


@dataclass(frozen=True)
class Benchmark:
    """`print` gives a Markdown table for each batch size."""
    machine: dict[str, Any]
    timings: list[Timing]

    def __str__(self) -> str:
        tables = [', '.join(f'{key} {value}' for key, value in self.machine.items())]
        for size, timings in groupby(self.timings, key=lambda timing: timing.batch_size):
            heads = [f'batch {size}', 'evaluations', 'ms', 'ratio', 'images/s', 'activation memory, MB', 'parameters',
                     'MB']
            rows = [[t.name, '-' if t.evaluations is None else f'{t.evaluations:.3g}',
                     f'{1000 * t.seconds:.1f} ± {50 * t.iqr / t.seconds:.0f} %', f'{t.ratio:.3f}',
                     f'{size / t.seconds:.1f}', f'{t.peak / 1e6:.1f}', f'{t.parameters:,}', f'{t.size / 1e6:.1f}']
                    for t in timings]
            tables.append(markdown_table([heads, *rows]))
        return '\n\n'.join(tables)


@torch.inference_mode()
def benchmark(
        models: dict[str, nn.Module], *, batch_sizes: Sequence[int] = (1, 8), steps: Sequence[int] = (),
        rounds: int = 10, compiled: str | None = None, images: Images | None = None, progress: bool = False,
) -> Benchmark:
    """Time forward passes of models in eval mode on one device, which take turns, so that a busy machine slows all.

    An ODE-ViT is also timed with other `steps`, if it has a single stage; and each model in the mode `compiled` of
    torch.compile. `images` gives images [N, C, H, W] for a model and a number N; without it, they are random.
    """
    integer(1)('rounds', rounds)
    one_of(('default', 'reduce-overhead', 'max-autotune'), none='not compiled')('compiled', compiled)
    candidates: dict[str, nn.Module] = {}
    for name, model in models.items():
        candidates[name], blocks = model, find_ode_blocks(model)
        if images is None and any(ode.config.halting for ode in blocks):
            raise ValueError(f"'{name}' halts image by image, so its time depends on the images. Pass images (--data).")
        if len(blocks) == 1 and not blocks[0].config.adaptive:
            candidates.update({
                f'{name}, K = {count}': with_steps(model, count) for count in steps if count != blocks[0].steps})
        if compiled is not None:
            candidates[f'{name}, compiled'] = torch.compile(  # type: ignore[assignment]
                copy.deepcopy(model), mode=compiled)
    parameter = next(next(iter(models.values())).parameters())
    machine = {
        'device': processor(parameter), 'threads': torch.get_num_threads(),
        'dtype': str(parameter.dtype).removeprefix('torch.'),
        'torch': torch.__version__, 'timm': timm.__version__, 'timm-odevit': __version__, 'rounds': rounds}
    timings: list[Timing] = []
    for size in dict.fromkeys(batch_sizes):
        batches: list[Sequence[Tensor]] = [
            [torch.randn(size, *data_config(model)['input_size']).to(next(model.parameters()))]
            if images is None else images(model, max(size, SAMPLE // size * size)).split(size)
            for model in candidates.values()]
        runs = [lambda model=model, of=of: [model(batch) for batch in of]
                for model, of in zip(candidates.values(), batches, strict=True)]
        times = times_in_turns(runs, rounds, progress, index=parameter.device.index)
        for (name, model), of, seconds in zip(candidates.items(), batches, times, strict=True):
            low, median, high = (np.percentile(seconds, (25, 50, 75)) / len(of)).tolist()
            evaluations = 0.
            for batch in of:
                model(batch)
                evaluations += sum(ode.evaluations for ode in find_ode_blocks(model))
            timings.append(Timing(
                name, size, median, high - low, float(np.median(seconds / times[0])), evaluations / len(of) or None,
                peak_of(partial(model, of[-1]), of[-1].device), count_parameters(model),
                sum(weight.nbytes for weight in model.state_dict().values())))
    return Benchmark(machine, timings)


def times_in_turns(
        runs: Sequence[Callable[[], Any]], rounds: int, progress: bool = False, within: float = 0., index: Any = None,
) -> np.ndarray:
    """Seconds of a call of each function in each round [functions, rounds]: the mean of two after a warm-up.

    They take turns, up to `rounds` or until their ratios to the first are known to `within`. On one thread of a CPU,
    the seconds are those of the processor, in which other programs count little.
    """
    from torch.utils.benchmark import Timer  # the import looks for CUDA
    alone = torch.get_num_threads() == 1 and os.name != 'nt' and not torch.accelerator.is_available()
    more: dict[str, Any] = {'timer': time.process_time} if alone else {}
    timers = [Timer('run()', globals={'run': run}, num_threads=torch.get_num_threads(), **more) for run in runs]
    turns: list[list[float]] = []
    for _ in tqdm(range(rounds), unit='round', leave=False, disable=not progress):
        with torch.accelerator.device_index(index):  # Timer waits for it alone
            turns.append([timer.timeit(2).median for timer in timers])
        if len(turns) > 4 and half_intervals(np.array(turns).T).max() < within:
            break
    return np.array(turns).T


def half_intervals(times: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of each function's time as a share of the first one's, relative to it [functions]."""
    logs = np.log(times / times[0])
    n = logs.shape[1]
    return (1.96 + 3 / (n - 1)) * logs.std(axis=1, ddof=1) / n ** 0.5  # nearly Student's t


def peak_of(call: Callable[[], Any], device: str | torch.device) -> int:
    """Bytes that a call allocates; it must have run once before."""
    if torch.device(device).type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return max(accumulate((event.nbytes() for event in events if event.name() == '[memory]'), initial=0))


def processor(like: Tensor | None = None) -> str:
    if like is not None and like.is_cuda:
        return torch.cuda.get_device_name(like.device)
    path = Path('/proc/cpuinfo')
    name = re.search(r'(?m)^model name\s*: (.+)', path.read_text()) if path.exists() else None
    return name[1].strip() if name else platform.processor() or platform.machine()
