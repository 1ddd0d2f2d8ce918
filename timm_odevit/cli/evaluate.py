"""odevit evaluate, halt, benchmark, predict, report, export and push"""
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timm_odevit import Recipe, calibrate_halting, evaluate_embeddings, export_model, push_to_hub, write_report
from timm_odevit import evaluate as evaluate_classes

from ..benchmark import benchmark as measure_speed
from ..data.batches import DataConfig
from ..data.preprocessing import class_names, open_image, warn_of_other_classes
from ..data.read import Data, pictures, read_data
from ..export import FORMATS
from ..files import to_json, write_text
from ..hooks import AMP_DTYPES
from ..ode.blocks import find_ode_blocks
from ..saving.cards import model_card
from ..saving.save import CARD
from ..training.config import BEST, RECIPE
from .models import check_file, load, refuse_existing, save, set_steps


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
    --seed --batch-size --workers --quiet
    """
    check_file(args.json)
    model = load(args.model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    embedding = args.embedding or not model.num_classes
    data = _data(args, model, args.held_out, embedding)
    loader, words = data.evaluated()
    for each in (model, teacher):
        if each is not None and not embedding:
            warn_of_other_classes(each, data.classes, args.data)
    recipe, blocks = _recipe(model), find_ode_blocks(model)
    options: Any = dict(
        steps=args.steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp], progress=not args.quiet, data=words,
        trained_at=recipe.trained_at(blocks[0].steps) if recipe is not None and len(blocks) == 1 else ())
    if embedding:
        others = data.train is not None and (data.val or data.test) is not None and data.num_classes > 1
        results: Any = evaluate_embeddings(model, loader, labelled=data.plain() if others else None, **options)
    else:
        results = evaluate_classes(model, loader, **options)
    print(results)
    if args.json:
        results.to_json(args.json)


def _recipe(model: Any) -> Recipe | None:
    """The recipe that lies beside a model's weights, if any."""
    file = Path(str((getattr(model, 'pretrained_cfg', None) or {}).get('file') or ''))
    path = (file if file.is_dir() else file.parent) / RECIPE
    try:
        return Recipe.load(path) if path.is_file() else None
    except ValueError:  # of another version
        return None


def _data(args: Any, model: nn.Module, held_out: float | None, any_classes: bool = False) -> Data:
    given: Any = {} if held_out is None else {'held_out': held_out}
    config = DataConfig(batch_size=args.batch_size, workers=args.workers, **given)
    return read_data(args.data, model, config, held_out=None if given else 0., seed=args.seed or 0,
                     any_classes=any_classes)


def halt(args: Any) -> None:
    """Choose when an image may stop before the last step, and save the model with this setting.

    model
    data
    out  folder to save to; must be new
    --rule RULE [entropy]  score by which an image stops
    --max-drop SHARE [0.005]  largest loss of accuracy, as a share of all images
    --steps
    --held-out SHARE  share that training held out, if the data has no val/ (default: 0.1)
    --seed --batch-size --workers --quiet
    """
    refuse_existing(args.out)
    model = load(args.model, args)
    set_steps(model, args)
    data = _data(args, model, 0.1 if args.held_out is None else args.held_out)  # not the test images
    warn_of_other_classes(model, data.classes, args.data)
    setting = calibrate_halting(
        model, data.evaluated()[0], rule=args.rule, max_drop=args.max_drop, progress=not args.quiet)
    print(setting)
    if setting.nfe == setting.full_nfe:
        raise ValueError(f'With --max-drop {args.max_drop:g}, no image can stop before the last step, so nothing was '
                         'saved. Raise it, take another --rule, or train for exits: odevit distill early_exit')
    setting.apply_(model)
    save(model, args.out)


def benchmark(args: Any) -> None:
    """Time models, and measure their memory and size, side by side in one run.

    model...  MODEL; the others are compared with the first
    --batch-size N,N,... [1,8]  images per call
    --steps K-K,K,...  also time with these step counts (default: only as saved)
    --compile MODE?  also time each model compiled by torch.compile, in one of its modes, such as max-autotune
    --dtype {float32,bfloat16,float16} [float32]  of weights and images
    --img-size N  image size in pixels (default: the model's)
    --rounds N [10]  rounds in which all take turns
    --data DATA  IMAGES (default: noise)
    --json FILE  also write the measurements to this file
    --quiet
    """
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    check_file(args.json)
    # the weights of a name without a source or tag do not matter
    models = {name: load(name, args, pretrained=':' in name or '.' in name).to(getattr(torch, args.dtype)).eval()
              for name in args.model}
    results = measure_speed(
        models, batch_sizes=args.batch_size, steps=args.steps or (), rounds=args.rounds,
        compiled=args.compile,
        images=partial(_some_images, args.data) if args.data else None, progress=not args.quiet)
    print(results)
    if args.json:
        write_text(Path(args.json), to_json(results.to_dict()))


def _some_images(path: str, model: nn.Module, count: int) -> Tensor:
    """Images of a folder or an .npz, again from the start if there are too few."""
    images, _ = read_data(path, model, labels=False, held_out=0.).sample('train', count)
    return images[torch.arange(count) % len(images)].to(next(model.parameters()).device)


def predict(args: Any) -> None:
    """Classify images.

    model
    image...  image files
    --top N [5]  number of classes to print
    --steps
    --json  print JSON
    """
    model = load(args.model, args).eval()
    set_steps(model, args)
    if not model.num_classes:
        raise ValueError(f"'{args.model}' has no classes, so it cannot classify image files.")
    names, blocks = class_names(model), find_ode_blocks(model)
    records: list[dict[str, Any]] = []
    for file in args.image:
        with torch.inference_mode():
            probabilities = model(open_image(file, model)[None].to(args.device))[0].softmax(-1)
        if not probabilities.isfinite().all():
            raise FloatingPointError(f"The model's outputs for '{file}' are not finite, so they name no class.")
        classes = [{'label': int(i), 'name': names[i] if names else None, 'probability': round(float(p), 4)}
                   for p, i in zip(*probabilities.topk(min(args.top, model.num_classes)), strict=True)]
        records.append({'image': file, 'evaluations': sum(int(ode.evaluations) for ode in blocks) or None,
                        'classes': classes})
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
    --images DATA!  folder of images, or an .npz of small images, of which x_test is used
    -o,--out FOLDER [report]  folder for index.html and report.json
    --teacher MODEL  model to compare with: MODEL
    --count N [8]  images to show, spread evenly over the folder
    --steps
    --overwrite  replace an earlier report in the folder
    --quiet
    """
    if not args.overwrite:
        refuse_existing(args.out, '--overwrite')
    model = load(args.model, args)
    set_steps(model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    shown = pictures(args.images, model, args.count)
    names = [Path(name.split(':')[-1]) for name in (args.model, args.teacher) if name]
    # a folder best/ is one of many
    title = ', beside '.join(str(Path(*name.parts[-2:])) if name.name == BEST else name.name for name in names)
    page = write_report(model, shown.images, args.out, teacher=teacher, names=shown.names, classes=shown.classes,
                        title=title, progress=not args.quiet)
    print(f'wrote {page}')


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
    model = load(args.model, args)
    set_steps(model, args)
    out = args.out or Path(args.model.split(':')[-1]).resolve().name + FORMATS[args.format].suffix
    path = export_model(model, out, format=args.format, int8=args.int8, overwrite=args.overwrite,
                        merged=True if args.merged else False if args.unmerged else None)
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
    rows = json.loads(Path(args.results).read_text()) if args.results else []
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
