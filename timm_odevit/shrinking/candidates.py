"""What is compared, and its measurement."""
import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..benchmark import half_intervals, times_in_turns
from ..convert.block_kinds import find_stages
from ..convert.conversion import convert_
from ..export.files import export_model, load_exported
from ..export.onnx import rewrite
from ..files import OWN, staged
from ..hooks import evaluating
from ..ode.blocks import find_ode_blocks
from ..quantization import quantize_
from ..settings import one_line
from .material import Held, Material

BATCHES = (1, 32)
ROUNDS, WITHIN = 20, 0.05  # rounds at most, and how well ratios of times are known
TOKENS = (0.5, 0.2)


class Candidate(NamedTuple):
    kind: str  # 'original', 'plain' or 'student'
    name: str
    model: nn.Module
    int8: bool = False  # whether linear layers compute in it
    bits: int | None = None  # of the matrices in its file

    def and_smaller(self) -> list['Candidate']:
        return [self, self._replace(name=f'{self.name}, int8', int8=True),
                self._replace(name=f'{self.name}, 4 bits', int8=True, bits=4)]


@dataclass(frozen=True)
class Row:
    """What was measured of a candidate.

    Attributes:
        kind: 'original', 'plain' or 'student'.
        file: Its name.
        mb: Its size, 10^6 bytes.
        value: Accuracy, agreement or cosine, in percent.
        interval: How far its 95 % interval reaches.
        margin: That of its difference from the first candidate's.
        ms: Median time per image, in batches of 1 and of 32; of the processor, if one thread runs.
        ms_off: That of their ratios to the first candidate's, in percent.
        operations: Multiply-adds for an image, in 10^6.
        neighbours: Nearest images that are the original's, in percent.
    """
    kind: str
    name: str
    file: str
    mb: float
    value: float
    interval: float
    margin: float
    ms: tuple[float, ...]
    ms_off: tuple[float, ...]
    operations: float
    neighbours: float = math.nan


def candidates(material: Material, student: nn.Module, plain: nn.Module | None) -> Iterator[Candidate]:
    """The forms in which a model can be used, each a row of the verdict; the model itself comes first."""
    yield from Candidate('original', 'original', material.model).and_smaller()
    for share in TOKENS:
        try:
            fewer = convert_(copy.deepcopy(material.model), phases=len(find_stages(material.model)[0].blocks),
                             tokens=share, keep_original=False).model
        except (TypeError, ValueError):  # windows, say
            break
        yield Candidate('original', f'original, tokens = {share:g}', fewer)
    if plain is not None:
        count = len(find_ode_blocks(plain)[0])
        yield from Candidate('plain', f"plain, {count} block{'s' * (count > 1)}", plain).and_smaller()
    steps = '+'.join(str(ode.steps) for ode in find_ode_blocks(student))  # no other number was trained
    yield from Candidate('student', f'student, K = {steps}', student).and_smaller()


def _files(
        chosen: Iterable[Candidate], learned: Tensor, folder: Path, progress: Callable[[str], Any],
) -> tuple[list[Any], list[str]]:
    """Write each candidate to a file, those of the same model from one export; and notes on what could not be."""
    folder.mkdir(exist_ok=True)
    files: list[Any] = []
    notes, exported = list[str](), dict[int, Path | None]()
    with tempfile.TemporaryDirectory(prefix=f'{OWN}measure-', dir=folder) as aside:
        for candidate in chosen:
            like = next(candidate.model.parameters())
            onnx = like.device.type == 'cpu' and like.dtype == torch.float32 and all(
                map(find_spec, ('onnx', 'onnxscript', 'onnxruntime')))
            if candidate.int8 and not onnx:
                continue
            progress(f'measuring {candidate.name}')
            key, suffix = id(candidate.model), '.onnx' if onnx else '.pt2'
            if key not in exported:
                try:
                    exported[key] = export_model(candidate.model, Path(aside, f'{key}{suffix}'))
                except ValueError as e:
                    if not files:
                        raise
                    exported[key] = None
                    notes.append(f'{candidate.name}: {one_line(e)}')
            if not (whole := exported[key]):
                continue
            path = folder / (candidate.name.replace(' = ', '').replace(',', '').replace(' ', '_') + suffix)
            if candidate.int8:
                if small := copy.deepcopy(candidate.model) if candidate.bits else None:
                    quantize_(small, learned)
                rewrite(whole, path, candidate.model, small)
            else:
                with staged(folder, path.name) as new:
                    shutil.copyfile(whole, new / path.name)
            files.append((candidate, path, load_exported(path)[0]))
    if not onnx:
        notes.insert(0, 'The files were written by torch.export and timed in torch, without int8. For ONNX Runtime, on '
                     'a CPU, type: pip install onnx onnxruntime onnxscript')
    return files, notes


@torch.no_grad()
def measure(
        chosen: Iterable[Candidate], held: Held, learned: Tensor, folder: Path, *, progress: Callable[[str], Any],
) -> tuple[list[Row], list[str]]:
    """Write each candidate to a file, and measure the files on images held out, their times in turns.

    Returns a row for each, and notes on what could not be measured.
    """
    files, notes = _files(chosen, learned, folder, progress)
    device = next(files[0][0].model.parameters()).device
    progress('timing the files in turns')
    times, intervals = [], []
    for size in BATCHES:
        batch = held.images[torch.arange(size) % len(held.images)].to(device)
        turns = times_in_turns([partial(run, batch) for *_, run in files], ROUNDS, within=WITHIN, index=device.index)
        times.append((1000. / size * np.median(turns, axis=1)).tolist())
        intervals.append((100. * half_intervals(turns)).tolist())
    timed = zip(zip(*times, strict=True), zip(*intervals, strict=True), strict=True)
    rows: list[Row] = []
    for (candidate, file, run), (ms, off) in zip(files, timed, strict=True):
        outputs = torch.cat([run(batch.to(device)).float().cpu() for batch in held.images.split(BATCHES[-1])])
        scores = held.scores(outputs)
        if not rows:
            first = scores
        rows.append(Row(
            candidate.kind, candidate.name, file.name, file.stat().st_size / 1e6,
            100. * float(scores.mean()), held.interval(scores), held.margin(scores, first),
            ms, off, operations(candidate.model, held.images[:1]),
            held.neighbours(outputs)))
    return rows, notes


@torch.no_grad()
def operations(model: nn.Module, image: Tensor) -> float:
    """Multiply-adds for an image [1, C, H, W], in 10^6."""
    with (evaluating(model), FlopCounterMode(display=False) as counter,
          sdpa_kernel(SDPBackend.MATH)):  # whose products are counted
        model(image.to(next(model.parameters(), image)))
    return counter.get_total_flops() / 2e6
