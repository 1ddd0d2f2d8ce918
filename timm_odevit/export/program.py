"""Models as programs of torch.export, and their files."""
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..settings import one_line

METADATA = 'metadata.json'  # in a .pt2 file of torch.export


def exported(module: nn.Module, *inputs: Tensor) -> ExportedProgram:
    """A module, of inputs of two images each and of numbers, as a program for batches of any size."""
    # two: torch.export takes a size of 1 as fixed; without a bound, merged tokens could overflow an index
    batch = torch.export.Dim('batch', max=2 ** 20)
    try:
        program = torch.export.export(module, inputs, dynamic_shapes=[{0: batch} if x.ndim else None for x in inputs])
    except Exception as e:  # whatever a model's own code leads to
        raise ValueError(f'torch.export cannot export this {type(module).__name__}: {one_line(e)}') from e
    for node in program.graph.nodes:
        node.meta.pop('stack_trace', None)  # names files of this machine
    return program


def write_pt2(model: nn.Module, images: Tensor, path: Path, about: dict[str, str]) -> None:
    torch.export.save(exported(model, images), path, extra_files={METADATA: json.dumps(about)})
