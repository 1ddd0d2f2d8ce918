"""Teach the shared block to follow a pretrained ViT."""
from .calibrate import StepwiseTask, calibrate_
from .engine import fit
from .task import TrajectoryDistillationTask

__all__ = ['StepwiseTask', 'TrajectoryDistillationTask', 'calibrate_', 'fit']
