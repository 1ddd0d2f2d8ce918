"""odevit export and push"""
import argparse
import json
from pathlib import Path
from typing import Any

from ..export import FORMATS, export_model
from ..files import write_text
from ..saving.cards import model_card
from ..saving.push import CARD, push_to_hub
from .arguments import MODEL, add_number, add_steps, load, set_steps


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('--format', choices=list(FORMATS), default='onnx',
                        help='onnx, for ONNX Runtime and others; pt2, for torch.export.load; or aoti, compiled for '
                             'this kind of processor (default: %(default)s)')
    parser.add_argument('-o', '--out', metavar='FILE',
                        help="file to write: .onnx, or .pt2 for the others (default: the model's name)")
    parser.add_argument('--int8', action='store_true', help='store the weights of linear layers as int8 (only onnx)')
    merged = parser.add_mutually_exclusive_group()
    merged.add_argument('--merged', action='store_true', default=None,
                        help='merge a block that depends on time into one per step, as is done for pt2 and aoti')
    merged.add_argument('--unmerged', action='store_false', dest='merged',
                        help='do not, as is done for onnx: a smaller file, which is slower in the other formats')
    add_steps(parser)
    add_number(parser, '--img-size', "image size in pixels (default: the model's)")
    parser.add_argument('--overwrite', action='store_true', help='replace an existing file')


def export(args: argparse.Namespace) -> None:
    """Write a model to a file that runs without this package."""
    model: Any = load(args.model, args)
    set_steps(model, args.steps, args.model)
    out = args.out or Path(args.model.split(':')[-1]).resolve().name + FORMATS[args.format].suffix
    path = export_model(
        model, out, format=args.format, int8=args.int8, merged=args.merged, overwrite=args.overwrite)
    print(f'wrote {path}: {path.stat().st_size / 1e6:.2f} MB')


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help="'local-dir:FOLDER' of a saved model")
    parser.add_argument('repo', help="repository, 'org/name'; created if it does not exist")
    parser.add_argument('--results', metavar='FILE', help='results from odevit evaluate --json, for the card')
    parser.add_argument('--dataset', default='', metavar='NAME',
                        help='name of the dataset of the results, such as CIFAR-100')
    parser.add_argument('--license', metavar='ID',
                        help="the Hub's identifier of a licence, for the card (default: that of the base's weights)")
    parser.add_argument('--card', metavar='FILE', help=(
        'write the card to a file, and send nothing; as README.md in the folder of the model, it is sent as it is'))
    parser.add_argument('--private', action='store_true', help='make the repository, if it is new, private')
    parser.add_argument('--revision', default='main', metavar='BRANCH', help='branch (default: %(default)s)')
    parser.add_argument('--create-pr', action='store_true', help='open a pull request')


def push(args: argparse.Namespace) -> None:
    """Send a saved model to the Hugging Face Hub, with a card."""
    rows = []
    if args.results:
        if not Path(args.results).is_file():
            raise ValueError(f"There is no results file '{args.results}'. Make one: odevit evaluate {args.model} DATA "
                             f'--json {args.results}')
        try:
            rows = json.loads(Path(args.results).read_text())
        except ValueError as e:
            raise ValueError(f"'{args.results}' is not what odevit evaluate --json writes: {e}") from None
    folder = Path(args.model.removeprefix('local-dir:'))
    if args.model.startswith('local-dir:') and (folder / CARD).is_file() and not (
            args.card or args.results or args.dataset or args.license):
        model: Any = folder  # as it is, with its card
    else:
        model = load(args.model, args)
    about: Any = dict(results=rows, dataset=args.dataset, license=args.license)
    if args.card:
        write_text(Path(args.card), model_card(f'hf-hub:{args.repo}', model, **about))
        print(f'wrote {args.card}; nothing was sent')
        return
    url = push_to_hub(model, args.repo, private=args.private or None, revision=args.revision, create_pr=args.create_pr,
                      **about)
    print(f'sent: {url}')
