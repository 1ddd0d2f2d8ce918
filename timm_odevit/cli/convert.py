"""odevit convert, calibrate, export and push"""
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from timm_odevit import (
    CalibrationConfig,
    OdeConfig,
    calibrate_,
    choose_size,
    convert_,
    evaluate,
    evaluate_embeddings,
    export_model,
    push_to_hub,
)

from ..data.config import DataConfig
from ..data.read import read_data
from ..export import FORMATS
from ..files import write_text
from ..saving.cards import model_card
from ..saving.save import CARD
from .models import load, refuse_existing, save, set_steps

HELD_OUT = 512  # images to measure agreement on
_SIZE = ('time', 'rank', 'phases', 'boundaries', 'init')  # what a size determines


def convert(args: Any) -> None:
    """Convert a pretrained model and save it.

    model
    out  folder to save to
    --checkpoint --img-size
    --random  do not load weights
    --num-classes N0  number of classes; if the weights have another number, the head is random
    --size SIZE  size of the result, such as 3M parameters, 25% or 10MB; chooses time, rank, phases, boundaries, init
    --images IMAGES  IMAGES; for --init svd_data, which --size uses if they are given
    --seed N0 [0]  seed of the choice of images
    --force  write into a folder that is not empty
    --quiet
    +ode.config.OdeConfig  the ODE
    """
    if not args.force:
        refuse_existing(args.out, '--force')
    settings = {name: value for name, value in vars(args).items() if name in OdeConfig.names()}
    both = [name for name in _SIZE if name in settings and args.size is not None]
    if both:
        raise ValueError(f"--size chooses {', '.join(_SIZE)}. Leave out --{both[0]} or --size.")
    if args.random and args.checkpoint is not None:
        raise ValueError('--random loads no weights, and --checkpoint does. Leave one of them out.')
    config = OdeConfig(**settings)
    classes = {} if args.num_classes is None else {'num_classes': args.num_classes}
    model = load(args.model, args, pretrained=not args.random, **classes)
    if args.size is not None:
        config = choose_size(model, args.size, config, init='svd_data' if args.images else 'svd')
    images = None
    if args.images:
        torch.manual_seed(args.seed)
        images = read_data(args.images, model, labels=False).sample('train', 64, args.seed)[0].to(args.device)
    print(convert_(model, config, images=images, keep_original=False))
    known = model.pretrained_cfg['num_classes']
    if not args.random and model.num_classes and known != model.num_classes:
        print(f'  head        new and random, for {model.num_classes} classes: the weights have {known}')
    save(model, args.out)


def calibrate(args: Any) -> None:
    """Fit a converted model to its teacher, on images without labels.

    student  'local-dir:FOLDER' of a converted model
    images
    out  folder to save to; must be new
    --teacher MODEL!  MODEL
    --checkpoint --img-size --workers --quiet
    +training.config.CalibrationConfig  the calibration
    """
    config = CalibrationConfig(**{k: v for k, v in vars(args).items() if k in CalibrationConfig.names()})
    refuse_existing(args.out)
    student, teacher = load(args.student, SimpleNamespace(device=args.device)), load(args.teacher, args)
    data = read_data(args.images, student, DataConfig(batch_size=config.batch_size, workers=args.workers), labels=False,
                     seed=config.seed)
    held_out = data.sample('val', HELD_OUT)
    measure, score = (evaluate, 'agreement') if student.num_classes else (evaluate_embeddings, 'neighbours')
    before: Any = measure(student, held_out, teacher=teacher).results[-1]
    calibrate_(student, teacher, data, progress=not args.quiet, config=config)
    after: Any = measure(student, held_out, teacher=teacher).results[-1]
    what = 'agreement with' if student.num_classes else 'same nearest image as'
    print(f'{what} the teacher on {after.images} images held out: {getattr(before, score):.1f} % before, '
          f'{getattr(after, score):.1f} % after')
    save(student, args.out)


def export(args: Any) -> None:
    """Write a model to a file that runs without this package.

    model
    --format {onnx,pt2,aoti} [onnx]  onnx, for ONNX Runtime and others; pt2, for torch.export.load; or aoti, compiled
        for this kind of processor
    -o,--out FILE  file to write: .onnx, or .pt2 for the others (default: the model's name)
    --int8  store the weights of linear layers as int8 (only onnx)
    --merged  merge a block that depends on time into one per step, as is done for pt2 and aoti
    --unmerged  do not, as is done for onnx: a smaller file, which is slower in the other formats
    --steps --img-size
    --overwrite  replace an existing file
    """
    if args.merged and args.unmerged:
        raise ValueError('--merged and --unmerged are opposites. Leave one of them out.')
    model = load(args.model, args)
    set_steps(model, args)
    out = args.out or Path(args.model.split(':')[-1]).resolve().name + FORMATS[args.format].suffix
    path = export_model(model, out, format=args.format, int8=args.int8, overwrite=args.overwrite,
                        merged=args.merged if args.merged or args.unmerged else None)
    print(f'wrote {path}: {path.stat().st_size / 1e6:.2f} MB')


def push(args: Any) -> None:
    """Send a saved model to the Hugging Face Hub, with a card.

    model  'local-dir:FOLDER' of a saved model
    repo  repository, 'org/name'; created if it does not exist
    --results FILE  results from odevit evaluate --json, for the card
    --dataset NAME  name of the dataset of the results, such as CIFAR-100
    --license ID  the Hub's identifier of a licence, for the card (default: that of the base's weights)
    --card FILE  write the card to a file, and send nothing; as README.md in the folder of the model, it is sent as it
        is
    --private  make the repository, if it is new, private
    --revision BRANCH [main]  branch
    --create-pr  open a pull request
    """
    try:
        rows = json.loads(Path(args.results).read_text()) if args.results else []
    except (OSError, ValueError) as e:
        raise ValueError(f"'{args.results}' does not hold results ({e}). Make them: odevit evaluate {args.model} DATA "
                         f'--json {args.results}') from None
    folder = Path(args.model.removeprefix('local-dir:'))
    has_card = args.model.startswith('local-dir:') and (folder / CARD).is_file()
    as_it_is = has_card and not (args.card or args.results or args.dataset or args.license)
    model: Any = folder if as_it_is else load(args.model, args)
    about: Any = dict(results=rows, dataset=args.dataset or '', license=args.license)
    if args.card:
        write_text(Path(args.card), model_card(f'hf-hub:{args.repo}', model, **about))
        print(f'wrote {args.card}; nothing was sent')
        return
    url = push_to_hub(model, args.repo, private=args.private or None, revision=args.revision, create_pr=args.create_pr,
                      **about)
    print(f'sent: {url}')
