"""export_model: write a model to a file that runs without this package."""
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models import get_model_args
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.export import ExportedProgram

from .._version import __version__
from ..data.preprocessing import class_names, data_config, dtype_of, model_name
from ..files import staged
from ..ode.blocks import find_ode_blocks
from ..ode.config import DEFAULT
from ..settings import one_line, one_of
from .html import write_html

METADATA = 'metadata.json'  # in a .pt2 file of torch.export
PREPARED = ('input_size', 'interpolation', 'mean', 'std', 'crop_pct', 'crop_mode')


class Format(NamedTuple):
    suffix: str
    write: Callable[[Any, Path, dict[str, str]], Any]  # a program of torch.export, or for a page the model


def _write_onnx(exported: ExportedProgram, path: Path, about: dict[str, str]) -> None:
    import onnx
    program: Any = torch.onnx.export(
        exported, input_names=['images'], output_names=['output'], dynamic_shapes=({0: 'batch'},), verbose=False)
    program.save(path, external_data=False)
    model = onnx.load(path)
    del model.graph.value_info[:]  # with what each node was in Python, they take as much as a small model's weights
    for node in model.graph.node:
        node.ClearField('metadata_props')
    onnx.helper.set_model_props(model, about)
    onnx.save(model, path)


def write_int8(source: Path, path: Path) -> None:
    """Write an .onnx file of export_model with weights in int8, for linear layers that compute in it."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process
    about = {entry.key: entry.value for entry in onnx.load(source).metadata_props}
    with staged(path.parent, path.name) as aside:
        file = aside / path.name
        quant_pre_process(source, file, skip_onnx_shape=True, skip_symbolic_shape=True)  # folds transposed weights
        # 7 bits: on a processor without VNNI, sums of two products of 8 bits each overflow
        quantize_dynamic(file, file, op_types_to_quantize=['MatMul', 'Gemm'], reduce_range=True, per_channel=True)
        model = onnx.load(file)
        _round_initializers(model.graph)
        del model.graph.value_info[:]
        onnx.helper.set_model_props(model, {**about, 'int8': 'true'})
        onnx.save(model, file)


def _write_pt2(exported: ExportedProgram, path: Path, about: dict[str, str]) -> None:
    torch.export.save(exported, path, extra_files={METADATA: json.dumps(about)})


def _write_aoti(exported: ExportedProgram, path: Path, about: dict[str, str]) -> None:
    from torch._inductor import aoti_compile_and_package, config
    configs: dict[str, Any] = {'aot_inductor.metadata': about}
    if hasattr(config.aot_inductor, 'check_lowerbound'):  # with AOTI_RUNTIME_CHECK_INPUTS=1, it would refuse one image
        configs['aot_inductor.check_lowerbound'] = False
    aoti_compile_and_package(exported, package_path=str(path), inductor_configs=configs)


FORMATS = {'onnx': Format('.onnx', _write_onnx), 'html': Format('.html', write_html), 'pt2': Format('.pt2', _write_pt2),
           'aoti': Format('.pt2', _write_aoti)}


def export_model(
        model: nn.Module,
        path: str | Path,
        *,
        format: str | None = None,
        int8: bool = False,
        overwrite: bool = False,
) -> Path:
    """Write a model to a file that runs without this package and without timm, on batches of any size, or as a page.

    The file has the model's image size, its current steps, and metadata, as JSON: its name, steps and classes, and how
    images are prepared (input_size, mean, std, ...).

    Args:
        model: timm model, converted or not. An 'aoti' or 'pt2' file runs on its device.
        path: New file, which ends in .onnx or .html, or in .pt2 for the other formats.
        format: 'onnx', for ONNX Runtime and others; 'html', a page that classifies pictures in a browser, by weights
            in 4 bits, for ViTs of ordinary blocks; 'pt2', for torch.export.load; 'aoti', compiled for this kind of
            processor, for torch._inductor.aoti_load_package. It takes contiguous images, and checks their layout, size
            and dtype only with AOTI_RUNTIME_CHECK_INPUTS=1 in the environment. None: by the ending of the file.
        int8: Store weights as int8, with a scale for each row, and compute linear layers in it (only 'onnx').

    Raises ImportError if a package is missing, ValueError if the file exists or the model cannot be exported.

    Examples:
        >>> import onnxruntime
        >>> path = export_model(student, 'student.onnx')
        >>> session = onnxruntime.InferenceSession(path)
        >>> logits, = session.run(None, {'images': images.numpy()})
    """
    path, model = Path(path), unwrap_model(model)
    if format is None:
        format = next((name for name, row in FORMATS.items() if row.suffix == path.suffix), 'onnx')
    suffix, write = FORMATS[one_of(tuple(FORMATS))('format', format)]
    odes, dtype = find_ode_blocks(model), dtype_of(model)
    for wrong, why in (
            (path.suffix != suffix or path.is_dir() or (path.exists() and not overwrite),
             f"'{path}' exists, or does not end in {suffix}. Give another file, or overwrite=True (--overwrite)."),
            (int8 and format != 'onnx', f'The format {format} stores no int8. Choose the format onnx.'),
            (format == 'onnx' and dtype not in (torch.float32, torch.float16),
             f'ONNX Runtime does not run {dtype}. Call model.float() first, or choose the format pt2.'),
            (any(ode.config.adaptive for ode in odes),
             "A file has fixed steps. Set another method first, such as model.blocks.method = 'rk4'.")):
        if wrong:
            raise ValueError(why)
    packages = ['onnx', 'onnxscript', *['onnxruntime'] * int8] if format == 'onnx' else []
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{format} needs {' and '.join(missing)}. Type: pip install {' '.join(missing)}")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if format in ('onnx', 'html'):
        copied.cpu()
    program: Any = copied.float() if format == 'html' else _exported(copied, dtype)
    about: Any = {**metadata(model), 'int8': int8, 'timm_odevit': __version__}
    about = {key: json.dumps(value) for key, value in about.items() if value not in (None, [])}
    with staged(path.parent, path.name) as aside:
        write(program, aside / path.name, about)
        if int8:
            write_int8(aside / path.name, aside / path.name)
    return path


def _exported(model: Any, dtype: torch.dtype) -> ExportedProgram:
    # two images: torch.export takes a size of 1 as fixed
    images = torch.zeros(2, *data_config(model)['input_size'], dtype=dtype, device=next(model.parameters()).device)
    try:
        batch = torch.export.Dim('batch', max=2 ** 20)  # without a bound, merged tokens could overflow an index
        exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    except Exception as e:  # whatever a model's own code leads to
        raise ValueError(f'torch.export cannot export this {type(model).__name__}: {one_line(e)}') from e
    for node in exported.graph.nodes:
        node.meta.pop('stack_trace', None)  # names files of this machine
    return exported


def metadata(model: Any) -> dict[str, Any]:
    """What a file says of a model."""
    odes, name = find_ode_blocks(model), model_name(model)
    steps: Any = [ode.steps for ode in odes]
    if len(odes) == 1:
        steps, whole = steps[0], not hasattr(odes[0].shared.phases[0], 'attention')
        if odes[0].config == replace(DEFAULT, method='euler' if whole else 'lie_trotter', phases=steps, steps=steps,
                                     T=steps):  # each block is used once
            name = get_model_args(model).get('base') or name.partition('.')[0]
            name, steps = f"{name} with {steps} block{'s' * (steps > 1)}", None
    return {'model': name, 'steps': steps, 'classes': class_names(model), 'num_classes': model.num_classes,
            **data_config(model)}


def load_exported(path: str | Path) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The model of an 'onnx' or 'pt2' file, for images [B, C, H, W], and its metadata; or ValueError."""
    try:
        if Path(path).suffix == '.onnx':
            import onnxruntime
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
            about: Any = session.get_modelmeta().custom_metadata_map
            dtype = getattr(torch, session.get_inputs()[0].type[7:-1])  # of 'tensor(...)'

            def run(images: Tensor) -> Tensor:
                return torch.from_numpy(session.run(None, {'images': images.to(dtype).numpy()})[0])
        else:
            program = torch.export.load(path, extra_files=(extra := {METADATA: ''}))
            module, like, about = program.module(), next(program.parameters()), json.loads(extra[METADATA])

            def run(images: Tensor) -> Tensor:
                return module(images.to(like))  # type: ignore[no-any-return]
        about = {key: json.loads(value) for key, value in about.items()}
        return run, {**about, 'images': {key: about[key] for key in PREPARED}}
    except Exception as e:
        raise ValueError(f"Cannot run '{path}': {one_line(e)}. Give a file of odevit export, as onnx (pip install "
                         'onnxruntime) or pt2.') from e


def _round(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight as int8, and a scale for each row, or token of a position embedding [1, N, D]; None for a small one."""
    if weight.ndim < 2 or weight.numel() < 4096 or not weight.is_floating_point():
        return None
    rows = [2] if weight.ndim == 3 else list(range(1, weight.ndim))
    scale = weight.abs().amax(dim=rows, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def _round_initializers(graph: Any) -> None:
    """Store the large weights of an ONNX graph that are still floats as int8."""
    from onnx import helper, numpy_helper
    for tensor in list(graph.initializer):
        rounded = _round(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
        if rounded is not None:
            name = tensor.name
            graph.node.insert(0, helper.make_node('Mul', [f'{name}_scale', f'{name}_float'], [name]))
            graph.node.insert(0, helper.make_node('Cast', [f'{name}_int8'], [f'{name}_float'], to=tensor.data_type))
            graph.initializer.append(numpy_helper.from_array(rounded[1].numpy(), f'{name}_scale'))
            tensor.CopyFrom(numpy_helper.from_array(rounded[0].numpy(), f'{name}_int8'))
