"""shrink: from a model and images to a small model, with a verdict on whether it is worth it, in a folder."""
import json
import math
import re
import shutil
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
from ..data.batches import Mapped, hash_of
from ..data.preprocessing import model_name
from ..distributed import alone_in
from ..files import OWN, to_json, write_text
from ..hooks import random_states_kept
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import OdeConfig
from ..quantization import ENOUGH
from ..saving.save import copy_model
from ..settings import number
from ..training.config import BEST, HISTORY, LAST, MINUTES, RECIPE, RUN, START
from ..training.fit import check_same, check_unused
from ..training.loop import score_of
from ..training.matching import can_drop_patches
from ..training.recipe import Recipe
from ..training.run import train
from ..training.stages import read_run
from .candidates import Candidate, candidates, measure
from .material import BATCH, SHARE, Material, converted, plain_student, prepare, suitable_settings
from .verdict import Verdict

EXPORTS, FILES = 5, 12  # that are measured, and 4 bits
PART = 0.2  # of the minutes to measure, at most
LEAST, MARGIN = 1., 1.3  # times the minutes needed: fewer are refused; asked for


def shrink(
        model: nn.Module, images: str | Path | Tensor | tuple[Tensor, Tensor], out: str | Path, *,
        size: int | float | str | None = None, keep: float | str | None = None, minutes: float | None = None,
        test: str | Path | Tensor | tuple[Tensor, Tensor] | None = None, embedding: bool = False, resume: bool = False,
        command: dict[str, Any] | None = None, progress: bool = True,
) -> Verdict:
    """Make a small student of a model, and say whether it is worth it.

    The student is converted, trained for up to 45 % of the minutes, and compared with the original, also with fewer
    tokens, and with a plain student of equal size that is trained for as long. All are written to files that run
    without this package (ONNX with all tokens: also in int8 and in 4 bits), and measured on images that no training
    used: their accuracy or, without labels, the agreement with the model, or the cosine of the embeddings.

    `out` will hold student/best/ and plain/best/, in timm's format, each the best so far from the first validation on;
    files/, the candidates that no other beats in everything; verdict.json; and verdict.html, if plotly is installed.

    Args:
        model: Model that `convert_` accepts, with weights, on the device to train on; it is left as it is.
        images: A folder, an .npz, images [N, C, H, W], normalised for the model, or a pair of such and labels [N].
        size: Size of the student, as for `choose_size`; None for a quarter of the blocks.
        keep: Share of the original's accuracy to keep, such as 0.95 or '95%', instead of a size: a quarter of the
            minutes goes into finding the smallest student that keeps it. None for no search, and 0.95 in the verdict.
        minutes: Minutes to spend, in all if a run is continued; None for 60, or those that it was begun with.
        test: Other images to judge by, in the same forms; None for those of test/ or x_test or, without these, half of
            the images held out.
        embedding: Treat the model's outputs as embeddings, not logits.
        resume: Continue the run in the folder. With more minutes, both trainings go on from where the learning rate was
            still constant; of all their states, the best counts.
        command: What `odevit shrink --resume` is to find in run.json.

    Raises TypeError or ValueError if the model cannot be converted, or a setting, the images or the folder are invalid;
    FloatingPointError if the loss stopped being finite; OSError if a file could not be written.

    Examples:
        >>> verdict = shrink(vit, 'photos', 'small', minutes=60)
        >>> print(verdict)
    """
    folder, say = Path(out), print if progress else lambda *_: None
    minutes = None if minutes is None else MINUTES('minutes', minutes)
    if size is not None and keep is not None:
        raise ValueError('Give a size, or the share to keep, not both.')
    if keep is not None:
        keep = float(number(1., open='()')('keep', parse_size(keep) if isinstance(keep, str) else keep))
    find_ode_blocks(model)  # refuses what is no model
    like = next(model.parameters())
    check_unused(folder / RUN, resume)
    with alone_in(folder), random_states_kept(like.device):
        for killed in [*folder.rglob(f'{OWN}measure-*')]:  # of a process that was
            shutil.rmtree(killed, ignore_errors=True)
        began = time.perf_counter()
        torch.manual_seed(0)
        material = prepare(images, model, test, embedding)
        asked = {'model sha256': hash_of(model.state_dict().values()), 'data sha256': material.data.sha256(),
                 'size': size, 'keep': keep, 'embedding': embedding}
        plan = read_run(folder)
        check_same(folder, plan or asked, asked)
        say(str(material))
        minutes = plan.get('minutes', 60.) if minutes is None else minutes
        config = OdeConfig.from_args(plan['ode'], 'shrink') if plan else suitable_settings(
            material, size, keep, minutes, progress)
        torch.manual_seed(0)  # whatever a search has drawn
        done = converted(material, config)
        student = done.model
        plain = plain_student(material.model, material.built, count_parameters(student), material.base)
        plan = plan or {
            **asked, 'ode': config.to_args(), 'command': command, **_minutes(material, folder, minutes, began)}
        longest = min(SHARE * (minutes - plan['prepare']), (minutes - plan['prepare'] - plan['measure']) / 2)
        more = max(1e-6, longest - sum(plan['train']))  # minutes to train each student
        if minutes < (before := plan.get('minutes', 0.)):
            raise ValueError(f"'{folder}' was given {before:g} minutes before; got {minutes:g}. Give more.")
        if minutes != before:
            plan.update(minutes=minutes, train=[*plan['train'], more])
        write_text(folder / RUN, to_json(plan))
        about = [f'{model_name(student)}: {done}', f"{minutes:g} minutes: {plan['prepare']:.2g} to prepare, "
                 f"{sum(plan['train']):.3g} to train each student, about {plan['measure']:.2g} to measure"]
        if plain is None:
            about.append('There is no plain student, since timm cannot build this model with fewer blocks.')
        say('\n'.join(about))
        students = {'student': student, **({} if plain is None else {'plain': plain})}
        trained: dict[str, nn.Module] = {}
        for name, each in students.items():
            left = len(students) - len(trained)
            say(f"{name}, {left} of {len(students)} left to train: at most "
                f"{left * sum(plan['train']) + plan['measure']:.3g} minutes left")
            trained[name] = _trained(each, material, plan['train'], folder / name, progress)
        for old in folder.glob('verdict.[hj]*'):  # of files that change now
            old.unlink()
        rows, notes = measure(candidates(material, trained['student'], trained.get('plain')), material.judging,
                              material.data.sample('train', ENOUGH)[0], folder / 'files', progress=say)
        verdict = Verdict(
            rows=tuple(rows), measure=material.judging.measure, keep=keep or 0.95, images=len(material.judging.images),
            about=(str(material), *about, *notes), outlook=_outlook(trained['student'], material, folder / 'student'),
            machine=f'{processor(like)}, {torch.get_num_threads()} threads')
        by_name = {row.name: row for row in rows}
        kept = {row.file for row, by in zip(rows, verdict.beaten, strict=True)  # none goes for its time
                if (better := by_name.get(by, row)).mb >= row.mb and better.value <= row.value}
        for path in [*(folder / 'files').iterdir()]:
            ours = re.match('(original|plain|student)[_.].*(onnx|pt2)', path.name)
            if ours and path.name not in kept:  # also those of an earlier verdict
                path.unlink()
        write_text(folder / 'verdict.json', to_json(verdict.to_dict()))
        if find_spec('plotly') is not None:
            write_text(folder / 'verdict.html', verdict.to_html(f'{model_name(model)}: is a smaller one worth it?'))
    return verdict


