"""Teach the shared block to follow a pretrained ViT."""
from .engine import fit
from .task import TrajectoryDistillationTask

__all__ = ['TrajectoryDistillationTask', 'fit']
