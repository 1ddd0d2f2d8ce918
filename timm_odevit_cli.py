"""The console script `odevit`: runs timm_odevit/cli/__init__.py without importing timm_odevit, which imports torch."""
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> int:
    package = Path(find_spec('timm_odevit').submodule_search_locations[0])  # found, not imported
    spec = spec_from_file_location('timm_odevit_cli.start', package / 'cli' / '__init__.py')
    start = module_from_spec(spec)
    spec.loader.exec_module(start)
    return start.main()
