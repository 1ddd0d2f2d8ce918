"""odevit shrink, finetune, distill, convert and calibrate"""
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import torch
from timm.utils import init_distributed_device

from timm_odevit import OdeConfig, Recipe, calibrate_, choose_size, convert_, train
from timm_odevit import shrink as run_shrink

from ..data.batches import DataConfig
from ..data.preprocessing import warn_of_other_classes
from ..data.read import classes_of, held_out_of, read_data
from ..distributed import in_first_process
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import without_classifiers
from ..training.config import BEST, RECIPE
from ..training.stages import read_run
from .models import TOWERS, load, new_folder, save, say_saved


def shrink(args: Any) -> None:
    """Make a small student of a model, and say whether it is worth it.

    [model]
    [data]  folder of images, or an .npz of small ones; labels are ignored unless they are the model's classes
    [out]  folder for the student, the files that were compared, and the verdict
    --size SIZE  of the student, such as 25%, 3M (parameters) or 4MB (default: a quarter of the blocks)
    --keep PART  instead of --size: find the smallest student that keeps this share of the accuracy, such as 95%
    --minutes M  minutes to spend, in all if a run is continued (default: 60)
    --test DATA  other images to judge by (default: test/, x_test, or half of the images held out)
    --checkpoint --img-size
    --embedding  the model's outputs are embeddings, not logits; always on for image towers
    --resume --quiet
    """
    _start(args, 'model')
    try:
        verdict = run_shrink(
            load(args.model, args), args.data, args.out, size=args.size, keep=args.keep, minutes=args.minutes,
            test=args.test, embedding=args.embedding or args.model.startswith(TOWERS), resume=args.resume,
            command=args.started, progress=not args.quiet)
    except KeyboardInterrupt:
        found = [str(best) for name in ('student', 'plain') if (best := Path(args.out, name, BEST)).exists()]
        print(f"\nThe best so far: {', '.join(found) or 'nothing yet'}.")
        raise
    print(f'\n{verdict}\nSmallest good file: {args.out}/files/{verdict.smallest.file}')


def finetune(args: Any) -> None:
    """Fine-tune a model on labelled images, to make a teacher. Also runs under torchrun.

    [model] [data] [out]
    --recipe RECIPE  a .yaml file, or the name of a recipe (default: finetune)
    --test DATA  other images, on which to measure the accuracy at the end
    --set --minutes --resume --limit --checkpoint --img-size --quiet
    """
    asked = args.recipe
    recipe = _start(args, 'model')
    if recipe is None or asked:
        recipe = Recipe.load(asked or 'finetune', args.set)
    if recipe.ode is not None or any(stage.task != 'labels' for stage in recipe.stages):
        raise ValueError('odevit finetune trains on labels alone, which this recipe does not. Use odevit distill.')
    if recipe.model not in (None, args.model, args.started['model']):
        raise ValueError(f"The first argument is the model, '{args.model}'. Leave out model={recipe.model}.")
    names, number = classes_of(args.data)
    if number < 2:
        raise ValueError(f"'{args.data}' has one class. Give images of several.")
    options = {**(recipe.model_args or {}), 'num_classes': number}
    if args.img_size is not None:
        options['img_size'] = args.img_size
    recipe = replace(recipe, model=args.started['model'], model_args={'pretrained': True, **options})
    torch.manual_seed(recipe.seed)  # for a new head
    student = load(args.model, args, **options)
    if args.test:
        cfg, student.pretrained_cfg = student.pretrained_cfg, {**student.pretrained_cfg, 'label_names': names}
        read_data(args.test, student, held_out=0.)  # fails now, not at the end
        student.pretrained_cfg = cfg
    _train(recipe, args, student)


def distill(args: Any) -> None:
    """Train by a recipe: distil a teacher or, without one, train from scratch. Also runs under torchrun.

    [recipe]  a .yaml file, or a name from odevit recipe list
    [data]  folder of images, or an .npz of small ones; labels may be missing if the recipe does not learn from them
    [out] --teacher
    --student MODEL  'local-dir:FOLDER' of a model to start from, instead of a new one
    --set --minutes --resume --limit --checkpoint --img-size --quiet
    """
    recipe = _start(args, 'recipe')
    if not args.teacher and (args.img_size or args.checkpoint):
        raise ValueError('--img-size and --checkpoint are those of the teacher. Give --teacher as well.')
    for change in args.set if args.student else ():
        if change.startswith(('ode', 'model')):
            raise ValueError(f"'{change}' says how to make a student, but --student gives one. Leave one out.")
    recipe, student = recipe or Recipe.load(args.recipe, args.set), None
    if args.student:
        recipe = replace(recipe, model=None, model_args=None)
        student = load(args.student, SimpleNamespace(device=args.device))
    teacher = load(args.teacher, args)
    if recipe.embeds:
        student, teacher = without_classifiers(student, teacher)
    _train(recipe, args, student, teacher)


