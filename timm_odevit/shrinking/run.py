"""shrink: from a model and images to a small model, with a verdict on whether it is worth it, in a folder."""
import json
import math
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..benchmark import processor
from ..convert.planning import parse_size
from ..data.batches import Mapped
from ..data.preprocessing import model_name
from ..distributed import alone_in
from ..files import to_json, write_text
from ..hooks import random_states_kept
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import OdeConfig
from ..reporting.page import encodable
from ..saving.save import describe, save_pretrained
from ..settings import number
from ..training.config import BEST, HISTORY, RUN, START
from ..training.fit import check_unused
from ..training.loop import score_of
from ..training.recipe import Recipe
from ..training.run import train
from ..training.stages import check_about, hash_of, read_run
from .candidates import Candidate, candidates, early_exit, measure, plain_student
from .judge import BATCH, SHARE, Material, base_settings, converted, read_images, suitable_settings, value_of
from .verdict import Verdict

__all__ = ['shrink']

FEW = 100  # images to judge by, of which the 95 % interval of a share is ± 10 points
LEAST = 0.1  # of the minutes for each of the two students
MEASURED = 20  # times as long as for the original, about, for all that is measured


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

    `out` will hold student/best/ and plain/best/, in timm's format, each the best so far if the call is interrupted;
    files/, the candidates that no other beats in everything; verdict.json; and verdict.html, if plotly is installed.

    Args:
        model: Model that `convert_` accepts, with weights, on the device to train on; it is left as it is.
        images: Images in any form that `read_data` takes: a folder, an .npz, images [N, C, H, W], normalised for the
            model, or a pair of such and labels [N].
        out: Folder for the results.
        size: Size of the student, as for `choose_size`, such as '25%', '3M' or '4MB' in the model's dtype; None for one
            that suits the images and minutes.
        keep: Share of the original's accuracy to keep, such as 0.95 or '95%', instead of a size: a quarter of the
            minutes goes into finding the smallest student that keeps it. None for no search, and 0.95 in the verdict.
        minutes: Minutes to spend.
        embedding: Treat the model's outputs as embeddings, not logits.
        resume: Continue the run in the folder.
        progress: Show progress bars, and say what is done.

    Raises:
        TypeError, ValueError: The model cannot be converted; or a setting, the images or the folder are invalid.
        FloatingPointError: The loss stopped being finite.
        OSError: A file could not be written; or another process uses the folder.

    Examples:
        >>> verdict = shrink(vit, 'photos', 'small', minutes=60)
        >>> print(verdict)
        >>> student = timm.create_model('local-dir:small/student/best', pretrained=True)
    """
    minutes, folder, say = number(0., open='(')('minutes', minutes), Path(out), print if progress else lambda *_: None
    if size is not None and keep is not None:
        raise ValueError('Give a size, or the share to keep, not both.')
    if keep is not None:
        keep = float(number(0., 1., open='()')('keep', parse_size(keep) if isinstance(keep, str) else keep))
    base_settings(model)  # what cannot be converted or saved is refused before the images are read
    describe(model)
    check_unused(folder, resume, folder / RUN)
    with alone_in(folder), random_states_kept(next(model.parameters()).device):
        began = time.perf_counter()
        torch.manual_seed(0)
        material = read_images(images, model, embedding)
        asked = {'model sha256': hash_of(model.state_dict().values()), 'data sha256': material.data.sha256(),
                 'size': size, 'keep': keep, 'minutes': minutes, 'embedding': embedding}
        check_about(folder, asked)
        about = [_about_images(material)]
        say(about[0])
        plan = read_run(folder)
        if 'ode' not in plan:
            plan['ode'] = suitable_settings(material, size, keep, minutes, progress).to_args()
        torch.manual_seed(0)  # whatever a search has drawn
        student, done = converted(material, OdeConfig.from_args(plan['ode'], 'shrink'))
        plain = plain_student(model, count_parameters(student))
        if 'train' not in plan:
            plan.update(_minutes(material, folder, minutes, began))
        write_text(folder / RUN, to_json({**asked, **plan}))
        about += [f'{model_name(student)}: {done}', _about_minutes(minutes, plan, plain)]
        say('\n'.join(about[1:]))
        student, records = _trained(student, material, plan['train'], folder / 'student', progress)
        if plain is not None:
            plain, _ = _trained(plain, material, plan['train'], folder / 'plain', progress)
        rows, notes = measure([*candidates(model, student, plain)], material.judging, material.measure,
                              folder / 'files', progress=say)
        verdict = Verdict(
            rows=(*rows, *early_exit(student, material)), measure=material.measure, keep=keep or 0.95,
            images=len(material.judging.images), about=(*about, *notes), outlook=_outlook(student, material, records),
            machine=f'{processor()}, {torch.get_num_threads()} threads')
        for row, by in zip(verdict.rows, verdict.beaten, strict=True):
            if by and row.file and row not in (verdict.smallest, verdict.fastest):
                (folder / 'files' / row.file).unlink(missing_ok=True)
        write_text(folder / 'verdict.json', to_json(verdict.to_dict()))
        if find_spec('plotly') is not None:
            write_text(folder / 'verdict.html',
                       verdict.to_html(f'{model_name(student)}: is a smaller one worth it?'))
    return verdict


def _minutes(material: Material, folder: Path, minutes: float, began: float) -> dict[str, float]:
    """Minutes to train each student, and to measure, by measuring the original."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as aside:  # what cannot be written is refused here
        measure([Candidate('original', 'original', material.model)], material.judging, material.measure, Path(aside),
                progress=lambda *_: None)
    prepared, measured = ((time.perf_counter() - since) / 60 for since in (began, started))
    measured *= MEASURED
    each = max(1e-6, min(SHARE * (minutes - prepared), (minutes - prepared - measured) / 2))
    if each < LEAST * minutes:
        raise ValueError(
            f'{minutes:g} minutes are too few: to prepare and to measure takes about {prepared + measured:.2g}. '
            f'Give at least {math.ceil((prepared + measured) / (1 - 2 * LEAST))}.')
    return {'train': each, 'measure': measured}


