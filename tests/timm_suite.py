"""Run timm's own tests/test_models.py, from timm's source distribution, over every odevit_* model.

    pip download --no-deps --no-binary timm "timm==$(python -c 'import timm; print(timm.__version__)')"
    tar xzf timm-*.tar.gz
    python tests/timm_suite.py timm-*/tests/test_models.py [pytest options]

odevit* joins the filters of models that are no feature pyramids, and the module those of models with
forward_intermediates, as timm's own transformers do. Left out is TorchScript: give -m 'not torchscript', as .ci/run does; the test
of TorchScript of what FX has traced has no such mark, so that the filter for it gets all our names.
"""
import sys
import tempfile
from pathlib import Path

import pytest


def main() -> int:
    source = Path(sys.argv[1]).read_text()
    for old, new in (
            ('\nimport timm\n', '\nimport timm\nimport timm_odevit\n'),
            ('FEAT_INTER_FILTERS = [\n', "FEAT_INTER_FILTERS = [\n    'odevit',\n"),
            ('    EXCLUDE_FX_JIT_FILTERS = [\n', "    EXCLUDE_FX_JIT_FILTERS = [\n        'odevit*',\n"),
            ('NON_STD_FILTERS = [\n', "NON_STD_FILTERS = [\n    'odevit*',\n"),
    ):
        if source.count(old) != 1:
            sys.exit(f'{sys.argv[1]} is not the file this was written for: {old!r} is not in it once.')
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'test_timm_models.py')
        path.write_text(source)
        Path(folder, 'pytest.ini').write_text('[pytest]\nmarkers =\n' + ''.join(
            f'    {name}: timm\n' for name in (
                'base', 'forward', 'backward', 'cfg', 'cfg_nonstd', 'torchscript', 'features', 'fxforward', 'fxbackward')))
        return int(pytest.main([str(path), '-c', str(Path(folder, 'pytest.ini')), '-k', 'odevit', '-q', *sys.argv[2:]]))


if __name__ == '__main__':
    sys.exit(main())
