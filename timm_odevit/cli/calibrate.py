"""odevit calibrate"""
import argparse
from pathlib import Path
from typing import Any

from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..saving.save import save_pretrained
from ..training.calibrate import calibrate_
from ..training.config import CalibrationConfig
from ..training.resume import BEST
from .arguments import IMAGES, MODEL, add_settings, few, given, images_of, load, quiet, refuse_existing, workers

HELP = 'Fit a converted model to its teacher, on images without labels.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('student', help="'local-dir:FOLDER' of a converted model")
    parser.add_argument('images', help=IMAGES)
    parser.add_argument('out', help='folder for the result, in best/')
    parser.add_argument('--teacher', metavar='MODEL', required=True, help=MODEL)
    add_settings(parser, CalibrationConfig)
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    config = CalibrationConfig(**given(args, CalibrationConfig))
    refuse_existing(args.out, 'empty it')
    student, teacher = load(args.student, args), load(args.teacher, args)
    loader, held = images_of(args.images, student, config.batch_size, args.workers, config.seed)
    held = few(held, config.batch_size)
    measure, of = (evaluate, 'agreement') if student.num_classes else (evaluate_embeddings, 'neighbours')
    before: Any = measure(student, held, teacher=teacher).results[-1]
    calibrate_(student, teacher, loader, progress=not args.quiet, config=config)
    after: Any = measure(student, held, teacher=teacher).results[-1]
    what = 'agreement with' if student.num_classes else 'nearest images as in'
    print(f'{what} the teacher on {after.images} images held out: {getattr(before, of):.1f} % before, '
          f'{getattr(after, of):.1f} % after')
    best = save_pretrained(student, Path(args.out) / BEST)
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
