"""Plots of results; they need matplotlib."""
from pathlib import Path
from typing import Union

from ..settings import checks_keywords
from .accuracy import Evaluation

__all__ = ['plot_accuracy']


@checks_keywords
def plot_accuracy(evaluation: Evaluation, path: Union[str, Path]) -> Path:
    """Plot top-1 accuracy against solver steps, with the teacher as a horizontal line.

    Args:
        evaluation: Results of `evaluate(model, loader, steps=...)`.
        path: Image file to write; its extension sets the format.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: No result has a step count.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("Plots need matplotlib. Type: pip install 'timm-odevit[examples]'") from e
    points = sorted((r.steps, r.top1) for r in evaluation.results if r.steps is not None and r.model != 'teacher')
    if not points:
        raise ValueError('There is no result of an ODE-ViT to plot. Evaluate one with steps=(1, 2, 4, ...).')
    axes = (figure := Figure(figsize=(6, 4), layout='constrained')).subplots()
    axes.plot(*zip(*points, strict=True), marker='o', label='ODE-ViT')
    for r in evaluation.results:
        if r.model == 'teacher':
            axes.axhline(r.top1, color='gray', linestyle='--', label='teacher')
    axes.set(xlabel='solver steps K', ylabel='top-1 accuracy, %', xscale='log')
    axes.set_xticks([k for k, _ in points], [str(k) for k, _ in points])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)
    return Path(path)
