"""shrink: from a model and images to a small model, with a verdict on whether it is worth it, in a folder."""
import copy
import json
import math
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..benchmark import peak_of, processor
from ..convert.conversion import convert_
from ..convert.refusals import check_convertible
from ..convert.sizing import choose_size, parse_size
from ..data.pictures import model_name
from ..distributed import alone_in
from ..files import to_json, write_text
from ..hooks import random_states_kept
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import DEFAULT, OdeConfig
from ..saving.save import describe
from ..settings import number
from ..training.resume import RUN, check_about, hash_of
from ..training.tasks import TrajectoryDistillationTask
from .candidates import Candidate, candidates, early_exit, measure, plain_student
from .images import SAMPLE, Images, outputs_of, read_images
from .learning import Learned, learn, smallest_size
from .page import write_page
from .verdict import Verdict, dominated

__all__ = ['shrink']

VERDICT, PAGE = 'verdict.json', 'verdict.html'
BATCH = 64
FEW = 100  # images to judge by, of which the 95 % interval of a share is ± 10 points
PART = 8  # of a batch, by which its memory is estimated
SHARE, LEAST = 0.45, 0.1  # of the minutes for each of the two students, at most and at least
MEASURED = 20  # times as long as for the original, about, for all that is measured
MANY, SEEN = 5_000, 100_000  # images, and images seen in training, from which a quarter of the parameters suits
UPDATE = 4.5  # times that a forward pass of the model takes for each image of an update


def shrink(
        model: nn.Module,
        images: str | Path | Tensor | tuple[Tensor, Tensor],
        out: str | Path,
        *,
        size: int | float | str | None = None,
        keep: float | str | None = None,
        minutes: float = 60.,
        embedding: bool = False,
        resume: bool = False,
        progress: bool = True,
) -> Verdict:
    """Make a small student of a model, and say whether it is worth it.

    The student is converted, trained for up to 45 % of the minutes, and compared with the original, with the original
    in int8 and with fewer tokens, and with a plain student of equal size that is trained for as long. All are written
    to files that run without this package, and measured on images that no training used. Where accuracy cannot be
    measured, the agreement with the model is, or the cosine of the embeddings.

    Writes to `out`: student/best/, the student in timm's format; plain/best/, the plain one; files/, those of the
    candidates that no other beats in everything; verdict.json; and verdict.html, if plotly is installed. If the call is
    interrupted, each best/ is the best so far.

    Args:
        model: Model that `convert_` accepts, with weights, on the device to train on; it is left as it is.
        images: A folder of images, with one sub-folder per class or not, with train/ and val/ or not; an .npz of small
            images (see `array_loaders`); images [N, C, H, W], normalised for the model; or a pair of such and labels.
        out: Folder for the results.
        size: Size of the student, as for `choose_size`, such as '25%', '3M' or '4MB' in the model's dtype; None for one
            that suits the images and minutes.
        keep: Share of the original's accuracy to keep, such as 0.95 or '95%', instead of a size: a quarter of the
            minutes goes into finding the smallest student that keeps it. None for no search, and 0.95 in the verdict.
        minutes: Minutes to spend.
        embedding: The model's outputs are embeddings, not logits; always so for a model without classes.
        resume: Continue what `out` holds, with the same arguments.
        progress: Say what is being done, and show progress bars.

    Returns:
        A Verdict: print it for the table and what it recommends.

    Raises:
        TypeError: The model cannot be converted.
        ValueError: A setting, the images or the folder are invalid.
        FloatingPointError: The loss stopped being finite.
        OSError: A file could not be written; or another process uses the folder.

    Examples:
        >>> verdict = shrink(vit, 'photos', 'small', minutes=60)
        >>> print(verdict)
        >>> student = timm.create_model('local-dir:small/student/best', pretrained=True)
    """
    minutes, folder = number(0., open='(')('minutes', minutes), Path(out)
    if size is not None and keep is not None:
        raise ValueError('Give a size, or the share to keep, not both.')
    if isinstance(size, str):
        parse_size(size)  # fail now
    if isinstance(keep, str):
        with suppress(ValueError):
            keep = parse_size(keep)
    share = number(0., 1., open='()')('keep', 0.95 if keep is None else keep)
    base = _base(model)
    describe(model)  # fail now rather than after the training
    if (folder / RUN).exists() and not resume:
        raise ValueError(f"'{folder}' holds a run. Give another folder, or resume=True (--resume) to continue it.")
    if resume and not folder.exists():
        raise ValueError(f"There is no folder '{folder}' to continue. Give that of a run, or leave out --resume.")
    say: Any = print if progress else lambda *_: None
    device = next(model.parameters()).device
    began = time.perf_counter()
    with alone_in(folder), random_states_kept(device):
        torch.manual_seed(0)
        found = read_images(images, model, BATCH, embedding)
        asked = {'model sha256': hash_of(model.state_dict().values()),
                 'data sha256': hash_of([found.choosing.images, found.judging.images]),
                 'size': size, 'keep': keep, 'minutes': minutes, 'embedding': embedding}
        check_about(folder, asked)
        say(_about_images(found))
        if (folder / RUN).exists():
            config = OdeConfig.from_args(json.loads((folder / RUN).read_text())['ode'], 'shrink')
        elif keep is not None:
            searching = time.perf_counter()
            config = smallest_size(model, found, base, share, minutes / 4, progress)
            began += time.perf_counter() - searching
        else:
            config = choose_size(
                model, _suitable(model, found, minutes) if size is None else size, base, init='svd_data')
        torch.manual_seed(0)  # whatever a search has drawn
        student, teacher = copy.deepcopy(model).requires_grad_(True), copy.deepcopy(model)  # tasks freeze it
        done = convert_(student, config, images=found.learned.images[:SAMPLE].to(device), keep_original=False)
        plain = plain_student(model, count_parameters(student))
        measuring = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            measure([Candidate('original', model)], found, Path(aside), progress=lambda *_: None)  # fail now, likewise
        now = time.perf_counter()
        prepared, measured = (now - began) / 60, MEASURED * (now - measuring) / 60
        rest = 0.75 if keep is not None else 1.  # of the minutes, after a search
        left = minutes * rest - prepared
        each = max(0., min(SHARE * left, (left - measured) / 2))
        if each < LEAST * minutes and not (folder / RUN).exists():
            raise ValueError(
                f'{minutes:g} minutes are too few: to prepare and to measure takes about {prepared + measured:.2g}. '
                f'Give at least {math.ceil((prepared + measured) / (rest - 2 * LEAST))}.')
        write_text(folder / RUN, to_json({**asked, 'ode': config.to_args()}))
        other = ('no plain student, since timm cannot build this model with fewer blocks' if plain is None else
                 f'{each:.3g} for a plain one with {len(find_ode_blocks(plain)[0])} of its blocks')
        about = [f'{model_name(model)}: {done}',
                 f'{minutes:g} minutes: {each:.3g} to train the student, {other}, and about {measured:.2g} to measure; '
                 f'about {_memory(student, teacher, found) / 1e9:.1f} GB of memory']
        say('\n'.join(about))
        learned = learn(student, teacher, found, each, folder / 'student', progress=progress)
        if plain is not None:
            plain = learn(
                plain, teacher, found, each, folder / 'plain', amps=[learned.amp], progress=progress).model
        rows, notes = measure([*candidates(model, learned.model, plain)], found, folder / 'files', progress=say)
        leaving = early_exit(learned.model, found)
        verdict = Verdict(
            rows=(*rows, *([leaving] if leaving else [])), measure=found.measure, keep=share,
            images=len(found.judging.images), about=(_about_images(found), *about, *notes),
            outlook=_outlook(learned, found), machine=f'{processor()}, {torch.get_num_threads()} threads')
        _write(verdict, folder, model_name(model))
    return verdict


