"""What a model takes on disk, and how long it takes to load."""
import statistics
import tempfile
import time
from typing import Dict

import timm
from torch import nn

from ..saving.save import save_pretrained

__all__ = ['load_seconds', 'weight_bytes']

LOADS = 3


def weight_bytes(model: nn.Module) -> Dict[str, int]:
    """Bytes of a model's weights as they are, and rounded to float16 or int8.

    Linear layers alone are rounded to int8, with one float32 scale for each output channel, as `export_model` does; the
    other weights stay as they are.
    """
    own = list(model.state_dict().values())
    linear = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    plain = sum(tensor.numel() * tensor.element_size() for tensor in own)
    half = sum(tensor.numel() * min(tensor.element_size(), 2 if tensor.is_floating_point() else 8)
               for tensor in own)
    saved = sum(w.numel() * (w.element_size() - 1) - 4 * len(w) for w in linear.values())
    return {'as it is': plain, 'float16': half, 'int8': plain - saved}


def load_seconds(model: nn.Module) -> float:
    """Median time in seconds in which timm builds a model from its saved folder, on the CPU."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        for _ in range(LOADS):
            start = time.perf_counter()
            timm.create_model(f'local-dir:{folder}', pretrained=True)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
