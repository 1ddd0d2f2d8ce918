"""What a conversion kept."""
from .accuracy import Evaluation, Result, evaluate

__all__ = ['Evaluation', 'Result', 'evaluate']
