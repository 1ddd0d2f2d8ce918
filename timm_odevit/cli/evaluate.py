"""odevit evaluate, halt, benchmark, predict, export and push"""
import json
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from timm_odevit import calibrate_halting, evaluate_embeddings, export_model, push_to_hub, quantize_
from timm_odevit import evaluate as evaluate_classes

from ..benchmark import benchmark as measure_speed
from ..data.batches import DataConfig
from ..data.preprocessing import data_config, open_image, warn_of_other_classes
from ..data.read import Data, held_out_of, read_data, with_test
from ..data.sources import files_in
from ..evaluation.embeddings import without_classifiers
from ..export.files import load_exported, metadata
from ..files import to_json, write_text
from ..ode.blocks import find_ode_blocks
from ..quantization import ENOUGH
from ..saving.cards import model_card
from ..saving.save import CARD
from ..settings import one_line
from .models import TOWERS, check_file, load, load_with_steps, new_folder, save, steps_of_training


def evaluate(args: Any) -> None:
    """Measure accuracy at several step counts. To compare speeds, use odevit benchmark.

    model
    data
    --steps K-K,K,...  step counts, such as 1-6,12,24 (default: as saved)
    --teacher MODEL  model to compare with
    --amp {bfloat16,float16}  mixed precision
    --embedding  evaluate embeddings, as of a model without classes: cosine with the teacher's, nearest images and, if
        there are images left to train on, k-NN and a linear classifier
    --json FILE  file to write the results to
    --held-out SHARE  if the data has no val/, evaluate on the share that training held out (default: val/, else test/
        or x_test, else all images)
    --test DATA  evaluate on these images
    --batch-size --workers --quiet
    """
    check_file(args.json)
    if args.test and args.held_out is not None:
        raise ValueError('--test and --held-out both choose the images to evaluate on. Give one.')
    model = load(args.model, args)
    teacher = load(args.teacher, args)
    embedding = args.embedding or not model.num_classes
    data = _data(args, model, embedding)
    loader, words = (data.test, data.words['test']) if args.test else data.evaluated()
    options: Any = dict(steps=args.steps, amp_dtype=args.amp, progress=not args.quiet)
    if embedding:
        host, (model, teacher) = model, without_classifiers(model, teacher)
        words += ', outputs without the head' * (model is not host)
        others = data.train is not None and (data.val or data.test) is not None and data.num_classes > 1
        if teacher is None and not others:
            raise ValueError('There is nothing to compare with. Give --teacher, or labelled images with --held-out or '
                             '--test.')
        options['labelled'] = data.plain() if others else None
        results: Any = evaluate_embeddings(model, loader, teacher=teacher, **options)
    else:
        for each in (model, teacher):
            warn_of_other_classes(each, data.classes, args.data)
        results = evaluate_classes(model, loader, teacher=teacher, **options)
    results = replace(results, data=words, trained_at=steps_of_training(model))
    print(results)
    if args.json:
        write_text(Path(args.json), results.to_json())


def _data(args: Any, model: Any, any_classes: bool = False) -> Data:
    given: Any = {} if args.held_out is None else {'held_out': args.held_out}
    config = DataConfig(batch_size=args.batch_size, workers=args.workers, **given)
    data = read_data(args.data, model, config, held_out=None if given else 0., any_classes=any_classes)
    if getattr(args, 'test', None):
        return with_test(data, args.test, model, config)
    if data.held_out > (known := held_out_of(model) or 0.) or (known and data.val is data.test):
        warnings.warn(f"'{args.model}' may have been trained on some of these images: it held out "
                      f"{f'{known:g}' if known else 'an unknown share'} of its own. Give others.", RuntimeWarning, 3)
    return data


def halt(args: Any) -> None:
    """Choose when an image may stop before the last step, and save the model with this setting.

    model
    data
    out  new folder to save to
    --max-drop SHARE [0.005]  largest loss of accuracy, as a share of all images
    --steps
    --held-out SHARE [0.1]  if the data has no val/, use only the share that training held out
    --batch-size --workers --quiet
    """
    with new_folder(args.out):
        model = load_with_steps(args)
        data = _data(args, model)  # not the test images
        warn_of_other_classes(model, data.classes, args.data)
        setting = calibrate_halting(model, data.evaluated()[0], max_drop=args.max_drop, progress=not args.quiet)
        print(setting)
        if setting.nfe == setting.full_nfe:
            raise ValueError(f'With --max-drop {args.max_drop:g}, no image can stop early, so nothing was saved. Raise '
                             'it, or train for exits: odevit distill early_exit')
        setting.apply_(model)
        save(model, args.out)


def benchmark(args: Any) -> None:
    """Time models, and measure their memory and size, side by side in one run.

    model...  timm names, or 'local-dir:FOLDER' of saved models; they are compared with the first
    --batch-size N,N,... [1,8]  images per call
    --steps K-K,K,...  also time models of one stage with these step counts
    --compile MODE?  also time each model under torch.compile, in one of its modes, such as max-autotune
    --dtype {float32,bfloat16,float16} [float32]  of weights and images
    --img-size
    --rounds N [10]  rounds in which all take turns
    --data DATA  folder of images, or an .npz (default: noise)
    --json FILE  file to write the measurements to
    --quiet
    """
    check_file(args.json)
    # the weights of a name without a source or tag do not matter
    models = {name: load(name, args, pretrained=':' in name or '.' in name).to(getattr(torch, args.dtype)).eval()
              for name in args.model}
    results = measure_speed(
        models, batch_sizes=args.batch_size, steps=args.steps or (), rounds=args.rounds, compiled=args.compile,
        images=partial(_some_images, args.data) if args.data else None, progress=not args.quiet)
    print(results)
    if args.json:
        write_text(Path(args.json), to_json(asdict(results)))


