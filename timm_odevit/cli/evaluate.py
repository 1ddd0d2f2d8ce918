"""odevit evaluate, halt and benchmark"""
import argparse
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
from ..ode.config import HALTING
from ..training.loaders import label_names
from ..training.recipe import Recipe
from ..training.resume import RECIPE
from .arguments import (
    DATA,
    IMAGES,
    MODEL,
    TOWERS,
    add_number,
    add_quiet,
    add_steps,
    add_workers,
    check_file,
    check_name,
    images_of,
    load,
    refuse_existing,
    save,
    set_steps,
    step_counts,
)

DTYPES = ('float32', 'bfloat16', 'float16')


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('data', help=DATA)
    parser.add_argument('--steps', type=step_counts, metavar='K-K,K,...',
                        help='step counts, such as 1-6,12,24 (default: as saved)')
    parser.add_argument('--teacher', metavar='MODEL', help='model to compare with: ' + MODEL)
    parser.add_argument('--amp', choices=[name for name in AMP_DTYPES if name], help='mixed precision')
    parser.add_argument('--embedding', action='store_true', help=(
        "evaluate embeddings instead of classes: cosine with the teacher's and nearest images and, if there are "
        'training images (train/, x_train or what --held-out leaves), k-NN and a linear classifier; always on for a '
        'model without classes'))
    parser.add_argument('--json', type=Path, metavar='FILE', help='file to write the results to')
    _add_images(parser, 'if the data has no val/, evaluate only on the share that training held out (default: of a '
                        'folder, val/, else test/, else all images; of an .npz, x_test)')


def evaluate(args: argparse.Namespace) -> None:
    """Measure accuracy at several step counts. To compare speeds, use odevit benchmark."""
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


def _labelled(args: argparse.Namespace, model: Any, loader: Any) -> Any:
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


def add_halt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('data', help=DATA)
    parser.add_argument('out', help='folder to save the model to; must be new')
    parser.add_argument('--rule', choices=HALTING, default='entropy', help=(
        'score by which an image stops (default: %(default)s)'))
    parser.add_argument('--max-drop', type=float, metavar='SHARE', default=0.005,
                        help='largest loss of accuracy, as a share of all images (default: %(default)s)')
    add_steps(parser)
    _add_images(parser, 'share that training held out, if the data has no val/ (default: 0.1)')


def halt(args: argparse.Namespace) -> None:
    """Choose when an image may stop before the last step, and save the model with this setting."""
    refuse_existing(args.out, 'remove it')
    model = load(args.model, args)
    set_steps(model, args.steps, args.model)
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


def _add_images(parser: argparse.ArgumentParser, held_out: str) -> None:
    parser.add_argument('--held-out', type=float, metavar='SHARE', help=held_out)
    parser.add_argument('--seed', type=int, metavar='N', help='the seed of the training, for --held-out (default: 0)')
    add_number(parser, '--batch-size', 'images per batch', default=64)
    add_workers(parser)
    add_quiet(parser)


def _images(
        args: argparse.Namespace, model: Any, held_out: float | None, any_classes: bool = False) -> tuple[Any, str]:
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


def add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('models', nargs='+', metavar='MODEL', help=f'{MODEL}; the others are compared with the first')
    parser.add_argument('--batch-size', type=step_counts, metavar='N,N,...', default=(1, 8),
                        help='images per call (default: 1,8)')
    parser.add_argument('--steps', type=step_counts, metavar='K-K,K,...', default=(),
                        help='also time with these step counts (default: only as saved)')
    parser.add_argument('--compile', choices=MODES, nargs='?', const=MODES[0], metavar='MODE',
                        help=f"also time each model compiled by torch.compile, in one of its modes: {', '.join(MODES)}")
    parser.add_argument('--dtype', choices=DTYPES, default=DTYPES[0], metavar='DTYPE',
                        help=f"{', '.join(DTYPES)} (default: %(default)s)")
    add_number(parser, '--img-size', "image size in pixels (default: the model's)")
    add_number(parser, '--rounds', 'rounds in which all take turns', default=10)
    parser.add_argument('--data', help=f'{IMAGES} (default: noise)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the measurements to this file')
    add_quiet(parser)


def benchmark(args: argparse.Namespace) -> None:
    """Time models, and measure their memory and size, side by side in one run."""
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    if len({*args.models}) < len(args.models):
        raise ValueError('A model is named twice. Give each one once.')
    check_file(args.json)
    models = {name: _model(name, args) for name in args.models}
    if args.steps and not any(find_ode_blocks(model) for model in models.values()):
        raise ValueError('--steps needs an ODE-ViT, and none of these models is one. Leave it out.')
    found = measure_speed(
        models, batch_sizes=args.batch_size, steps=args.steps,
        rounds=args.rounds, compiled=args.compile, images=partial(_some_images, args.data) if args.data else None,
        progress=not args.quiet)
    print(found)
    if args.json is not None:
        write_text(args.json, to_json(found.to_dict()))


def _model(name: str, args: argparse.Namespace) -> nn.Module:
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
