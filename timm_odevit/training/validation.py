"""What is measured after each epoch, and which of it chooses the best one."""
from typing import Any, Dict, Optional

import torch
from torch import nn

from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings

__all__ = ['score_of', 'validate']


def validate(task: Any, model: nn.Module, loader: Any, dtype: Optional[torch.dtype]) -> Dict[str, float]:
    """Accuracy; of a task that follows embeddings, how near they are to the teacher's."""
    if not getattr(task, 'embedding', False):
        top = evaluate(model, loader, amp_dtype=dtype).results[-1]
        return {'val_top1': top.top1, 'val_top5': top.top5, 'val_loss': top.loss}
    teacher = getattr(task.teacher, 'model', task.teacher)
    found: Any = evaluate_embeddings(model, loader, teacher=teacher, amp_dtype=dtype).results[-1]
    return {f'val_{key}': getattr(found, key) for key in ('cosine', 'error', 'neighbours')
            if getattr(found, key) is not None}


def score_of(record: Dict[str, Any], default: float) -> float:
    """What chooses the best epoch, of its record: the accuracy, or the cosine with the teacher's embeddings."""
    return record.get('val_top1', record.get('val_cosine', default))
