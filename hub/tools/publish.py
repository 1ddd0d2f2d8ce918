"""Send the published models, hub/*, to the Hugging Face Hub: one repository each.

    python hub/tools/publish.py                   say what would be sent
    python hub/tools/publish.py --send            send it, after `hf auth login`

Files that are already there are not sent again, so after an interruption simply run it again.
"""
import argparse
from pathlib import Path

from timm_odevit import push_to_hub

HUB = Path(__file__).parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', help='folders of hub/ to send (default: all)')
    parser.add_argument('--org', default='timm-odevit', help='organisation or user on the Hub')
    parser.add_argument('--send', action='store_true', help='send; without it, nothing is sent')
    parser.add_argument('--create-pr', action='store_true', help='open pull requests')
    args = parser.parse_args()
    folders = sorted(path.parent for path in HUB.glob('*/model.safetensors'))
    unknown = set(args.names) - {folder.name for folder in folders}
    if unknown:
        raise SystemExit(f"Not in hub/: {', '.join(sorted(unknown))}. Available: {', '.join(f.name for f in folders)}.")
    for folder in folders:
        if not args.names or folder.name in args.names:
            repo = f'{args.org}/{folder.name}'
            try:
                sent = push_to_hub(folder, repo, create_pr=args.create_pr) if args.send else 'nothing was sent'
            except (OSError, ValueError) as e:
                raise SystemExit(f'{e}') from None
            print(f'{repo}: {sent}')


if __name__ == '__main__':
    main()
