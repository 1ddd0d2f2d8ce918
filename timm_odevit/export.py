"""export_model: write a model to a file that runs without this package."""
import copy
import json
import os
import shutil
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
from .data.preprocessing import class_names, data_config, model_name
from .files import staged
from .ode.blocks import find_ode_blocks
from .settings import one_line, one_of

__all__ = ['FORMATS', 'METADATA', 'Format', 'export_model']

METADATA = 'metadata.json'  # in a .pt2 file of torch.export
SMALLEST = 4096  # numbers in a tensor that is stored as int8
LARGEST_BATCH = 2 ** 20  # without a bound, torch.export objects that merged tokens could overflow an index


class Format(NamedTuple):
    """A format: the ending of its files, the packages that it needs, its writer, and whether merging is faster."""
    suffix: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Path, dict[str, str], bool], Any]
    merged: bool


def _write_onnx(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    import onnx
    fixed = int8 and _split_residuals(exported)
    program: Any = torch.onnx.export(
        exported, input_names=['images'], output_names=['output'], dynamic_shapes=({0: 'batch'},), verbose=False)
    program.save(path, external_data=False)
    if fixed:
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
        size, rank = x.meta['val'], down.meta['val'].shape[0]
        inner.meta['val'] = size.new_empty((*size.shape[:-1], rank))
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
        path: File to write. It ends in .onnx, or in .pt2 for the other formats.
        format: 'onnx', for ONNX Runtime and others; 'pt2', for torch.export.load; 'aoti', compiled by AOTInductor for
            this kind of processor, for torch._inductor.aoti_load_package. An 'aoti' file takes contiguous images, and
            checks their layout, size and dtype only if the environment variable AOTI_RUNTIME_CHECK_INPUTS is 1.
        int8: Store weights as int8, with a scale for each row (only 'onnx'). Linear layers also compute in int8.
        merged: Merge a block that depends on time, as `merge_` does, into one per step: a larger file. None for what
            is faster: merged for 'pt2' and 'aoti', and not for 'onnx'.
        overwrite: Replace an existing file.

    Returns:
        The path.

    Raises:
        ImportError: A package that the format needs is not installed; the message says what to type.
        TypeError: The model is not a timm model of images.
        ValueError: The file exists, or the model cannot be exported in this way; the message says what to change.
        OSError: The file cannot be written, or there is no C++ compiler for 'aoti'.

    Examples:
        >>> import onnxruntime
        >>> path = export_model(student, 'student.onnx')
        >>> session = onnxruntime.InferenceSession(path)
        >>> logits, = session.run(None, {'images': images.numpy()})
    """
    suffix = FORMATS[one_of(tuple(FORMATS))('format', format)].suffix
    path, model = Path(path), unwrap_model(model)
    if merged is None:
        merged = FORMATS[format].merged or any(ode.merged for ode in find_ode_blocks(model))
    if path.suffix != suffix:
        raise ValueError(f"The name of a file in the format {format} ends in {suffix}; got '{path}'.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"'{path}' exists. Give another file, or overwrite=True (--overwrite).")
    _check(model, format, int8, merged)
    _check_installed(format, int8)
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if merged and any(ode.shared.depends_on_time for ode in find_ode_blocks(copied)):
        merge_(copied)
    if format == 'onnx':
        copied.cpu()
    like = next(p for p in copied.parameters() if p.is_floating_point())
    # two images: torch.export takes a size of 1 as fixed
    images = torch.zeros(2, *data_config(model)['input_size'], dtype=like.dtype, device=like.device)
    try:
        batch = torch.export.Dim('batch', max=LARGEST_BATCH)
        exported = torch.export.export(copied, (images,), dynamic_shapes=({0: batch},))
    except Exception as e:  # whatever a model's own code leads to
        raise ValueError(f'torch.export cannot export this {type(model).__name__}: {one_line(e)}') from e
    for node in exported.graph.nodes:
        node.meta.pop('stack_trace', None)  # names files of this machine
    with staged(path.parent, path.name) as aside:
        FORMATS[format].write(exported, aside / path.name, _about(copied, int8), int8)
    return path


def _check(model: Any, format: str, int8: bool, merged: bool) -> None:
    if not hasattr(model, 'in_chans'):
        raise TypeError(f'Cannot export {type(model).__name__}: it does not say what images it takes. Give a model '
                        'made by timm.create_model.')
    if not merged:
        check_not_merged(model)
    if int8 and format != 'onnx':
        raise ValueError(f'The format {format} stores no int8. Leave out int8 (--int8), or choose the format onnx.')
    blocks = find_ode_blocks(model)
    for ode in blocks:
        if ode.config.adaptive:
            raise ValueError(f"'{ode.method}' chooses its own times while it runs, but a file has fixed steps. Set a "
                             "fixed-step method first, such as model.blocks.method = 'rk4'.")
    dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
    if format == 'onnx' and dtype not in (torch.float32, torch.float16):
        raise ValueError(f'The weights are {dtype}, which ONNX Runtime does not run. Call model.float() first, or '
                         'choose the format pt2.')
    if int8 and dtype == torch.float16 and any(ode.config.halting == 'entropy' for ode in blocks):
        raise ValueError('ONNX Runtime cannot store a float16 head as int8 if halting runs it after every step. Call '
                         'model.float() first, or leave out int8.')


def _check_installed(format: str, int8: bool) -> None:
    """Raise ImportError for a missing package, and OSError for a missing compiler; both say what to install."""
    missing = [package for package in (*FORMATS[format].packages, *(['onnxruntime'] if int8 else []))
               if find_spec(package) is None]
    if missing:
        raise ImportError(f"{format}{' with int8' if int8 else ''} needs {' and '.join(missing)}. Type: pip install "
                          f"{' '.join(missing)}")
    if format == 'aoti' and shutil.which(os.environ.get('CXX', 'g++')) is None:
        raise OSError('aoti compiles the model, but no C++ compiler was found. Install one, such as g++ (Debian, '
                      'Ubuntu: apt install g++), or name yours in the environment variable CXX.')


def _round(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight as int8 and a scale for each row, which broadcasts to it; None if it is not worth its scales.

    The residuals of L > 1 layers [L, M, r] have a scale for each of the r columns of each layer, and [L, r, N], of the
    r rows; a position embedding [1, N, D], for each of the N tokens.
    """
    if weight.ndim < 2 or weight.numel() < SMALLEST or not weight.is_floating_point():
        return None
    rows = list(range(1, weight.ndim))
    if weight.ndim == 3:
        rows = [1 if len(weight) > 1 and weight.shape[1] > weight.shape[2] else 2]
    scale = weight.detach().abs().amax(dim=rows, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight.detach() / scale).round().clamp(-127, 127).to(torch.int8), scale


def _round_initializers(graph: Any) -> None:
    """Store the large weights of an ONNX graph that are still floats as int8."""
    import onnx
    from onnx import helper, numpy_helper
    nodes, stored = [], []
    for tensor in graph.initializer:
        rounded = None
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
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
