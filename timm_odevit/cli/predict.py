"""odevit predict"""
import argparse
import json
from typing import Any, Dict, List

import torch

from ..data.pictures import class_names, open_image
from ..hooks import evaluating
from ..ode.blocks import find_ode_blocks
from .arguments import MODEL, load, set_steps, whole_number

HELP = 'Classify images.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('images', nargs='+', metavar='image', help='files of images')
    parser.add_argument('--top', type=whole_number(1), metavar='N', default=5,
                        help='classes to name (default: %(default)s)')
    parser.add_argument('--steps', type=whole_number(1), metavar='N', help='number of solver steps (default: as saved)')
    parser.add_argument('--json', action='store_true', help='print JSON')


def run(args: argparse.Namespace) -> None:
    model: Any = load(args.model, args)
    set_steps(model, args.steps, args.model)
    if not model.num_classes:
        raise ValueError(f"'{args.model}' has no classes, so it cannot classify image files.")
    names = class_names(model)
    found: List[Dict[str, Any]] = []
    for file in args.images:
        pixels = open_image(file, model)
        with evaluating(model), torch.inference_mode():
            top = model(pixels[None].to(args.device))[0].softmax(-1).topk(min(args.top, model.num_classes))
        classes = [{'label': int(i), 'name': names[i] if names else None, 'probability': round(float(p), 4)}
                   for p, i in zip(*top, strict=True)]
        found.append({'image': file, 'evaluations': sum(int(b.evaluations) for b in find_ode_blocks(model)) or None,
                      'classes': classes})
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        used = f" ({entry['evaluations']} evaluations)" if entry['evaluations'] else ''
        print(f"{entry['image']}{used}")
        for one in entry['classes']:
            print(f"  {100 * one['probability']:5.1f} %  {one['name'] or 'class ' + str(one['label'])}")