def _minutes(material: Material, folder: Path, minutes: float, began: float) -> dict[str, Any]:
    """Minutes to prepare and to measure, by measuring the original, and those trained so far."""
    at: list[float] = []
    with tempfile.TemporaryDirectory(prefix=f'{OWN}measure-', dir=folder) as aside:  # refuses what cannot be written
        for _ in range(2):  # the first loads what it needs
            at.clear()
            measure([Candidate('original', 'original', material.model)], material.judging, material.learned.images,
                    Path(aside), progress=lambda _: at.append(time.perf_counter()))
    at.append(time.perf_counter())  # of the export, of what follows, of its end
    prepared, measured = (at[2] - began) / 60, (EXPORTS * (at[1] - at[0]) + FILES * (at[2] - at[1])) / 60
    needed = prepared + measured / PART
    if minutes < LEAST * needed:
        raise ValueError(f'{minutes:g} minutes are too few: to prepare takes about {prepared:.2g}, and to measure '
                         f'{measured:.2g}, a fifth at most. Give at least {math.ceil(MARGIN * needed)}.')
    return {'prepare': prepared, 'measure': measured, 'train': []}


def _trained(
        student: nn.Module, material: Material, minutes: list[float], folder: Path, progress: bool,
) -> nn.Module:
    """The student in the best of its states, after one training for each entry of `minutes`, in folders 1, 2, ..."""
    images, labels, _, kind = material.choosing
    chosen = Mapped(list(zip(images.split(BATCH), labels.split(BATCH), strict=True)))
    data = replace(material.data, val=chosen, labelled=kind != 'cosine', why='')
    changes = ['loss.embedding=true'] if kind == 'cosine' else []
    if not can_drop_patches(student, material.model):
        changes.append('stages.0.loss.patch_drop=0')
    recipe = Recipe.load('shrink', changes)
    for i, of in enumerate(minutes, 1):
        if progress:
            done = (folder / str(i) / BEST / RECIPE).exists()
            print(f"{folder.name}: {'was trained' if done else 'training'} for {of:.3g} minutes")
        last = folder / str(i - 1) / 'stage0' / LAST  # before the learning rate fell
        if last.exists():
            student.load_state_dict(torch.load(last, map_location='cpu', weights_only=True)['model'])
        train(recipe, data, folder / str(i), teacher=material.model, student=student, minutes=of, resume=True,
              progress=progress, on_epoch=lambda _: _save_best(folder))
        _save_best(folder)  # the start, if there was nothing to learn
    return timm.create_model(f'local-dir:{folder / BEST}', pretrained=True).to(next(student.parameters())).eval()


