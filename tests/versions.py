"""Run the tests with the oldest and the newest libraries that pyproject.toml allows, on each Python given.

    pip install uv
    python tests/versions.py 3.10 3.13 [--write] [--folder envs] [-- pytest options]

Prints a table of versions and results; --write puts it into README.md, between its marks. A Python is a version that uv finds
on this machine, or the path of an interpreter. Environments are made in --folder, else in a temporary one (about 6 GB each,
shared with uv's cache where the disk allows links). The oldest of a library is the oldest with a wheel for that Python.
"""
import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SHOWN = ('torch', 'torchvision', 'timm', 'huggingface_hub', 'torchdiffeq', 'safetensors', 'scipy', 'numpy')
MARKS = re.compile(r'(<!-- versions: python tests/versions.py .*? -->\n).*?(<!-- end -->)', re.S)


def run(*command, **kwargs):
    return subprocess.run([str(part) for part in command], cwd=ROOT, text=True, **kwargs)


def environment(python, resolution, folder):
    """A new environment with this checkout; the path of its interpreter."""
    run('uv', 'venv', '-q', '--clear', '--no-python-downloads', '--python', python, folder, check=True)
    path = folder / 'bin' / 'python'
    install = 'uv', 'pip', 'install', '-q', '--python', path
    run(*install, '--resolution', resolution, '--only-binary', ':all:', '-r', 'pyproject.toml', '--extra', 'test', check=True)
    run(*install, '--no-deps', '-e', '.', check=True)
    return path


def row(name, path, options):
    """Markdown row of what is installed and how many tests pass; whether all do."""
    found = {p['name'].replace('-', '_'): p['version'] for p in json.loads(
        run('uv', 'pip', 'list', '-q', '--format', 'json', '--python', path, capture_output=True, check=True).stdout)}
    version = run(path, '-c', 'import platform; print(platform.python_version())', capture_output=True).stdout.strip()
    with tempfile.NamedTemporaryFile(suffix='.xml') as report:
        status = run(path, '-m', 'pytest', '-p', 'no:cacheprovider', '--junitxml', report.name, *options).returncode
        suite = ElementTree.parse(report.name).getroot().find('testsuite')
    counts = {key: int(suite.get(key)) for key in ('tests', 'failures', 'errors', 'skipped')}
    passed = counts.pop('tests') - sum(counts.values())
    tests = ', '.join([f'{passed} passed', *(f'{count} {key}' for key, count in counts.items() if count)])
    return f"| {name} | {version} | {' | '.join(found[key] for key in SHOWN)} | {tests} |", status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('python', nargs='+')
    parser.add_argument('--write', action='store_true')
    parser.add_argument('--folder', type=Path)
    ours, options = sys.argv[1:], []
    if '--' in ours:
        ours, options = ours[:ours.index('--')], ours[ours.index('--') + 1:]
    args = parser.parse_args(ours)
    if options and args.write:
        parser.error('the table is of all tests: leave --write out, or the options of pytest')
    if shutil.which('uv') is None:
        parser.error('there is no uv: pip install uv')
    rows, fine = [f"| libraries | Python | {' | '.join(SHOWN)} | tests |", '|' + ' --- |' * (len(SHOWN) + 3)], True
    with tempfile.TemporaryDirectory() as folder:
        for name, resolution in (('oldest', 'lowest-direct'), ('newest', 'highest')):
            for python in args.python:
                path = environment(python, resolution, (args.folder or Path(folder)).absolute() / f'{name}-{Path(python).name}')
                text, passed = row(name, path, options)
                rows.append(text)
                fine = fine and passed
    table = '\n'.join(rows) + '\n'
    print(table)
    if args.write:
        readme = ROOT / 'README.md'
        text, count = MARKS.subn(lambda found: found[1] + table + found[2], readme.read_text())
        if not count:
            raise SystemExit(f'{readme.name} has no place for the table: {MARKS.pattern}')
        readme.write_text(text)
    return 0 if fine else 1


if __name__ == '__main__':
    sys.exit(main())
