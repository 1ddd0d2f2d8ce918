"""Models as programs of torch.export, and their files."""
import io
import json
from pathlib import Path
from typing import Any

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
    torch.export.save(exported(model, images), file := io.BytesIO(), extra_files={METADATA: json.dumps(about)})
    path.write_bytes(file.getvalue())  # torch aborts on a full disk


def proto(module: nn.Module, output: str, **inputs: Tensor) -> Any:
    program: Any = exported(module, *inputs.values())
    try:
        program = torch.onnx.export(
            program, input_names=[*inputs], output_names=[output], verbose=False,
            dynamic_shapes=[{0: 'batch'} if x.ndim else None for x in inputs.values()])
    except RuntimeError as e:
        raise ValueError(f'ONNX cannot hold this {type(module).__name__}: {one_line(e.__cause__ or e)}. '
                         'Choose .pt2.') from e
    model = program.model_proto
    del model.graph.value_info[:]  # as large as a small model's weights
    for node in model.graph.node:
        node.ClearField('metadata_props')
    return model
