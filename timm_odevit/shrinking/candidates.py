"""What is compared, as files that run without this package."""
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..benchmark import times_in_turns
from ..convert.block_kinds import find_stages
from ..convert.conversion import convert_
from ..convert.merge import merge_
from ..evaluation.accuracy import calibrate_halting
from ..export import export_model
from ..ode.blocks import count_parameters, find_ode_blocks, with_steps
from ..saving.save import describe
from ..settings import one_line
from .judge import Held, Material, margin, outputs_of, score, scores

__all__ = ['Candidate', 'Row', 'candidates', 'early_exit', 'measure', 'operations', 'plain_student']

BATCHES = (1, 32)
ROUNDS = 5
TOKENS = (0.5, 0.2)


class Candidate(NamedTuple):
    """A model to be compared, and how its file is written: as int8, and with a block per step or without."""
    kind: str  # 'original', 'plain' or 'student'
    name: str
    model: nn.Module
    int8: bool = False
    merged: bool = True

    def and_int8(self) -> list['Candidate']:
        return [self, self._replace(name=f'{self.name}, int8', int8=True)]


@dataclass(frozen=True)
class Row:
    """What was measured of a candidate."""
    kind: str  # 'original', 'plain' or 'student'
    name: str
    file: str  # its name; '' if it has none
    mb: float  # size of the file, 10^6 bytes; NaN without a file, as are the times
    value: float  # accuracy, agreement or cosine, in percent
    interval: float  # half of the 95 % interval of the value
    margin: float  # half of the 95 % interval of its difference from the first candidate's
    ms: tuple[float, ...]  # median time per image, in batches of 1 and of 32
    operations: float  # multiply-adds for an image, in 10^6


def plain_student(model: nn.Module, parameters: int) -> nn.Module | None:
    """A model of the same kind with so many of the model's blocks, evenly spaced, that it has about as many parameters.

    It has one block per layer, which an OdeBlocks holds, so that it is trained like any student. None if timm cannot
    build the model with fewer blocks.
    """
    sites = find_stages(model)
    blocks = sites[0].blocks
    outside = count_parameters(model) - sum(map(count_parameters, blocks))
    count = min(len(blocks) - 1, max(1, round((parameters - outside) / count_parameters(blocks[0]))))
    if len(sites) > 1 or count < 1:
        return None
    architecture, args, _ = describe(model)
    prefix = sites[0].prefix
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    for i, layer in enumerate(torch.linspace(0, len(blocks) - 1, count).round().int().tolist()):
        state.update({f'{prefix}{i}.{name}': tensor for name, tensor in blocks[layer].state_dict().items()})
    try:
        plain = timm.create_model(architecture, **{**args, 'depth': count})
        plain.load_state_dict(state)
    except (AssertionError, RuntimeError, TypeError, ValueError):  # depth is no keyword, or other tensors depend on it
        return None
    plain.pretrained_cfg = plain.default_cfg = dict(model.pretrained_cfg)  # type: ignore[arg-type,assignment]
    first = next(model.parameters())
    return convert_(plain.to(first.device, first.dtype), phases=count, keep_original=False).model


def _originals(model: nn.Module, *_: Any) -> Iterator[Candidate]:
    yield from Candidate('original', 'original', model).and_int8()


def _fewer_tokens(model: nn.Module, *_: Any) -> Iterator[Candidate]:
    for share in TOKENS:
        try:
            fewer = convert_(copy.deepcopy(model), phases=len(find_stages(model)[0].blocks), tokens=share,
                             keep_original=False).model
        except (TypeError, ValueError):  # windows, say
            return
        yield Candidate('original', f'original, tokens = {share:g}', fewer)


def _plain(_: nn.Module, __: nn.Module, plain: nn.Module | None) -> Iterator[Candidate]:
    if plain is not None:
        count = len(find_ode_blocks(plain)[0])
        yield from Candidate('plain', f"plain, {count} block{'s' if count > 1 else ''}", plain).and_int8()


