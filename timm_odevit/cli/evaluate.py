"""odevit evaluate, halt and benchmark"""
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models import parse_model_name
from torch import Tensor, nn

from ..benchmark import MODES
from ..benchmark import benchmark as measure_speed
from ..data.arrays import array_loaders
from ..data.folders import folder_loader, folder_parts
from ..data.preprocessing import data_config, warn_of_other_classes
from ..evaluation.accuracy import AMP_DTYPES
from ..evaluation.accuracy import evaluate as measure_accuracy
from ..evaluation.embeddings import evaluate_embeddings
from ..evaluation.halting import calibrate_halting
from ..evaluation.results import Evaluation
from ..files import to_json, write_text
from ..ode.blocks import find_ode_blocks
from ..training.loaders import label_names
from ..training.recipe import Recipe
from ..training.resume import RECIPE
from .convert import images_of
from .models import TOWERS, check_file, check_name, load, refuse_existing, save, set_steps


def evaluate(args: Any) -> None:
    """Measure accuracy at several step counts. To compare speeds, use odevit benchmark.

    model
    data
    --steps K-K,K,...  step counts, such as 1-6,12,24 (default: as saved)
    --teacher MODEL  model to compare with: MODEL
    --amp {bfloat16,float16}  mixed precision
    --embedding  evaluate embeddings instead of classes: cosine with the teacher's and nearest images and, if there are
        training images (train/, x_train or what --held-out leaves), k-NN and a linear classifier; always on for a model
        without classes
    --json FILE  file to write the results to
    --held-out SHARE  if the data has no val/, evaluate only on the share that training held out (default: of a folder,
        val/, else test/, else all images; of an .npz, x_test)
    --seed
    --batch-size
    --workers
    --quiet
    """
    check_file(args.json)
    model = load(args.model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    blocks = find_ode_blocks(model)
    sizes = [' x '.join(map(str, data_config(each)['input_size'])) for each in (model, teacher or model)]
    if sizes[0] != sizes[1]:
        raise ValueError(f'The teacher takes images of {sizes[1]}, the model of {sizes[0]}. Give a teacher with the '
                         'same input size.')
    if args.seed is not None and args.held_out is None:
        raise ValueError('--seed chooses the images of --held-out. Give both, or leave --seed out.')
    loader, data = _images(args, model, args.held_out, args.embedding)
    for each in () if args.embedding else (model, *([] if teacher is None else [teacher])):
        warn_of_other_classes(each, label_names(loader), args.data)
    recipe = _recipe(model)
    options: Any = dict(
        steps=args.steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp], progress=not args.quiet, data=data,
        trained_at=recipe.trained_at(blocks[0].steps) if recipe is not None and len(blocks) == 1 else ())
    if args.embedding or not model.num_classes:
        found: Evaluation[Any] = evaluate_embeddings(model, loader, labelled=_labelled(args, model, loader), **options)
    else:
        found = measure_accuracy(model, loader, **options)
    print(found)
    if args.json:
        found.to_json(args.json)


def _labelled(args: Any, model: Any, loader: Any) -> Any:
    """The training images of data with several classes, if it has any besides those of a loader, as they are."""
    if not Path(args.data).is_file():
        parts = folder_parts(args.data)
        if 'train' not in parts and (parts or args.held_out is None):
            return None
        found = folder_loader(args.data, model, batch_size=args.batch_size, held_out=args.held_out, any_classes=True,
                              seed=args.seed or 0, workers=args.workers, training=True)
        if label_names(found) != label_names(loader):
            raise ValueError(f"'{args.data}' has other classes to train on than to evaluate on, so k-NN and probe "
                             f"cannot be measured. To leave them out, give '{(parts.get('val') or parts['test'])}'.")
        return found if len(label_names(found) or ()) > 1 else None
    train = array_loaders(args.data, model, batch_size=args.batch_size, held_out=args.held_out or 0.1,
                          any_classes=True)[0]
    train.train = False
    return train if len(train.labels.unique()) > 1 else None


def _recipe(model: Any) -> Recipe | None:
    """The recipe that lies beside a model's weights, if any."""
    file = Path(str((getattr(model, 'pretrained_cfg', None) or {}).get('file') or ''))
    path = (file if file.is_dir() else file.parent) / RECIPE
    try:
        return Recipe.load(path) if path.is_file() else None
    except ValueError:  # of another version
        return None


