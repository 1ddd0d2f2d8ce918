"""What a conversion kept."""
from .accuracy import AMP_DTYPES, Evaluation, Result, evaluate, renormalisation
from .plots import plot_accuracy

__all__ = ['AMP_DTYPES', 'Evaluation', 'Result', 'evaluate', 'plot_accuracy', 'renormalisation']