def _students(_: nn.Module, student: nn.Module, *__: Any) -> Iterator[Candidate]:
    stages = find_ode_blocks(student)
    # with a block for each step, no other number is trained
    parts = (1, 2, 4) if all(ode.config.phases < ode.steps for ode in stages) else (1,)
    for counts in dict.fromkeys(tuple(max(1, ode.steps // part) for ode in stages) for part in parts):
        name, view = f"student, K = {'+'.join(map(str, counts))}", with_steps(student, counts)
        yield from Candidate('student', name, view, merged=False).and_int8()
        if stages[0].shared.depends_on_time:
            yield Candidate('student', f'{name}, int8, merged', view, True)


FORMS = (_originals, _fewer_tokens, _plain, _students)  # in which a model can be deployed


def candidates(model: nn.Module, student: nn.Module, plain: nn.Module | None) -> Iterator[Candidate]:
    """The model, a plain student and the student, in the forms in which each can be deployed; the model comes first."""
    for form in FORMS:
        yield from form(model, student, plain)


@torch.no_grad()
def measure(
        chosen: Sequence[Candidate], held: Held, kind: str, folder: Path, *, progress: Callable[[str], Any],
) -> tuple[list[Row], list[str]]:
    """Write each candidate to a file, and measure the files on images held out, their times in turns.

    Returns a row for each, with its difference from the first, and notes on what could not be measured.
    """
    folder.mkdir(exist_ok=True)
    like = next(chosen[0].model.parameters())
    cpu = like.device.type == 'cpu'
    onnx = cpu and like.dtype in (torch.float32, torch.float16) and all(
        map(find_spec, ('onnx', 'onnxscript', 'onnxruntime')))
    format, notes = ('onnx', []) if onnx else ('pt2', [
        'The files were written by torch.export and timed in torch, without int8.'
        + cpu * ' For ONNX Runtime, type: pip install onnx onnxruntime onnxscript'])
    files: list[tuple[Candidate, Path, Callable[[Tensor], Tensor]]] = []
    for candidate in chosen:
        if candidate.int8 and not onnx:
            continue
        progress(f'measuring {candidate.name}')
        stem = candidate.name.replace(' = ', '').replace(',', '').replace(' ', '_')
        path = folder / f'{stem}.{format}'
        try:
            export_model(candidate.model, path, format=format, int8=candidate.int8, merged=candidate.merged,
                         overwrite=True)
        except ValueError as e:
            if candidate is chosen[0]:
                raise
            notes.append(f'{candidate.name}: {one_line(e)}')
        else:
            files.append((candidate, path, _session(path) if onnx else torch.export.load(path).module()))
    progress(f'timing {len(files)} files in turns')
    times = []
    for size in BATCHES:
        batch = held.images[torch.arange(size) % len(held.images)].to(like.device)
        turns = times_in_turns([partial(run, batch) for *_, run in files], ROUNDS)
        times.append([1000. * statistics.median(seconds) / size for seconds in turns])
    rows: list[Row] = []
    first = torch.empty(0)
    for (candidate, path, run), ms in zip(files, zip(*times, strict=True), strict=True):
        outputs = [run(batch.to(like.device)).float().cpu() for batch in held.images.split(BATCHES[-1])]
        each = scores(torch.cat(outputs), held, kind)
        first = first if rows else each
        rows.append(Row(candidate.kind, candidate.name, path.name, path.stat().st_size / 1e6, *score(each, kind),
                        margin(each, first, kind), ms, operations(candidate.model, held.images[:1])))
    return rows, notes


def early_exit(student: nn.Module, material: Material) -> list[Row]:
    """The student that halts image by image, by a threshold from the images that choose; nothing if it cannot."""
    halting, judging, kind = copy.deepcopy(student), material.judging, material.measure
    if kind == 'cosine':
        return []
    try:
        calibrated = calibrate_halting(halting, material.choosing[:2])
    except (TypeError, ValueError):
        return []
    calibrated.apply_(halting)
    each, steps = scores(outputs_of(halting, judging.images), judging, kind), find_ode_blocks(student)[0].steps
    whole, twice = (operations(with_steps(student, k), judging.images[:1]) for k in (steps, 2 * steps))
    saved = 1 - calibrated.nfe / calibrated.full_nfe  # of the steps, each of which costs the same
    return [Row('student', f'student, K = {steps}, early exit', '', math.nan, *score(each, kind), 0.,
                (math.nan, math.nan), whole - saved * (twice - whole))]


@torch.no_grad()
def operations(model: nn.Module, image: Tensor) -> float:
    """Multiply-adds for one image, in 10^6, with weights that are merged in advance, and without halting."""
    model = copy.deepcopy(model).eval()
    stages = find_ode_blocks(model)
    for ode in stages:
        ode.config = replace(ode.config, halting=None)
    if any(ode.shared.depends_on_time for ode in stages):
        merge_(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
        model(image.to(next(model.parameters(), image)))
    return counter.get_total_flops() / 2e6


def _session(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    return lambda images: torch.from_numpy(session.run(None, {'images': images.numpy()})[0])
