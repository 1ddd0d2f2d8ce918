"""ODE-ViT (arXiv 2511.16501) for timm: `import timm_odevit` registers the `odevit_*` models."""
from . import odevit as _registers  # noqa: F401
from ._version import __version__
from .config import OdeConfig
from .convert import Conversion, check_convertible, convert_, list_convertible
from .distill import StepwiseTask, TrajectoryDistillationTask, calibrate_, fit
from .evaluate import Evaluation, evaluate
from .hub import push_to_hub, save_pretrained
from .interop import from_torchvision
from .merge import Merged, merge_, merged_bytes
from .recipe import Recipe
from .sizing import choose_size
from .solvers import integrate
from .train import train

__all__ = [
    'Conversion', 'Evaluation', 'Merged', 'OdeConfig', 'Recipe', 'StepwiseTask', 'TrajectoryDistillationTask',
    '__version__', 'calibrate_', 'check_convertible', 'choose_size', 'convert_', 'evaluate', 'fit', 'from_torchvision',
    'integrate', 'list_convertible', 'merge_', 'merged_bytes', 'push_to_hub', 'save_pretrained', 'train',
]
