"""odevit predict and report"""
from pathlib import Path
from typing import Any

import torch

from ..data.pictures import class_names, open_image, some_images
from ..files import to_json
from ..ode.blocks import find_ode_blocks
from ..reporting.page import write_report
from ..training.resume import BEST
from .models import load, refuse_existing, set_steps


def predict(args: Any) -> None:
    """Classify images.

    model
    image...  image files
    --top N [5]  number of classes to print
    --steps
    --json  print JSON
    """
    model: Any = load(args.model, args).eval()
    set_steps(model, args)
    if not model.num_classes:
        raise ValueError(f"'{args.model}' has no classes, so it cannot classify image files.")
    names, blocks = class_names(model), find_ode_blocks(model)
    records: list[dict[str, Any]] = []
    for file in args.image:
        pixels = open_image(file, model)
        with torch.inference_mode():
            probabilities = model(pixels[None].to(args.device))[0].softmax(-1)
        if not probabilities.isfinite().all():
            raise FloatingPointError(f"The model's outputs for '{file}' are not finite, so they name no class.")
        top = probabilities.topk(min(args.top, model.num_classes))
        classes = [{'label': int(i), 'name': names[i] if names else None, 'probability': round(float(p), 4)}
                   for p, i in zip(*top, strict=True)]
        evaluations = sum(int(ode.evaluations) for ode in blocks) or None
        records.append({'image': file, 'evaluations': evaluations, 'classes': classes})
    if args.json:
        return print(to_json(records), end='')
    for record in records:
        used = f" ({record['evaluations']} evaluations)" if record['evaluations'] else ''
        print(f"{record['image']}{used}")
        for each in record['classes']:
            print(f"  {100 * each['probability']:5.1f} %  {each['name'] or 'class ' + str(each['label'])}")


def report(args: Any) -> None:
    """Write a page that shows what a model does with a few images.

    model
    --images DATA  folder of images, or an .npz of small images, of which x_test is used
    -o,--out FOLDER [report]  folder for index.html and report.json
    --teacher MODEL  model to compare with: MODEL
    --count N [8]  images to show, spread evenly over the folder
    --steps
    --overwrite  replace an earlier report in the folder
    --quiet
    """
    if not args.overwrite:
        refuse_existing(args.out, '--overwrite')
    model: Any = load(args.model, args)
    set_steps(model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    found = some_images(args.images, model, args.count)
    title = ', beside '.join(_short(name) for name in (args.model, args.teacher) if name)
    page = write_report(model, found.images, args.out, teacher=teacher, names=found.names, classes=found.classes,
                        title=title, progress=not args.quiet)
    print(f'wrote {page}')


def _short(name: str) -> str:
    path = Path(name.split(':')[-1])
    return str(Path(path.parent.name, path.name)) if path.name == BEST else path.name  # a folder best/ is one of many
