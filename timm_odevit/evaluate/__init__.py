"""What a conversion kept."""
from .accuracy import Evaluation, Result, evaluate
from .plots import plot_accuracy

__all__ = ['Evaluation', 'Result', 'evaluate', 'plot_accuracy']
