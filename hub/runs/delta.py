"""Weights as their difference from others, in 4 bits: python hub/runs/delta.py write|read BASE SOURCE OUT."""
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

what, base, source, out = sys.argv[1:]
before = {name: tensor.astype(np.float32) for name, tensor in load_file(base).items()}
if what == 'read':
    packed = np.load(source)
    save_file({name: x + packed[name] * packed[f'{name} scale'] for name, x in before.items()}, out, {'format': 'pt'})
else:
    arrays = {}
    for name, tensor in load_file(source).items():
        change = tensor - before[name]
        scale = np.sqrt((change ** 2).mean(axis=tuple(range(1, change.ndim)), keepdims=True)) * 0.43 + 1e-12
        arrays[name], arrays[f'{name} scale'] = np.clip(np.round(change / scale), -6, 6).astype(np.int8), scale
    np.savez_compressed(out, **arrays)
