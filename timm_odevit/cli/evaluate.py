"""odevit evaluate"""
import argparse
from pathlib import Path
from typing import Any, List, Optional, Tuple

from ..data.arrays import array_loaders
from ..data.folders import folder_loader, folder_parts
from ..data.preprocessing import data_config, warn_of_other_classes
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..evaluation.passes import AMP_DTYPES
from ..evaluation.results import Evaluation
from ..ode.blocks import find_ode_blocks
from ..training.loaders import label_names
from ..training.recipe import Recipe
from ..training.resume import RECIPE
from .arguments import DATA, MODEL, load, quiet, step_counts, whole_number, workers

HELP = 'Measure accuracy and speed at several step counts.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('data', help=DATA)
    parser.add_argument('--steps', type=step_counts, metavar='K,K,...',
                        help='step counts, such as 1,2,4,12 (default: as saved)')
    parser.add_argument('--teacher', metavar='MODEL', help='model to compare with: ' + MODEL)
    parser.add_argument('--batch-size', type=whole_number(1), metavar='N', default=64,
                        help='images per batch (default: %(default)s)')
    parser.add_argument('--amp', choices=[name for name in AMP_DTYPES if name], help='mixed precision')
    parser.add_argument('--held-out', type=float, metavar='SHARE',
                        help='evaluate only on the share that training held out, if the data has no val/ (default: '
                             'val/ or test/ or all images of a folder, x_test of an .npz)')
    parser.add_argument('--seed', type=int, metavar='N', help='the seed of the training, for --held-out (default: 0)')
    parser.add_argument('--embedding', action='store_true', help=(
        'compare embeddings instead of classes: cosine, nearest images, and, of an .npz, what its labelled x_train '
        'makes of them; always so for a model without classes'))
    parser.add_argument('--json', metavar='FILE', help='file to write the results to')
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"There is no folder '{Path(args.json).parent}' to write {Path(args.json).name} to.")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"'{args.json}' is a folder. Give a file to write to.")
    model = load(args.model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    if teacher is not None and teacher.num_classes != model.num_classes:
        raise ValueError(
            f'The teacher has {teacher.num_classes} classes, the model {model.num_classes}. Give a teacher with the '
            'same classes.')
    if args.steps and not find_ode_blocks(model):
        raise ValueError(
            f"--steps needs an ODE-ViT, but '{args.model}' is not one. Run: odevit convert {args.model} OUT")
    if teacher is not None and _size(teacher) != _size(model):
        raise ValueError(
            f'The teacher takes images of {_size(teacher)}, the model of {_size(model)}. Give a teacher with the same '
            'input size.')
    loader, data, names = _loader(args, model)
    for each in () if args.embedding else (model, *([] if teacher is None else [teacher])):
        warn_of_other_classes(each, names, args.data)
    blocks, recipe = find_ode_blocks(model), _recipe(model)
    options: Any = dict(
        steps=args.steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp], progress=not args.quiet, data=data,
        trained_at=recipe.trained_at(blocks[0].steps) if recipe is not None and len(blocks) == 1 else ())
    if args.embedding or not model.num_classes:
        found: Evaluation[Any] = evaluate_embeddings(model, loader, labelled=_labelled(args, model), **options)
    else:
        found = evaluate(model, loader, **options)
    print(found)
    if args.json:
        found.to_json(args.json)


def _loader(args: argparse.Namespace, model: Any) -> Tuple[Any, str, Optional[List[str]]]:
    """The images, what they are in words, and the names of their classes."""
    if args.seed is not None and args.held_out is None:
        raise ValueError('--seed chooses the images of --held-out. Give both, or leave --seed out.')
    share = '' if args.held_out is None else f'the share {args.held_out:g} held out of training of '
    if Path(args.data).is_file():
        if args.workers is not None:
            raise ValueError('--workers load images from folders, but an .npz is read at once. Leave it out.')
        if args.seed is not None:
            raise ValueError('--seed chooses images of folders; of an .npz, the last ones are held out. Leave it out.')
        _, val, test = array_loaders(
            args.data, model, batch_size=args.batch_size, held_out=_share(args), any_classes=args.embedding)
        loader, what = (val, 'x_train') if share else (test, 'x_test')
        return loader, f'{share}{what} of {args.data}', loader.label_names
    parts = folder_parts(args.data)
    if share and 'val' in parts:
        raise ValueError(f"'{args.data}' has {parts['val'].name}/, and training used that to validate, so it held "
                         'nothing else out. Leave --held-out out.')
    loader = folder_loader(args.data, model, batch_size=args.batch_size, held_out=args.held_out, seed=args.seed or 0,
                           any_classes=args.embedding, workers=2 if args.workers is None else args.workers)
    used = parts.get('train') if share else parts.get('val') or parts.get('test')
    return loader, f'{share}{used or args.data}', label_names(loader)


def _share(args: argparse.Namespace) -> float:
    return 0.1 if args.held_out is None else args.held_out  # type: ignore[no-any-return]


def _labelled(args: argparse.Namespace, model: Any) -> Any:
    """The training images, as they are, of what has any."""
    if not Path(args.data).is_file():
        return None
    train = array_loaders(
        args.data, model, batch_size=args.batch_size, held_out=_share(args), any_classes=True)[0]
    train.train = False
    return train


def _recipe(model: Any) -> Optional[Recipe]:
    """The recipe that lies beside a model's weights, if any."""
    file = Path(str((getattr(model, 'pretrained_cfg', None) or {}).get('file') or ''))
    path = (file if file.is_dir() else file.parent) / RECIPE
    try:
        return Recipe.load(path) if path.is_file() else None
    except ValueError:  # of another version
        return None


def _size(model: Any) -> str:
    return ' x '.join(str(size) for size in data_config(model)['input_size'])
