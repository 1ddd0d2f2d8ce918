"""odevit calibrate"""
import argparse
from pathlib import Path

from ..data.folders import image_loader
from ..saving.save import save_pretrained
from ..training.calibrate import calibrate_
from ..training.config import CalibrationConfig
from ..training.resume import BEST
from .arguments import MODEL, add_settings, given, load, quiet, refuse_existing, workers

HELP = 'Fit a converted model to its teacher, on images without labels.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('student', help="'local-dir:FOLDER' of a converted model")
    parser.add_argument('images', help='folder of images')
    parser.add_argument('out', help='folder for checkpoints, and for the result in best/')
    parser.add_argument('--teacher', required=True, help=MODEL)
    parser.add_argument('--resume', action='store_true', help='continue the run in the folder')
    add_settings(parser, CalibrationConfig)
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    config = CalibrationConfig(**given(args, CalibrationConfig))
    if not args.resume:
        refuse_existing(args.out, '--resume')
    student, teacher = load(args.student, args), load(args.teacher, args)
    processes = 2 if args.workers is None else args.workers
    loader = image_loader(args.images, student, batch_size=config.batch_size, workers=processes)
    calibrate_(student, teacher, loader, out=args.out, resume=args.resume, progress=not args.quiet, config=config)
    best = save_pretrained(student, Path(args.out) / BEST)
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