def _start(args: Any, first: str) -> Recipe | None:
    """Note in `args.started` what resuming needs; join the processes.

    If only the folder of a run was given, fill in its arguments; return its recipe.
    """
    names, recipe = (first, 'data', 'out'), None
    words = [word for name in names if (word := getattr(args, name)) is not None]
    if args.resume and len(words) == 1:
        setattr(args, first, None)
        args.out = words[0]
        started = read_run(Path(args.out)).get('command') or {}
        if (command := started.get('command')) != args.command:
            known = f'. Type: odevit {command} --resume {args.out}' if command else ', or does not say how it began.'
            raise ValueError(f"'{args.out}' is not a run of odevit {args.command}{known}")
        for name, value in started.items():
            if getattr(args, name, None) in (None, False):
                setattr(args, name, value)
        recipe = Recipe.load(Path(args.out, RECIPE), args.set) if 'set' in args else None
    if any(getattr(args, name) is None for name in names):
        raise ValueError(f"Expected {' '.join(names).upper()}, or only --resume FOLDER; got {' '.join(words)}.")
    needed = ('model', 'recipe', 'data', 'teacher', 'student', 'img_size', 'checkpoint', 'limit', 'test',
              'size', 'keep', 'embedding')
    args.started = {'command': args.command, **{n: _absolute(n, getattr(args, n)) for n in needed if n in args}}
    if args.command != 'shrink':
        try:
            init_distributed_device(args)  # sets args.device, distributed and rank
        except ValueError as e:
            raise ValueError(f'{e}. Start this with torchrun, or type first: unset WORLD_SIZE SLURM_NTASKS') from e
    elif 'TORCHELASTIC_RUN_ID' in os.environ:
        raise ValueError('odevit shrink is one process. Start it without torchrun.')
    if not args.resume:
        with ExitStack() as stack:
            in_first_process(lambda: stack.enter_context(new_folder(args.out, '--resume')))
    return recipe


def _absolute(name: str, value: Any) -> Any:
    """The argument, with an absolute path."""
    if isinstance(value, str) and value.startswith('local-dir:'):
        return f"local-dir:{Path(value.removeprefix('local-dir:')).absolute()}"
    is_path = name in ('data', 'checkpoint', 'recipe', 'test') and value and Path(value).exists()
    return str(Path(value).absolute()) if is_path else value


def _train(recipe: Recipe, args: Any, student: Any, teacher: Any = None) -> None:
    try:
        history = train(
            recipe, args.data, args.out, teacher=teacher, student=student, minutes=args.minutes, resume=args.resume,
            limit=args.limit, command=args.started, device=args.device, progress=not args.quiet)
        if args.distributed:
            torch.distributed.barrier()  # some versions of gloo wait forever if a process leaves first
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()
    if args.rank > 0:
        return
    best = Path(args.out, BEST)
    say_saved(best)
    named = None if args.img_size or args.checkpoint else getattr(args, 'teacher', None)  # evaluate builds it by name
    compared = recipe.embeds or bool(history and 'val_top1' not in history[-1])  # with a teacher's outputs
    if named or not compared:
        print('To evaluate it on the images that were held out:\n'
              f"  odevit evaluate {quote(f'local-dir:{best.as_posix()}')} {quote(args.data)}"
              f"{f' --teacher {quote(named)}' if named else ''} --held-out {recipe.batches.held_out:g}"
              f"{' --embedding' * compared}")
    if getattr(args, 'test', None):
        model = load(f'local-dir:{best}', SimpleNamespace(device=args.device))
        data = read_data(args.test, model, held_out=0.)
        warn_of_other_classes(model, data.classes, args.test)
        loader, words = data.evaluated()
        print(replace(evaluate(model, loader, progress=not args.quiet), data=words))


def convert(args: Any) -> None:
    """Convert a pretrained model and save it.

    model
    out  folder to save to
    --checkpoint --img-size
    --random  do not load weights
    --size SIZE  size of the result, such as 3M (parameters), 25% or 10MB; chooses --phases and, if not given, --steps
    +ode.config.OdeConfig  the ODE
    """
    settings = {name: value for name, value in vars(args).items() if name in OdeConfig.names()}
    if args.size is not None and 'phases' in settings:
        raise ValueError('--size chooses the phases. Leave out --phases or --size.')
    if args.random and args.checkpoint:
        raise ValueError('--random and --checkpoint both say what the weights are. Give one.')
    with new_folder(args.out):
        config, model = OdeConfig(**settings), load(args.model, args, pretrained=not args.random)
        if args.size is not None:
            config = choose_size(model, args.size, config)
        print(convert_(model, config, keep_original=False))
        save(model, args.out)


def calibrate(args: Any) -> None:
    """Fit a converted model to its teacher, on images without labels.

    student  'local-dir:FOLDER' of a converted model
    images
    out  new folder to save to
    --teacher MODEL!  a timm name, or 'local-dir:FOLDER' of a saved model
    --minutes M  minutes to spend (default: 5)
    --epochs N  instead of minutes
    --batch-size N [16]  images per update
    --checkpoint --img-size --workers --quiet
    """
    with new_folder(args.out):
        student, teacher = load(args.student, SimpleNamespace(device=args.device)), load(args.teacher, args)
        config = DataConfig(batch_size=args.batch_size, workers=args.workers)
        data = read_data(args.images, student, config, labels=False, held_out=held_out_of(student) or 0.)
        calibrate_(student, teacher, data, minutes=args.minutes, epochs=args.epochs, progress=not args.quiet)
        save(student, args.out)