def _base(model: nn.Module) -> OdeConfig:
    """The default settings, with a method that suits the model's blocks."""
    try:
        check_convertible(model)
    except ValueError:  # they cannot be split into attention and MLP
        base = replace(DEFAULT, method='euler')
        check_convertible(model, base)
        return base
    return DEFAULT


def _write(verdict: Verdict, folder: Path, name: str) -> None:
    """Write the verdict, and remove the files of candidates that another beats in everything."""
    for row, by in zip(verdict.rows, dominated(verdict.rows), strict=True):
        if by and row.file and row not in (verdict.smallest, verdict.fastest):
            (folder / 'files' / row.file).unlink(missing_ok=True)
    write_text(folder / VERDICT, to_json(verdict.to_dict()))
    if find_spec('plotly') is not None:
        write_text(folder / PAGE, write_page(verdict, f'{name}: is a smaller one worth it?'))


def _suitable(model: nn.Module, images: Images, minutes: float) -> float:
    """The share of the model's parameters that suits images and minutes: a quarter, or a half if they are few.

    From hub/lab/sizes.md: after 50,000 images, a quarter keeps 78 % and a half 91 %.
    """
    started = time.perf_counter()
    batch = images.learned.images[:BATCH]
    outputs_of(model, batch)
    outputs_of(model, batch)
    each = (time.perf_counter() - started) / 4 / len(batch)  # each call runs its first batch twice
    seen = SHARE * 60. * minutes / (UPDATE * each)
    return 0.25 if images.number >= MANY and seen >= SEEN else 0.5


def _memory(student: nn.Module, teacher: nn.Module, images: Images) -> float:
    """About how many bytes training takes: weights, gradients, states of the optimizer, and what an update computes."""
    few = images.learned.images[:PART].to(next(student.parameters()).device)
    task = TrajectoryDistillationTask(student, teacher, embedding=images.measure == 'cosine', verbose=False)
    update = peak_of(lambda: task(few, None)['loss'].backward(), few.device)
    student.zero_grad()
    weights = sum(p.nbytes for p in teacher.parameters()) + 4 * sum(p.nbytes for p in student.parameters())
    return weights + update * min(BATCH, images.number) / len(few)


def _about_images(images: Images) -> str:
    why = '' if images.measure == 'accuracy' else f'; labels are not used, because {images.why}'
    few = ' (few: small differences mean nothing)' if len(images.judging.images) < FEW else ''
    return (f'{images.number:,} images to learn from, {len(images.choosing.images):,} to choose the best state, '
            f'{len(images.judging.images):,} to judge by {images.measure}{few}{why}')


def _outlook(learned: Learned, images: Images) -> tuple[str, ...]:
    """What more minutes or images would change, as far as the training tells."""
    said = []
    constant = learned.scores.get('unrolled', [])
    if len(constant) >= 4:
        half = len(constant) // 2
        gained = max(constant[half:]) - max(constant[:half])
        said.append(f'In the second half of its training at a constant learning rate, the student gained {gained:.1f} '
                    f"points: more minutes would {'help' if gained > 1 else 'change little'}.")
    else:
        said.append('The student had time for a few updates only: more minutes would help.')
    if images.measure != 'cosine':
        known, others = (100. * float((outputs_of(learned.model, held.images).argmax(dim=-1) == held.outputs.argmax(
            dim=-1)).float().mean()) for held in (images.learned, images.judging))
        said.append(f'It gives the class of the original for {known:.1f} % of images that it learned from and for '
                    f'{others:.1f} % of others: '
                    f"more images would {'help' if known - others > 5 else 'change little'}.")
    return tuple(said)