def _some_images(path: str, model: Any, count: int) -> Any:
    """Again from the start if there are too few."""
    images, _ = read_data(path, model, labels=False, held_out=0.).sample('train', count)
    return images[torch.arange(count) % len(images)].to(next(model.parameters()).device)


def predict(args: Any) -> None:
    """Classify images.

    model  a model as elsewhere; or an .onnx or .pt2 file of odevit export, which may run code
    image...  image files, or folders of them
    --top N [5]  number of classes to print
    --steps --checkpoint
    --json  print JSON
    """
    if args.model.endswith(('.onnx', '.pt2')) and not args.model.startswith(('local-dir:', 'hf-hub:', *TOWERS)):
        run, about = load_exported(args.model, args.steps)
        blocks, cfg, like = [], about['images'], torch.empty(0)
    else:
        run = load_with_steps(args).eval()
        blocks, about, cfg, like = find_ode_blocks(run), metadata(run), data_config(run), next(run.parameters())
    if about.get('num_classes', 2) < 2 or args.model.startswith(TOWERS):
        raise ValueError(f"'{args.model}' has no classes to choose from.")
    names, records, failed = about.get('classes'), list[Any](), 0
    files = [file for p in map(Path, args.image) for file in (files_in(p)[0] if p.is_dir() else [str(p)])]
    for file in files:
        record: dict[str, Any] = {'image': file}
        records += [record] * args.json
        try:
            with torch.inference_mode():
                probabilities = run(open_image(file, cfg)[None].to(like))[0].softmax(-1)
            if not probabilities.isfinite().all():
                raise ValueError(f"The outputs for '{file}' are not finite, so they name no class.")
        except ValueError as e:
            record['error'], failed = one_line(e), failed + 1
            print(f"odevit: {record['error']}", file=sys.stderr)
            continue
        classes: list[Any] = [
            {'label': int(i), 'name': names[i] if names else None, 'probability': round(float(p), 4)}
            for p, i in zip(*probabilities.topk(min(args.top, len(probabilities))), strict=True)]
        evaluations = sum(int(ode.evaluations) for ode in blocks)
        record.update(evaluations=evaluations or None, classes=classes)
        if not args.json:
            print(one_line(file) + f' ({evaluations} evaluations)' * (evaluations > 0))
            for each in classes:
                name = one_line(each['name'] or f"class {each['label']}")
                print(f"  {100 * each['probability']:5.1f} %  {name}")
    if args.json:
        print(to_json(records), end='')
    if failed:
        raise ValueError(f'{failed} of {len(files)} images could not be read or classified.')


def export(args: Any) -> None:
    """Write a model to a file that runs without this package.

    model
    [path]  file to write: .onnx, for ONNX Runtime; .html, a page that classifies pictures; or .pt2, for
        torch.export.load (default: the model's name, .onnx)
    --int8  compute linear layers in int8, and store weights so (only .onnx)
    --bits N  4 stores matrices in 4 bits (only .onnx)
    --images DATA  a folder or .npz of images, without labels, on which 4 bits are to change little
    --any-steps  make the number of steps an input, 'steps' (only .onnx)
    --steps --checkpoint --img-size
    --overwrite  replace an existing file
    """
    model = load_with_steps(args)
    out = args.path or f"{Path(args.model.split(':')[-1]).resolve().name}.onnx"
    if args.images:
        if not args.bits and not out.endswith('.html'):
            raise ValueError('--images is for 4 bits. Add --bits 4, or write an .html.')
        quantize_(model, read_data(args.images, model, labels=False, held_out=0.).sample('train', ENOUGH)[0])
    path = export_model(model, out, int8=args.int8, bits=args.bits, any_steps=args.any_steps, overwrite=args.overwrite)
    print(f'wrote {path}: {path.stat().st_size / 1e6:.2f} MB')


def push(args: Any) -> None:
    """Send a saved model to the Hugging Face Hub, with a card.

    model  'local-dir:FOLDER' of a saved model
    repo  'org/name'; created if it does not exist
    --results FILE  results from odevit evaluate --json, for the card
    --dataset NAME  name of their dataset, such as CIFAR-100
    --license ID  the Hub's identifier of a licence, for the card (default: that of the base's weights)
    --card FILE  write the card to a file, and send nothing; a README.md in the folder of the model is sent as it is
    --private  make a new repository private
    """
    check_file(args.card)
    try:
        rows = json.loads(Path(args.results).read_text(errors='replace')) if args.results else []
    except ValueError as e:
        raise ValueError(f"'{args.results}' is not JSON: {e}") from e
    about = dict(results=rows, dataset=args.dataset or '', license=args.license)
    source, _, folder = args.model.partition(':')
    as_it_is = source == 'local-dir' and Path(folder, CARD).is_file() and not (args.card or any(about.values()))
    model = folder if as_it_is else load(args.model, args)
    if args.card:
        write_text(Path(args.card), model_card(f'hf-hub:{args.repo}', model, **about))
        print(f'wrote {args.card}; nothing was sent')
        return
    print('sent:', push_to_hub(model, args.repo, private=args.private or None, **about))
