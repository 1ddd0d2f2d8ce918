"""Run a script that uses timm, such as timm's own, with the `odevit_*` models registered.

    python -m timm_odevit.run validate.py images --model odevit_tiny --pretrained
    torchrun --nproc-per-node 2 -m timm_odevit.run train.py images --model odevit_tiny
"""
import runpy
import sys
from pathlib import Path
from typing import List, Optional

from ._version import __version__

__all__ = ['main']


def main(argv: Optional[List[str]] = None) -> int:
    """Run a script as Python would, after `import timm_odevit`; returns the exit code."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ('-h', '--help'):
        print(__doc__)
        return 0 if args else 2
    if args[0] == '--version':
        print(f'timm_odevit {__version__}')
        return 0
    script = Path(args[0])
    if not script.is_file():
        print(f"odevit: error: There is no script '{script}'. timm's scripts are in its repository: train.py, "
              'validate.py, inference.py, benchmark.py, onnx_export.py.', file=sys.stderr)
        return 2
    sys.argv = args
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name='__main__')
    return 0


if __name__ == '__main__':
    sys.exit(main())
