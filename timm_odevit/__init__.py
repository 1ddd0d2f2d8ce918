"""ODE-ViT (arXiv 2511.16501) for timm: `import timm_odevit` registers the `odevit_*` models.

The rooms of the package, from the ground up; each imports only from those above it:

settings            settings as dataclasses that check themselves; words that messages share
files, distributed  files that are complete or absent; several processes of one run
hooks               hooks and modes that are restored; the hidden states of a model while it runs
quantization        weights in a few bits
ode                 the mathematics
data                images and labels in batches
convert             from a pretrained transformer to an ODE-ViT, and back
interop             vision transformers of other libraries
saving              models in files and on the Hub
registry            the registered models
dynamics            what the states do along the way
evaluation          accuracy over step counts
training            distillation, calibration, recipes
export              models in files that run without this package
benchmark           speed and memory
shrinking           from a model and images to a small model, with a verdict
cli                 the command line
"""
from . import registry as _registers  # noqa: F401
from ._version import __version__
from .convert.conversion import Conversion, convert_
from .convert.planning import check_convertible, choose_size, list_convertible
from .dynamics.precision import discretisation_errors
from .dynamics.stability import lipschitz_constants, lyapunov_exponents, spectral_norms
from .dynamics.trajectories import attention_over_time, class_over_time, trajectory_geometry
from .evaluation.accuracy import calibrate_halting, evaluate
from .evaluation.embeddings import evaluate_embeddings
from .evaluation.results import Evaluation
from .export.files import export_model
from .interop.from_libraries import from_open_clip, from_torchvision, from_transformers
from .interop.put_tower import put_tower_
from .ode.blocks import with_steps
from .ode.config import OdeConfig
from .quantization import quantize_
from .saving.save import push_to_hub, save_pretrained
from .shrinking.run import shrink
from .shrinking.verdict import Verdict
from .training.config import FitConfig, LossConfig
from .training.fit import fit
from .training.recipe import Recipe
from .training.run import calibrate_, train
from .training.tasks import TrajectoryDistillationTask

__all__ = [
    'Conversion', 'Evaluation', 'FitConfig', 'LossConfig', 'OdeConfig', 'Recipe', 'TrajectoryDistillationTask',
    'Verdict', '__version__', 'attention_over_time', 'calibrate_', 'calibrate_halting', 'check_convertible',
    'choose_size', 'class_over_time', 'convert_', 'discretisation_errors', 'evaluate', 'evaluate_embeddings',
    'export_model', 'fit', 'from_open_clip', 'from_torchvision', 'from_transformers', 'lipschitz_constants',
    'list_convertible', 'lyapunov_exponents', 'push_to_hub', 'put_tower_', 'quantize_', 'save_pretrained', 'shrink',
    'spectral_norms', 'train', 'trajectory_geometry', 'with_steps',
]


def __dir__() -> list[str]:  # what tab completion shows
    return __all__
