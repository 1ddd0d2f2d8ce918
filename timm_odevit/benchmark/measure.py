"""benchmark and benchmark_training: time, memory and size of models, measured side by side."""
import statistics
from functools import partial
from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.blocks import OdeBlocks as Halts
from ..settings import checks_keywords, many, one_of, whole
from .candidates import Candidate, Images, conversions, evaluations_of, forward_passes, training_steps
from .files import load_seconds, weight_bytes
from .tables import Benchmark, Timing, Weights, machine
from .timing import Call, free_memory, in_turns, peak_of

__all__ = ['MODES', 'benchmark', 'benchmark_training']

WARM_UP = 2
MODES = ('default', 'reduce-overhead', 'max-autotune')  # of torch.compile
LARGEST, SHARE = 1024, 0.8  # images of the largest batch; share of the free memory that it may fill


@checks_keywords
@torch.inference_mode()
def benchmark(
        models: Dict[str, nn.Module],
        *,
        batch_sizes: Sequence[Optional[int]] = (1, 8),
        steps: Optional[Sequence[int]] = None,
        rounds: int = 20,
        compiled: Optional[str] = None,
        images: Optional[Images] = None,
        device: str = 'cpu',
        progress: bool = False,
) -> Benchmark:
    """Time forward passes of models and of what they can be turned into, which take turns, against the first model.

    A model that is alone and no ODE-ViT is compared with ODE-ViTs converted from it. Each ODE-ViT is also run at other
    step counts, merged if its block depends on time, and without halting if it halts; of two models, the matrix
    products and the attention are also run alone, which is the least time that a forward pass can take.

    Args:
        models: Models by name, in eval mode, with the dtype in which they are to run.
        batch_sizes: Images per call; None for the largest power of two, up to 1024, that fits into memory.
        steps: Step counts; None for a quarter, half and twice those of a model whose block does not depend on time.
        rounds: Rounds, after two warm-up rounds.
        compiled: Mode of torch.compile, to run each model compiled, too; None for not.
        images: Function that gives images [N, C, H, W] for a model and a number N; None for random ones. Small batches
            are averaged over 32 images.
        device: Device of the models.
        progress: Show progress bars.

    Returns:
        A Benchmark: print it, or call its `to_dict()`.

    Raises:
        ValueError: A setting is out of range; there are no models; one halts image by image, and there are no images
            for which to time it; or one cannot be saved.
    """
    _check(batch_sizes, rounds)
    one_of(MODES, none='not compiled')('compiled', compiled)
    if not models:
        raise ValueError("There is nothing to time. Give models by name, such as {'student': student}.")
    if images is None:
        for name, model in models.items():
            if any(isinstance(module, Halts) and module.config.halting for module in model.modules()):
                raise ValueError(f"'{name}' halts image by image, so that its time depends on the images. Give images "
                                 '(--data).')
    if len(models) == 1 and not any(find_ode_blocks(model) for model in models.values()):
        models = {**models, **conversions(next(iter(models.values())))}
    weights = [Weights(name, count_parameters(model), weight_bytes(model), load_seconds(model))
               for name, model in models.items()]  # first, because not every model can be saved
    timings = _time(forward_passes(models, images, steps, compiled), batch_sizes, rounds, device, progress)
    dtype = next(next(iter(models.values())).parameters()).dtype
    return Benchmark(machine(device, dtype, rounds), timings, weights)


@checks_keywords
def benchmark_training(
        model: nn.Module,
        name: str,
        *,
        batch_sizes: Sequence[Optional[int]] = (8,),
        rounds: int = 20,
        device: str = 'cpu',
        progress: bool = False,
) -> Benchmark:
    """Time a training step of a model and distillation steps of ODE-ViTs, including the teacher's forward pass.

    Args:
        model: The model from which the ODE-ViTs are converted.
        name: Its name.
        batch_sizes: Images per step; None for the largest power of two, up to 1024, that fits into memory.
        rounds: Rounds in which the steps take turns, after two warm-up rounds.
        device: Device of the model.
        progress: Show progress bars.

    Returns:
        A Benchmark: print it, or call its `to_dict()`.

    Raises:
        ValueError: A setting is out of range.
    """
    _check(batch_sizes, rounds)
    timings = _time(training_steps(model, name), batch_sizes, rounds, device, progress)
    return Benchmark(machine(device, next(model.parameters()).dtype, rounds), timings)


def _check(batch_sizes: Sequence[Optional[int]], rounds: int) -> None:
    whole(1)('rounds', rounds)
    many(whole(1, none='the largest that fits'), 'batch sizes')('batch_sizes', batch_sizes)


def _time(
        candidates: List[Candidate], batch_sizes: Sequence[Optional[int]], rounds: int, device: str, progress: bool,
) -> List[Timing]:
    found: List[Timing] = []
    for wanted in dict.fromkeys(batch_sizes):
        size = _largest_batch(candidates, device) if wanted is None else wanted
        calls = {c.name: c.prepare(size) for c in candidates}
        times = in_turns({c.name: (partial(_all, calls[c.name]), c.setting) for c in candidates},
                         rounds, WARM_UP, device, progress)
        evaluations: Dict[str, Optional[float]] = {}
        for c in candidates:
            with c.setting():
                peak = peak_of(calls[c.name][0], device)
                evaluations[c.name] = (
                    evaluations[c.part_of] if c.part_of else _mean_evaluations(c.model, calls[c.name]))
            seconds, reference = ([each / len(calls[name]) for each in times[name]] for name in (c.name, c.against))
            low, _, high = statistics.quantiles(seconds, n=4) if rounds > 1 else 3 * seconds
            ratio = statistics.median(a / b for a, b in zip(seconds, reference, strict=True))
            found.append(Timing(
                c.name, size, statistics.median(seconds), low, high, ratio, c.against, evaluations[c.name], peak))
    return found


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _mean_evaluations(model: nn.Module, calls: Sequence[Call]) -> Optional[float]:
    found = []
    for call in calls:
        call()
        found.append(evaluations_of(model))
    return None if None in found else statistics.mean(found)  # type: ignore[type-var]


def _largest_batch(candidates: List[Candidate], device: str) -> int:
    """The largest power of two that fits: memory grows in proportion to the batch."""
    most = 1
    for c in candidates:
        call = c.prepare(2)[0]
        with c.setting():
            call()
            most = max(most, peak_of(call, device) // 2)
    size = 1
    while size < LARGEST and 2 * size * most <= SHARE * free_memory(device):
        size *= 2
    return size
