"""odevit convert | calibrate | distill | ablate | evaluate | push | benchmark."""
import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Dict, List, Optional, Tuple, Union

import timm
import torch
from safetensors import SafetensorError
from timm.data import resolve_input_data_config
from timm.models import load_state_dict, parse_model_name
from timm.utils import init_distributed_device
from torch import nn

from ._version import __version__
from .ablate import TABLE, ablate, load_recipes
from .benchmark import benchmark, benchmark_training, peak_memory
from .blocks import find_ode_blocks
from .config import FIELDS, TIMES, OdeConfig
from .convert import convert_
from .data import folder_loader, image_loader
from .distill import calibrate_
from .distill.engine import BEST
from .evaluate import AMP_DTYPES, evaluate
from .files import OWN, repair
from .hub import push_to_hub, save_pretrained
from .methods import METHODS
from .recipe import Recipe, builtin_recipes
from .settings import suggest
from .sizing import choose_size
from .sources import CONFIG, one_line
from .train import train

__all__ = ['main']

_MODEL = "timm name, such as deit_tiny_patch16_224, or 'local-dir:FOLDER' of a saved model"
_DATA = 'folder with one sub-folder of images per class, or with train/ and val/ of that kind'


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for a mistake in the input, 130 when interrupted."""
    args = _parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        _check_device(args.device)
        args.run(args)
    except (ValueError, TypeError, OSError, FloatingPointError) as e:
        print(f'odevit: error: {one_line(e)}', file=sys.stderr)
        return 2
    except RuntimeError as e:
        if 'consecutive samples' not in str(e):  # how timm says that it cannot read images
            raise
        print(f'odevit: error: The images cannot be read: {one_line(e)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('odevit: interrupted', file=sys.stderr)
        return 130
    return 0


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as e:  # RuntimeError, AssertionError, ... by backend
        raise ValueError(f"--device '{device}' cannot be used here: {one_line(e)} Give another, such as cpu.") from e


def _convert(args: argparse.Namespace) -> None:
    _refuse_existing(args.out, args.force)
    options = {k: v for k, v in (('num_classes', args.num_classes), ('img_size', args.img_size)) if v is not None}
    model: Any = _load(args.model, args, checkpoint=args.checkpoint, pretrained=not args.random, **options)
    if find_ode_blocks(model):
        raise ValueError(f"'{args.model}' is a converted model already. Convert the model that it was made from.")
    if min(getattr(getattr(model, 'patch_embed', None), 'grid_size', None) or (1,)) < 1:
        raise ValueError(f'--img-size {args.img_size} is less than one patch of this model.')
    settings: Dict[str, Any] = dict(
        field=args.field, method=args.method, steps=args.steps, T=args.T, blocks=args.blocks, init=args.init,
        time=args.time, rank=args.rank, phases=args.phases, boundaries=args.boundaries)
    if args.target_params is not None:
        chosen = ('time', 'rank', 'phases', 'boundaries', 'init')
        given = [name for name in chosen if settings[name] is not None]
        if given:
            raise ValueError(f"--target-params chooses {', '.join(chosen)}. Leave out --{given[0]}, or it.")
        config = OdeConfig(**{k: v for k, v in settings.items() if v is not None})
        config = choose_size(model, args.target_params, config, init='svd_data' if args.images else 'svd')
    else:
        config = OdeConfig(**{k: v for k, v in settings.items() if v is not None})
    images = None
    if args.images:
        torch.manual_seed(args.seed)
        images = next(iter(image_loader(args.images, model, workers=0)))[0].to(args.device)
    print(convert_(model, config, images=images, keep_original=False))
    classes = model.pretrained_cfg['num_classes']
    if not args.random and classes != model.num_classes:
        print(f'  head        new, with {model.num_classes} classes at random: the weights have {classes}')
    save_pretrained(model, args.out)
    print(f"  saved       {args.out}: timm.create_model('local-dir:{args.out}', pretrained=True)")


def _calibrate(args: argparse.Namespace) -> None:
    if not args.resume:
        _refuse_existing(args.out, force=False)
    student, teacher = _load(args.student, args), _load(args.teacher, args)
    loader = image_loader(args.images, student, batch_size=args.batch_size, workers=args.workers)
    calibrate_(student, teacher, loader, epochs=args.epochs, lr=args.lr, unrolled_lr=args.unrolled_lr, out=args.out,
               resume=args.resume, amp=args.amp, seed=args.seed, progress=not args.quiet)
    best = save_pretrained(student, Path(args.out) / BEST)
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")


def _distill(args: argparse.Namespace) -> None:
    for change in args.set if args.student else []:
        if change.partition('=')[0].split('.')[0].strip() in ('ode', 'model', 'model_args'):
            raise ValueError(f"'{change}' says how a student is made, and --student gives one. Leave one out.")
    recipe = Recipe.load(args.recipe, args.set)
    if args.student:
        recipe = replace(recipe, ode=None, model=None, model_args=None)
    if not args.resume:
        _refuse_existing(args.out, force=False)
    init_distributed_device(args)  # under torchrun; sets args.device, distributed and rank
    student = _load(args.student, args) if args.student else None
    teacher = _load(args.teacher, args) if args.teacher else None
    if teacher is None and student is None and recipe.model:
        _check_name(recipe.model)
    if args.checkpoint is not None:
        if recipe.model is None:
            raise ValueError('--checkpoint holds weights of the model that the recipe names. Leave it out.')
        if recipe.ode is not None:
            raise ValueError('--checkpoint is for a model that is trained as it is. To convert one: odevit convert '
                             f'MODEL OUT --checkpoint {args.checkpoint}, and then --student local-dir:OUT.')
        torch.manual_seed(recipe.seed)  # a new head is the same each time
        student = _load(recipe.model, args, checkpoint=args.checkpoint, **(recipe.model_args or {}))
    try:
        train(recipe, args.data, args.out, teacher=teacher, student=student, resume=args.resume, limit=args.limit,
              device=args.device, progress=not args.quiet)
        if args.distributed:
            torch.distributed.barrier()  # who leaves first leaves some versions of gloo waiting for ever
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()
    if args.rank > 0:
        return
    best = Path(args.out) / BEST
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
    if not Path(args.data).is_file():
        data, with_teacher = recipe.data or {}, f' --teacher {args.teacher}' if args.teacher else ''
        print('On the images that were held out:\n'
              f'  odevit evaluate local-dir:{best} {args.data}{with_teacher} --held-out {data.get("held_out", 0.1)} '
              f'--seed {recipe.seed}')


def _ablate(args: argparse.Namespace) -> None:
    recipes = load_recipes(args.recipes, args.set)
    teacher = _load(args.teacher, args) if args.teacher else None
    ablate(recipes, args.data, args.out, teacher=teacher, seeds=args.seeds, limit=args.limit, device=args.device,
           progress=not args.quiet)
    print((Path(args.out) / TABLE).read_text())


def _evaluate(args: argparse.Namespace) -> None:
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"There is no folder '{Path(args.json).parent}' to write {Path(args.json).name} to.")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"'{args.json}' is a folder. Give a file to write to.")
    model = _load(args.model, args)
    teacher = _load(args.teacher, args) if args.teacher else None
    if teacher is not None and teacher.num_classes != model.num_classes:
        raise ValueError(
            f'The teacher has {teacher.num_classes} classes, the model {model.num_classes}. Compare like with like.')
    if args.steps and not find_ode_blocks(model):
        raise ValueError(f"--steps needs an ODE-ViT; '{args.model}' is none. Run: odevit convert {args.model} OUT")
    if teacher is not None and _size(teacher) != _size(model):
        raise ValueError(
            f'The teacher takes images of {_size(teacher)}, the model of {_size(model)}. Compare like with like.')
    loader = folder_loader(
        args.data, model, batch_size=args.batch_size, workers=args.workers, held_out=args.held_out, seed=args.seed)
    found = evaluate(
        model, loader, steps=args.steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp], progress=not args.quiet)
    print(found)
    if args.json:
        found.to_json(args.json)


def _push(args: argparse.Namespace) -> None:
    rows = []
    if args.results:
        try:
            rows = json.loads(Path(args.results).read_text())
        except ValueError as e:
            raise ValueError(f"'{args.results}' is not what odevit evaluate --json writes: {e}") from None
    print(push_to_hub(
        _load(args.model, args), args.repo, results=rows, dataset=args.dataset, license=args.license,
        private=args.private or None, revision=args.revision, create_pr=args.create_pr, dry_run=args.dry_run))


def _benchmark(args: argparse.Namespace) -> None:
    _check_name(args.model)
    options: Dict[str, Any] = dict(
        img_size=args.img_size, batch_size=args.batch_size, rounds=args.rounds, device=args.device)
    print(f'batch {args.batch_size}, {args.img_size} px, {args.device}, {torch.get_num_threads()} threads, '
          f'torch {torch.__version__}, timm {timm.__version__}, median of {args.rounds} rounds')
    if args.train:
        if args.steps != 12:
            raise ValueError('--steps is for the benchmark of inference. Leave it out with --train.')
        rows, peaks = benchmark_training(args.model, **options)
        print('| training step | ms | ratio | peak memory, MB | parameters |\n| --- | --- | --- | --- | --- |')
        for row in rows:
            print(f'| {row.name} | {1000 * row.seconds:.1f} | {row.ratio:.3f} | {peaks[row.name] / 1e6:.1f} | '
                  f'{row.parameters:,} |')
        return
    print('| candidate | ms | ratio | parameters |\n| --- | --- | --- | --- |')
    for row in benchmark(args.model, steps=args.steps, **options):
        print(f'| {row.name} | {1000 * row.seconds:.2f} | {row.ratio:.3f} | {row.parameters:,} |')
    model = timm.create_model(args.model, img_size=args.img_size, device=torch.device(args.device)).eval()
    convert_(model, keep_original=False)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=args.device)
    memory = peak_memory(model, images, (1, 6, 12, 24))
    print('peak memory of a forward pass, MB: ' + ', '.join(f'{k} steps {v / 1e6:.1f}' for k, v in memory.items()))


def _load(
        name: str,
        args: argparse.Namespace,
        checkpoint: Optional[str] = None,
        pretrained: bool = True,
        **kwargs: Any,
) -> nn.Module:
    """Build a model by name, every failure as one line that says what to do."""
    _check_name(name)
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise ValueError(f"There is no checkpoint file '{checkpoint}'.")
    try:
        if checkpoint is not None:
            kwargs['pretrained_cfg_overlay'] = _overlay(name, checkpoint)
        return timm.create_model(name, pretrained=pretrained, **kwargs).to(args.device)
    except Exception as e:  # whatever a foreign file can raise, and it is the caller's file
        source = f"checkpoint '{checkpoint}'" if checkpoint else f"'{name}'"
        if isinstance(e, (SafetensorError, EOFError, UnpicklingError)) or 'PytorchStreamReader' in str(e):
            raise ValueError(
                f'The weights of {source} cannot be read, the file may be cut off: {one_line(e)}') from e
        if isinstance(e, OSError):
            file = '--checkpoint FILE or ' if 'checkpoint' in args else ''
            raise ValueError(f'The weights of {source} could not be loaded ({one_line(e)}). Without a network, give '
                             f'{file}local-dir:FOLDER.') from e
        raise ValueError(f'Cannot build {source}: {one_line(e)}') from e


def _overlay(name: str, checkpoint: str) -> Dict[str, Any]:
    """What tells timm to take the weights of a file, and its head where the classes are those asked for."""
    overlay: Dict[str, Any] = {'state_dict': load_state_dict(checkpoint)}
    cfg = timm.get_pretrained_cfg(name)
    head = overlay['state_dict'].get(f'{cfg.classifier}.weight') if cfg is not None else None
    if head is not None:
        overlay['num_classes'] = len(head)
    return overlay


def _size(model: Any) -> str:
    channels, height, width = resolve_input_data_config(model)['input_size']
    height, width = getattr(getattr(model, 'patch_embed', None), 'img_size', None) or (height, width)
    return f'{channels} x {height} x {width}'


def _check_name(name: str) -> None:
    if Path(name).is_dir() and not timm.is_model(name):
        raise ValueError(f"'{name}' is a folder. For a saved model, type local-dir:{name}")
    source, model = parse_model_name(name)
    if source == 'local-dir':
        repair(model)
        if not Path(model, CONFIG).is_file():
            raise ValueError(
                f"There is no saved model in '{model}': it has no {CONFIG}. Make one: odevit convert MODEL {model}")
        try:
            config = json.loads(Path(model, CONFIG).read_text())
        except ValueError as e:
            raise ValueError(f"'{Path(model, CONFIG)}' is no JSON: {one_line(e)}") from None
        if not isinstance(config, dict) or not isinstance(config.get('architecture'), str):
            raise ValueError(f"'{Path(model, CONFIG)}' names no architecture. Write it with save_pretrained.")
    elif source is None and not timm.is_model(name.split('.')[0]):
        raise ValueError(f"Unknown model '{name}'. {suggest(name, timm.list_models())}See timm.list_models().")


def _refuse_existing(out: str, force: bool) -> None:
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ValueError(f"'{out}' is a file. Give a folder to write to.")
    if path.is_dir() and any(not p.name.startswith(OWN) for p in path.iterdir()) and not force:
        raise ValueError(
            f"'{out}' is not empty. Give another folder, or --force (convert) or --resume (calibrate, distill).")


def _steps(text: str) -> List[int]:
    try:
        counts = [int(part) for part in text.split(',')]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of step counts, such as 1,2,4,12")
    return counts


def _whole_numbers(text: str) -> Optional[Tuple[int, ...]]:
    try:
        return tuple(int(part) for part in text.split(','))
    except ValueError:
        return None


def _boundaries(text: str) -> Union[str, Tuple[int, ...]]:
    return _whole_numbers(text) or text  # OdeConfig says what is allowed


def _run(text: str) -> Tuple[int, ...]:
    numbers = _whole_numbers(text)
    if numbers is None or len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is no first and last layer, such as 3,9")
    return numbers


def _epochs(text: str) -> Tuple[int, ...]:
    numbers = _whole_numbers(text)
    if numbers is None or len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is no pair of numbers of epochs, such as 8,2")
    return numbers


def _amount(text: str) -> Union[int, float]:
    units = {'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9, '%': 1e-2}
    try:
        value = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError:
        value = 0.
    share = '%' in text or ('.' in text and value <= 1)
    if not 0 < value < math.inf or (share and value > 1):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of parameters, such as 3M, or share, such as 25%")
    return value if share else int(value)


def _at_least(least: int):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least {least}")
        return value
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='odevit',
        description='Turn a pretrained vision transformer into one shared block that an ODE solver evaluates.',
        epilog='A whole run:\n'
               '  odevit distill autonomous images run --teacher deit_tiny_patch16_224\n'
               '  odevit evaluate local-dir:run/best images --teacher deit_tiny_patch16_224 --steps 1,2,4,8,12,24',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--version', action='version', version=f'odevit {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)
    show = argparse.ArgumentDefaultsHelpFormatter

    def add(name: str, run, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, formatter_class=show)
        command.set_defaults(run=run)
        command.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='torch device')
        command.add_argument('--threads', type=_at_least(1), help='CPU threads')
        return command

    command = add('convert', _convert, 'Convert a pretrained model and save it.')
    command.add_argument('model', help=_MODEL)
    command.add_argument('out', help='folder to save to')
    command.add_argument('--checkpoint', help='file with the weights of the model, instead of a download')
    command.add_argument('--random', action='store_true', help='do not load weights')
    command.add_argument('--num-classes', type=_at_least(0), help='classes; a new head where they differ')
    command.add_argument('--img-size', type=_at_least(1), help='image size in pixels')
    defaults = OdeConfig()
    command.add_argument('--field', default=defaults.field, choices=FIELDS,
                         help="the base's own layers, or the paper's block")
    command.add_argument('--method', default=defaults.method, help=f'{", ".join(METHODS)}, or an adaptive method')
    command.add_argument('--steps', type=_at_least(1), help='solver steps (default: depth of the base)')
    command.add_argument('--T', type=float, help='end time, in blocks of the base (default: its depth)')
    command.add_argument('--init', help='mean, block:<i>, spectral, svd, svd_data (default: svd with low_rank or mean)')
    command.add_argument('--time', choices=TIMES, help='how the shared block depends on t (default: autonomous)')
    command.add_argument('--rank', type=_at_least(1), help='rank of the residuals of each layer, with --time low_rank')
    command.add_argument('--phases', type=_at_least(1), help='shared blocks, on as many spans of layers (default: 1)')
    command.add_argument('--boundaries', type=_boundaries,
                         help='first layers of the spans but the first, such as 7,10; uniform; or similarity')
    command.add_argument('--blocks', type=_run, help='first and last layer to convert, such as 3,9 (default: all)')
    command.add_argument('--target-params', type=_amount,
                         help='parameters of the result, such as 3M or 25%%: chooses time, rank and phases')
    command.add_argument('--images', help='folder of images, for --boundaries similarity and --init svd_data; with '
                                          '--target-params, it chooses svd_data')
    command.add_argument('--seed', type=int, default=0, help='of the choice of images')
    command.add_argument('--force', action='store_true', help='write into a folder that is not empty')

    command = add('calibrate', _calibrate, 'Fit a converted model to its teacher, on images without labels.')
    command.add_argument('student', help="'local-dir:FOLDER' of a converted model")
    command.add_argument('images', help='folder of images')
    command.add_argument('out', help='folder for checkpoints and for the result, best/')
    command.add_argument('--teacher', required=True, help=_MODEL)
    command.add_argument('--resume', action='store_true', help='go on with the run in the folder')
    command.add_argument('--epochs', type=_epochs, default=(8, 2), help='epochs step by step, and unrolled')
    command.add_argument('--batch-size', type=_at_least(1), default=16, help='images per update')
    command.add_argument('--lr', type=float, default=3e-3, help='peak learning rate step by step')
    command.add_argument('--unrolled-lr', type=float, default=3e-4, help='peak learning rate unrolled')
    command.add_argument('--amp', choices=('bfloat16', 'float16'), help='mixed precision')
    command.add_argument('--seed', type=int, default=0, help='seed')
    command.add_argument('--workers', type=_at_least(0), default=2, help='processes that load images')
    command.add_argument('--quiet', action='store_true', help='no progress bars')

    command = add('distill', _distill, 'Train by a recipe: distil a teacher, or train from scratch or fine-tune '
                                       'without one. Runs under torchrun too.')
    command.add_argument('recipe', help=f"a .yaml file, or one of: {', '.join(builtin_recipes())}")
    command.add_argument('data', help=_DATA + '; or an .npz of small images: x_train, y_train, x_test, y_test')
    command.add_argument('out', help='folder for recipe.yaml, checkpoints, best/ and history.json')
    command.add_argument('--teacher', help=_MODEL)
    command.add_argument('--student', help="'local-dir:FOLDER' of a model to start from, instead of a new one")
    command.add_argument('--checkpoint', help="weights of the recipe's model, to fine-tune it")
    command.add_argument('--set', metavar='KEY=VALUE', action='append', default=[],
                         help='change the recipe, such as --set ode.rank=8 --set stages.0.fit.epochs=5')
    command.add_argument('--resume', action='store_true', help='go on with the run in the folder')
    command.add_argument('--limit', type=_at_least(1), help='use that many images of an .npz only, to rehearse')
    command.add_argument('--quiet', action='store_true', help='no progress bars')

    command = add('ablate', _ablate, 'Train several recipes with several seeds, and print one table.')
    command.add_argument('recipes', nargs='+', help='recipes, or lists of variants of one (such as hub/ablation.yaml)')
    command.add_argument('data', help='as of distill')
    command.add_argument('out', help='folder for the runs and table.md; what is finished there is not run again')
    command.add_argument('--teacher', help=_MODEL)
    command.add_argument('--seeds', type=_at_least(1), default=3, help='number of seeds')
    command.add_argument('--set', metavar='KEY=VALUE', action='append', default=[], help='change all recipes')
    command.add_argument('--limit', type=_at_least(1), help='use that many images of an .npz only')
    command.add_argument('--quiet', action='store_true', help='no progress bars')

    command = add('evaluate', _evaluate, 'Measure accuracy and speed over step counts.')
    command.add_argument('model', help=_MODEL)
    command.add_argument('data', help=_DATA)
    command.add_argument('--steps', type=_steps, help='step counts, such as 1,2,4,12 (default: as saved)')
    command.add_argument('--teacher', help='model to compare with: ' + _MODEL)
    command.add_argument('--batch-size', type=_at_least(1), default=64, help='images per batch')
    command.add_argument('--amp', choices=('bfloat16', 'float16'), help='mixed precision')
    command.add_argument('--held-out', type=float,
                         help='only the share that distill held out (default: val/ or test/, or the whole folder)')
    command.add_argument('--seed', type=int, default=0, help='seed of distill, for --held-out')
    command.add_argument('--json', help='file to write the results to')
    command.add_argument('--workers', type=_at_least(0), default=2, help='processes that load images')
    command.add_argument('--quiet', action='store_true', help='no progress bars')

    command = add('push', _push, 'Send a saved model to the Hugging Face Hub, with a card.')
    command.add_argument('model', help="'local-dir:FOLDER' of a saved model")
    command.add_argument('repo', help="repository, 'org/name', made if need be")
    command.add_argument('--results', help='file that odevit evaluate --json wrote, for the card')
    command.add_argument('--dataset', default='', metavar='NAME',
                         help='name of the data of the results, such as CIFAR-100')
    command.add_argument('--license', metavar='ID',
                         help="the Hub's identifier of a licence, for the card (default: that of the base's weights)")
    command.add_argument('--private', action='store_true', help='make the repository private')
    command.add_argument('--revision', default='main', help='branch')
    command.add_argument('--create-pr', action='store_true', help='open a pull request')
    command.add_argument('--dry-run', action='store_true', help='send nothing, say what would be sent')

    command = add('benchmark', _benchmark, "Time the solver's loop and ODE-ViTs beside their base, in one run.")
    command.add_argument('model', nargs='?', default='vit_tiny_patch16_224', help='timm name of the base')
    command.add_argument('--img-size', type=_at_least(1), default=224, help='image size in pixels')
    command.add_argument('--batch-size', type=_at_least(1), default=8, help='images per call')
    command.add_argument('--steps', type=_at_least(1), default=12, help='solver steps')
    command.add_argument('--rounds', type=_at_least(1), default=20, help='rounds')
    command.add_argument('--train', action='store_true', help='time training steps instead, and their peak memory')
    return parser


if __name__ == '__main__':
    sys.exit(main())
