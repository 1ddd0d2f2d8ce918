"""odevit push"""
import argparse
import json
from pathlib import Path

from ..files import write_text
from ..saving.cards import model_card
from ..saving.push import push_to_hub
from .arguments import load

HELP = 'Send a saved model to the Hugging Face Hub, with a card.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help="'local-dir:FOLDER' of a saved model")
    parser.add_argument('repo', help="repository, 'org/name'; created if it does not exist")
    parser.add_argument('--results', metavar='FILE', help='results from odevit evaluate --json, for the card')
    parser.add_argument('--dataset', default='', metavar='NAME',
                        help='name of the dataset of the results, such as CIFAR-100')
    parser.add_argument('--license', metavar='ID',
                        help="the Hub's identifier of a licence, for the card (default: that of the base's weights)")
    parser.add_argument('--card', metavar='FILE', help='write the card to a file, to read it, and send nothing')
    parser.add_argument('--private', action='store_true', help='make the repository private')
    parser.add_argument('--revision', default='main', metavar='BRANCH', help='branch (default: %(default)s)')
    parser.add_argument('--create-pr', action='store_true', help='open a pull request')


def run(args: argparse.Namespace) -> None:
    rows = []
    if args.results:
        if not Path(args.results).is_file():
            raise ValueError(f"There is no results file '{args.results}'. Make one: odevit evaluate {args.model} DATA "
                             f'--json {args.results}')
        try:
            rows = json.loads(Path(args.results).read_text())
        except ValueError as e:
            raise ValueError(f"'{args.results}' is not what odevit evaluate --json writes: {e}") from None
    model, about = load(args.model, args), dict(results=rows, dataset=args.dataset, license=args.license)
    if args.card:
        write_text(Path(args.card), model_card(f'hf-hub:{args.repo}', model, **about))
        print(f'wrote {args.card}; nothing was sent')
        return
    url = push_to_hub(model, args.repo, private=args.private or None, revision=args.revision, create_pr=args.create_pr,
                      **about)
    print(f'sent: {url}')