def _trained(
        student: nn.Module, material: Material, minutes: float, folder: Path, progress: bool,
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The student in the best of its states, and the records of its training."""
    classes, (images, labels, _) = material.measure != 'cosine', material.choosing
    chosen = Mapped(list(zip(images.split(BATCH), labels.split(BATCH), strict=True)))
    recipe = Recipe.load('shrink', [] if classes else ['loss.embedding=true'])
    try:
        records = train(recipe, replace(material.data, val=chosen, labelled=classes), folder, teacher=material.model,
                        student=student, minutes=minutes, resume=True, progress=progress)
    except BaseException:
        _save_best(folder)
        raise
    best = timm.create_model(f'local-dir:{folder / BEST}', pretrained=True)
    return best.to(next(student.parameters())).eval(), records


def _save_best(folder: Path) -> None:
    """Save the best state so far of a training that was interrupted, if there is one."""
    states = [(score_of((read_run(folder).get('plan') or {}).get('start')), folder / START)]
    for file in folder.glob(f'stage*/{HISTORY}'):
        states.append((max(map(score_of, json.loads(file.read_text()))), file.parent / BEST))
    best = max(states)[1]
    if best.is_dir():
        save_pretrained(timm.create_model(f'local-dir:{best}', pretrained=True), folder / BEST)


def _about_images(material: Material) -> str:
    why = '' if material.measure == 'accuracy' else f'; labels are not used, because {encodable(material.why)}'
    few = ' (few: small differences mean nothing)' if len(material.judging.images) < FEW else ''
    return (f'{material.data.count():,} images to learn from, {len(material.choosing.images):,} to choose the best '
            f'state, {len(material.judging.images):,} to judge by {material.measure}{few}{why}')


def _about_minutes(minutes: float, plan: dict[str, Any], plain: nn.Module | None) -> str:
    other = ('no plain student, since timm cannot build this model with fewer blocks' if plain is None else
             f"{plan['train']:.3g} for a plain one with {len(find_ode_blocks(plain)[0])} of its blocks")
    return (f"{minutes:g} minutes: {plan['train']:.3g} to train the student, {other}, and about {plan['measure']:.2g} "
            'to measure')


def _outlook(student: nn.Module, material: Material, records: list[dict[str, Any]]) -> tuple[str, ...]:
    """What more minutes or images would change, as far as the training tells."""
    stages, unit = sorted({record['stage'] for record in records}), 100. if material.measure == 'cosine' else 1.
    constant = [unit * score_of(record) for record in records if record['stage'] == stages[-2:][0]]  # learning rate
    half, said = len(constant) // 2, ['The student had time for a few updates only: more minutes would help.']
    if half >= 2:
        gained = max(constant[half:]) - max(constant[:half])
        said = [f'In the second half of its training at a constant learning rate, the student gained {gained:.1f} '
                f"points: more minutes would {'help' if gained > 1 else 'change little'}."]
    if material.measure != 'cosine':
        known, others = (value_of(student, held._replace(labels=held.outputs.argmax(dim=-1)), 'agreement')
                         for held in (material.learned, material.judging))
        said.append(f'It gives the class of the original for {known:.1f} % of images that it learned from and for '
                    f'{others:.1f} % of others: '
                    f"more images would {'help' if known - others > 5 else 'change little'}.")
    return tuple(said)
