"""export_model: write a model to a file that runs without this package."""
import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.export import ExportedProgram

from ._version import __version__
from .convert.merge import check_not_merged, merge_
from .data.preprocessing import class_names, data_config, dtype_of, model_name
from .files import staged
from .ode.blocks import find_ode_blocks
from .settings import one_line, one_of

__all__ = ['FORMATS', 'METADATA', 'Format', 'export_model']

METADATA = 'metadata.json'  # in a .pt2 file of torch.export


class Format(NamedTuple):
    suffix: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Path, dict[str, str], bool], Any]
    merged: bool  # by default, because it is faster


def _write_onnx(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    import onnx
    matrices = int8 and _split_residuals(exported)
    program: Any = torch.onnx.export(
        exported, input_names=['images'], output_names=['output'], dynamic_shapes=({0: 'batch'},), verbose=False)
    program.save(path, external_data=False)
    if matrices:
        from onnxruntime.quantization import quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process
        quant_pre_process(path, path, skip_onnx_shape=True, skip_symbolic_shape=True)  # folds transposed weights
        # 7 bits: on a processor without VNNI, sums of two products of 8 bits each overflow
        quantize_dynamic(path, path, op_types_to_quantize=['MatMul', 'Gemm'], reduce_range=True, per_channel=True)
    model = onnx.load(path)
    if int8:
        _round_initializers(model.graph)
    del model.graph.value_info[:]  # with what each node was in Python, they take as much as a small model's weights
    for node in model.graph.node:
        node.ClearField('metadata_props')
    onnx.helper.set_model_props(model, about)
    onnx.save(model, path)


def _split_residuals(exported: ExportedProgram) -> bool:
    """Compute x (W + B A) as x W + (x B) A, whose matrices are those of the file; False if not all can be."""
    aten, graph = torch.ops.aten, exported.graph
    layers = [user for node in graph.nodes for user in node.users  # of the sums made by TimeField.at
              if node.target is aten.view_as.default and node.args[0].target is aten.addmm.default]
    if any(node.target is not aten.linear.default for node in layers):
        return False
    for node in layers:
        x, merged, *bias = node.args
        shared, up, down = merged.args[0].args
        with graph.inserting_before(node):
            inner = graph.call_function(aten.linear.default, (x, down))
            outer = graph.call_function(aten.linear.default, (inner, up))
            first = graph.call_function(aten.linear.default, (x, shared, *bias))
            both = graph.call_function(aten.add.Tensor, (first, outer))
        inner.meta['val'] = x.meta['val'].new_empty((*x.meta['val'].shape[:-1], down.meta['val'].shape[0]))
        for new in (outer, first, both):
            new.meta['val'] = node.meta['val']
        node.replace_all_uses_with(both)
    graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return True


def _write_pt2(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    torch.export.save(exported, path, extra_files={METADATA: json.dumps(about)})


def _write_aoti(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    from torch._inductor import aoti_compile_and_package, config
    configs: dict[str, Any] = {'aot_inductor.metadata': about}
    if hasattr(config.aot_inductor, 'check_lowerbound'):  # with AOTI_RUNTIME_CHECK_INPUTS=1, it would refuse one image
        configs['aot_inductor.check_lowerbound'] = False
    aoti_compile_and_package(exported, package_path=str(path), inductor_configs=configs)


FORMATS = {
    'onnx': Format('.onnx', ('onnx', 'onnxscript'), _write_onnx, False),
    'pt2': Format('.pt2', (), _write_pt2, True),
    'aoti': Format('.pt2', (), _write_aoti, True),
}


def export_model(
        model: nn.Module,
        path: str | Path,
        *,
        format: str = 'onnx',
        int8: bool = False,
        merged: bool | None = None,
        overwrite: bool = False,
) -> Path:
    """Write a model to a file that runs without this package and without timm, on batches of any size.

    The file has the model's image size, its current steps, and metadata, each value as JSON: the model's name, its
    steps, the names of its classes if it knows them, and how images are prepared (input_size, mean, std, ...).

    Args:
        model: timm model, converted or not; merged or not. An 'aoti' or 'pt2' file runs on its device.
        path: New file. It ends in .onnx, or in .pt2 for the other formats.
        format: 'onnx', for ONNX Runtime and others; 'pt2', for torch.export.load; 'aoti', compiled by AOTInductor for
            this kind of processor, for torch._inductor.aoti_load_package. An 'aoti' file takes contiguous images, and
            checks their layout, size and dtype only if the environment variable AOTI_RUNTIME_CHECK_INPUTS is 1.
        int8: Store weights as int8, with a scale for each row (only 'onnx'). Linear layers also compute in int8.
        merged: Merge a block that depends on time, as `merge_` does, into one per step: a larger file. None for what
            is faster: merged for 'pt2' and 'aoti', and not for 'onnx'.

    Raises ImportError if a package that the format needs is missing, and ValueError if the file exists or the model
    cannot be exported in this way.

    Examples:
        >>> import onnxruntime
        >>> path = export_model(student, 'student.onnx')
        >>> session = onnxruntime.InferenceSession(path)
        >>> logits, = session.run(None, {'images': images.numpy()})
    """
    one_of(tuple(FORMATS))('format', format)
    path, model, (suffix, packages, write, faster) = Path(path), unwrap_model(model), FORMATS[format]
    blocks, dtype = find_ode_blocks(model), dtype_of(model)
    if merged is None:
        merged = faster or any(ode.merged for ode in blocks)
    if not merged:
        check_not_merged(model)
    why = ''
    if path.suffix != suffix or path.is_dir() or (path.exists() and not overwrite):
        why = f"'{path}' exists, or does not end in {suffix}. Give another file, or overwrite=True (--overwrite)"
    elif int8 and format != 'onnx':
        why = f'The format {format} stores no int8. Leave out int8 (--int8), or choose the format onnx'
    elif format == 'onnx' and dtype not in (torch.float32, torch.float16):
        why = f'ONNX Runtime does not run {dtype}. Call model.float() first, or choose the format pt2'
    elif any(ode.config.adaptive for ode in blocks):
        why = ('An adaptive method chooses its own times while it runs, but a file has fixed steps. Set another one '
               "first, such as model.blocks.method = 'rk4'")
    if why:
        raise ValueError(f'{why}.')
    if missing := [name for name in (*packages, *['onnxruntime'] * int8) if find_spec(name) is None]:
        raise ImportError(f"{format} needs {' and '.join(missing)}. Type: pip install {' '.join(missing)}")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if merged and any(ode.shared.depends_on_time for ode in find_ode_blocks(copied)):
        merge_(copied)
    if format == 'onnx':
        copied.cpu()
    # two images: torch.export takes a size of 1 as fixed
    images = torch.zeros(2, *data_config(model)['input_size'], dtype=dtype, device=next(copied.parameters()).device)
    try:
        batch = torch.export.Dim('batch', max=2 ** 20)  # without a bound, merged tokens could overflow an index
        exported = torch.export.export(copied, (images,), dynamic_shapes=({0: batch},))
    except Exception as e:  # whatever a model's own code leads to
        raise ValueError(f'torch.export cannot export this {type(model).__name__}: {one_line(e)}') from e
    for node in exported.graph.nodes:
        node.meta.pop('stack_trace', None)  # names files of this machine
    with staged(path.parent, path.name) as aside:
        write(exported, aside / path.name, _about(copied, int8), int8)
    return path


def _round(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight as int8 and a scale for each row, which broadcasts to it; None if it is not worth its scales.

    The residuals of L > 1 layers [L, M, r] have one for each of the r columns of each layer, and [L, r, N], of the r
    rows; a position embedding [1, N, D], for each of the N tokens.
    """
    if weight.ndim < 2 or weight.numel() < 4096 or not weight.is_floating_point():
        return None
    rows = list(range(1, weight.ndim))
    if weight.ndim == 3:
        rows = [1 if len(weight) > 1 and weight.shape[1] > weight.shape[2] else 2]
    scale = weight.abs().amax(dim=rows, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def _round_initializers(graph: Any) -> None:
    """Store the large weights of an ONNX graph that are still floats as int8."""
    from onnx import helper, numpy_helper
    nodes, stored = [], []
    for tensor in graph.initializer:
        rounded = _round(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
        if rounded is None:
            stored.append(tensor)
            continue
        names = [f'{tensor.name}_int8', f'{tensor.name}_scale', f'{tensor.name}_float']
        stored += [numpy_helper.from_array(part.numpy(), name) for part, name in zip(rounded, names, strict=False)]
        nodes += [helper.make_node('Cast', names[:1], names[2:], to=tensor.data_type),
                  helper.make_node('Mul', names[1:][::-1], [tensor.name])]
    del graph.initializer[:]
    graph.initializer.extend(stored)
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def _about(model: nn.Module, int8: bool) -> dict[str, str]:
    """The metadata; what is not known is left out."""
    steps = [ode.steps for ode in find_ode_blocks(model)]
    about = {'model': model_name(model), 'steps': steps[0] if len(steps) == 1 else steps,
             'classes': class_names(model), **data_config(model), 'int8': int8, 'timm_odevit': __version__}
    return {key: json.dumps(value) for key, value in about.items() if value not in (None, [])}
