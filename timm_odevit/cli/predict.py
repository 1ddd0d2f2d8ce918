"""odevit predict and report"""
import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..data.pictures import class_names, open_image, some_images
from ..ode.blocks import find_ode_blocks
from ..reporting.report import write_report
from ..training.resume import BEST
from .arguments import MODEL, add_number, add_quiet, add_steps, load, refuse_existing, set_steps


def add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('images', nargs='+', metavar='image', help='image files')
    add_number(parser, '--top', 'number of classes to print', default=5)
    add_steps(parser)
    parser.add_argument('--json', action='store_true', help='print JSON')


def predict(args: argparse.Namespace) -> None:
    """Classify images."""
    model: Any = load(args.model, args).eval()
    set_steps(model, args.steps, args.model)
    if not model.num_classes:
        raise ValueError(f"'{args.model}' has no classes, so it cannot classify image files.")
    names, blocks = class_names(model), find_ode_blocks(model)
    found: list[dict[str, Any]] = []
    for file in args.images:
        pixels = open_image(file, model)
        with torch.inference_mode():
            top = model(pixels[None].to(args.device))[0].softmax(-1).topk(min(args.top, model.num_classes))
        classes = [{'label': int(i), 'name': names[i] if names else None, 'probability': round(float(p), 4)}
                   for p, i in zip(*top, strict=True)]
        evaluations = sum(int(ode.evaluations) for ode in blocks) or None
        found.append({'image': file, 'evaluations': evaluations, 'classes': classes})
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        used = f" ({entry['evaluations']} evaluations)" if entry['evaluations'] else ''
        print(f"{entry['image']}{used}")
        for one in entry['classes']:
            print(f"  {100 * one['probability']:5.1f} %  {one['name'] or 'class ' + str(one['label'])}")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('--images', metavar='DATA', required=True,
                        help='folder of images, or an .npz of small images, of which x_test is used')
    parser.add_argument('-o', '--out', metavar='FOLDER', default='report',
                        help='folder for index.html and report.json (default: %(default)s)')
    parser.add_argument('--teacher', metavar='MODEL', help='model to compare with: ' + MODEL)
    add_number(parser, '--count', 'images to show, spread evenly over the folder', default=8)
    add_steps(parser)
    parser.add_argument('--overwrite', action='store_true', help='replace an earlier report in the folder')
    add_quiet(parser)


def report(args: argparse.Namespace) -> None:
    """Write a page that shows what a model does with a few images."""
    if not args.overwrite:
        refuse_existing(args.out, '--overwrite')
    model: Any = load(args.model, args)
    set_steps(model, args.steps, args.model)
    teacher = load(args.teacher, args) if args.teacher else None
    found = some_images(args.images, model, args.count)
    title = ', beside '.join(_short(name) for name in (args.model, args.teacher) if name)
    page = write_report(model, found.images, args.out, teacher=teacher, names=found.names, classes=found.classes,
                        title=title, progress=not args.quiet)
    print(f'wrote {page}')


def _short(name: str) -> str:
    path = Path(name.split(':')[-1])
    return str(Path(path.parent.name, path.name)) if path.name == BEST else path.name  # a folder best/ is one of many