def halt(args: Any) -> None:
    """Choose when an image may stop before the last step, and save the model with this setting.

    model
    data
    out
    --rule RULE [entropy]  score by which an image stops
    --max-drop SHARE [0.005]  largest loss of accuracy, as a share of all images
    --steps
    --held-out SHARE  share that training held out, if the data has no val/ (default: 0.1)
    --seed
    --batch-size
    --workers
    --quiet
    """
    refuse_existing(args.out)
    model = load(args.model, args)
    set_steps(model, args)
    has_val = Path(args.data).is_dir() and 'val' in folder_parts(args.data)
    share = 0.1 if args.held_out is None and not has_val else args.held_out
    held_out, _ = _images(args, model, share)  # not the test images
    warn_of_other_classes(model, label_names(held_out), args.data)
    found = calibrate_halting(
        model, held_out, rule=args.rule, max_drop=args.max_drop, progress=not args.quiet)
    print(found)
    if found.nfe == found.full_nfe:
        raise ValueError(f'With --max-drop {args.max_drop:g}, no image can stop before the last step, so nothing was '
                         'saved. Raise --max-drop, use another --rule, or train a student with exits: odevit distill '
                         'early_exit')
    found.apply_(model)
    save(model, args.out)


def _images(
        args: Any, model: Any, held_out: float | None, any_classes: bool = False) -> tuple[Any, str]:
    """Labelled images, and what they are in words: the share held out of training, else val/, test/, x_test or all."""
    share = '' if held_out is None else f'the share {held_out:g} held out of training of '
    if Path(args.data).is_file():
        for option in ('workers', 'seed'):
            if getattr(args, option) is not None:
                raise ValueError(f'--{option} applies to folders of images; an .npz is read at once, and its last '
                                 'images are the ones held out. Leave it out.')
        _, val, test = array_loaders(
            args.data, model, batch_size=args.batch_size, held_out=0.1 if held_out is None else held_out,
            any_classes=any_classes)
        return (val, f'{share}x_train of {args.data}') if share else (test, f'x_test of {args.data}')
    parts = folder_parts(args.data)
    if 'val' in parts:
        share = ''  # training validated on val/, and held nothing else out
    images = folder_loader(args.data, model, batch_size=args.batch_size, held_out=held_out, seed=args.seed or 0,
                           any_classes=any_classes, workers=args.workers)
    used = parts.get('train') if share else parts.get('val') or parts.get('test')
    return images, f'{share}{used or args.data}'


def benchmark(args: Any) -> None:
    """Time models, and measure their memory and size, side by side in one run.

    model...  MODEL; the others are compared with the first
    --batch-size N,N,... [1,8]  images per call
    --steps K-K,K,...  also time with these step counts (default: only as saved)
    --compile MODE?  also time each model compiled by torch.compile, in one of its modes, such as max-autotune
    --dtype {float32,bfloat16,float16} [float32]  of weights and images
    --img-size
    --rounds N [10]  rounds in which all take turns
    --data DATA  IMAGES (default: noise)
    --json FILE  also write the measurements to this file
    --quiet
    """
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    if len({*args.model}) < len(args.model):
        raise ValueError('A model is named twice. Give each one once.')
    check_file(args.json)
    models = {name: _model(name, args) for name in args.model}
    if args.steps and not any(find_ode_blocks(model) for model in models.values()):
        raise ValueError('--steps needs an ODE-ViT, and none of these models is one. Leave it out.')
    found = measure_speed(
        models, batch_sizes=args.batch_size, steps=args.steps or (),
        rounds=args.rounds, compiled=MODES[0] if args.compile == '' else args.compile, images=partial(_some_images, args.data) if args.data else None,
        progress=not args.quiet)
    print(found)
    if args.json is not None:
        write_text(Path(args.json), to_json(found.to_dict()))


def _model(name: str, args: Any) -> nn.Module:
    """A model by name; the weights of a name without a source or tag do not matter."""
    check_name(name)
    with_weights = name.startswith(TOWERS) or parse_model_name(name)[0] is not None or '.' in name
    return load(name, args, pretrained=with_weights).to(getattr(torch, args.dtype)).eval()


def _some_images(path: str, model: nn.Module, count: int) -> Tensor:
    """The first images of a folder or an .npz, again from the start if there are too few."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    for images, _ in images_of(path, model, batch_size=count)[1]:
        if len(images):
            return images[torch.arange(count) % len(images)].to(like)
    raise ValueError(f"No image of '{path}' can be read.")
