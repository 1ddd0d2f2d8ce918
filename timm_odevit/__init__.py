"""ODE-ViT (arXiv 2511.16501) for timm: `import timm_odevit` registers the `odevit_*` models."""
from . import odevit as _registers  # noqa: F401
from ._version import __version__
from .convert.conversion import Conversion, convert_
from .convert.convertible import check_convertible, list_convertible
from .convert.merge import Merged, merge_, merged_bytes
from .convert.sizing import choose_size
from .convert.torchvision import from_torchvision
from .evaluation.accuracy import Evaluation, evaluate
from .evaluation.plots import plot_accuracy
from .ode.config import OdeConfig
from .ode.integrate import integrate
from .saving.push import push_to_hub
from .saving.save import save_pretrained
from .training.calibrate import calibrate_
from .training.fit import fit
from .training.recipe import Recipe
from .training.stepwise import StepwiseTask
from .training.train import train
from .training.trajectory import TrajectoryDistillationTask

__all__ = [
    'Conversion', 'Evaluation', 'Merged', 'OdeConfig', 'Recipe', 'StepwiseTask', 'TrajectoryDistillationTask',
    '__version__', 'calibrate_', 'check_convertible', 'choose_size', 'convert_', 'evaluate', 'fit',
    'from_torchvision', 'integrate', 'list_convertible', 'merge_', 'merged_bytes', 'plot_accuracy', 'push_to_hub',
    'save_pretrained', 'train',
]