def _save_best(folder: Path) -> None:
    states = [(score_of(read_run(run).get('plan', {}).get('start')), run / START) for run in folder.glob('[0-9]*')]
    for file in sorted(folder.glob(f'*/stage*/{HISTORY}'), key=lambda file: (int(file.parts[-3]), file)):
        states.append((max(map(score_of, json.loads(file.read_text()))), file.parent / BEST))
    copy_model(max(reversed(states), key=lambda state: state[0])[1], folder / BEST)  # the last of equal ones


def _outlook(student: nn.Module, material: Material, folder: Path) -> tuple[str, ...]:
    """What more minutes or images would change, as far as the training tells."""
    last = max(folder.glob(f'*/{HISTORY}'), key=lambda file: int(file.parent.name))
    records, cosine = json.loads(last.read_text()), material.judging.measure == 'cosine'
    if not records:
        return 'The student computes what the original does, so there was nothing to learn.',
    stage = sorted({record['stage'] for record in records})[-2:][0]  # the last that has a constant learning rate
    key, scale = ('val_cosine', 100.) if cosine else ('val_top1', 1.)
    values = [scale * record[key] for record in records if record['stage'] == stage]
    said, half = ['There was too little time to tell whether more would help.'], len(values) // 2
    if half >= 2:
        gained = max(values[half:]) - max(values[:half])
        least = max(1., 30 / len(material.choosing.images) ** 0.5)  # 1.7 deviations of a plateau's gain
        said = [f'In the second half of its training at a constant learning rate, the student gained {gained:.1f} '
                f"points: more minutes would {'help' if gained > least else 'change little'}."]
    if not cosine:
        known, others = (
            held._replace(labels=held.outputs.argmax(dim=-1), measure='agreement').value_of(student)
            for held in (material.learned, material.judging))
        more = known - others - 5.
        half = 1.96 * (sum(p * (100. - p) for p in (known, others)) / len(material.judging.images)) ** 0.5
        said.append(f'It gives the class of the original for {known:.1f} % of images that it learned from and for '
                    f'{others:.1f} % of others: more images '
                    f"{'may help' if abs(more) < half else 'would help' if more > 0 else 'would change little'}.")
    return tuple(said)
