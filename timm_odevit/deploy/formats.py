"""What each format of an exported model needs, and how it is written."""
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

__all__ = ['FORMATS', 'METADATA', 'Format', 'check_installed', 'round_weights']

METADATA = 'metadata.json'  # in a .pt2 file of torch.export
LARGEST = 2_000_000_000  # bytes of weights; an ONNX file is a protobuf message, which ends at 2 GiB


class Format(NamedTuple):
    """A format: the ending of its files, the packages that it needs, those that int8 needs too, and its writer."""
    suffix: str
    packages: tuple[str, ...]
    int8_packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Path, dict[str, str], bool], Any]


def check_installed(name: str, int8: bool) -> None:
    """Raise ImportError for a missing package, and OSError for a missing compiler; both say what to install."""
    chosen = FORMATS[name]
    missing = [package for package in (*chosen.packages, *(chosen.int8_packages if int8 else ()))
               if find_spec(package) is None]
    if missing:
        raise ImportError(f"{name}{' with int8' if int8 else ''} needs {' and '.join(missing)}. Type: pip install "
                          "'timm-odevit[deploy]'")
    if name == 'aoti':
        from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second, so only where it is needed
        from torch._inductor.exc import InvalidCxxCompiler
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise OSError('aoti compiles the model, but no C++ compiler was found. Install one, such as g++ (Debian, '
                          'Ubuntu: apt install g++), or name yours in the environment variable CXX.') from None


def round_weights(model: nn.Module) -> None:
    """Store the weights of all linear layers as int8, one scale per output channel, in tensors of plain torch types."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.utils import unwrap_tensor_subclass
    quantize_(model, Int8WeightOnlyConfig())
    unwrap_tensor_subclass(model)  # otherwise the file holds pickled classes of torchao, and needs it to be read


def _write_onnx(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    import onnx
    size = sum(tensor.numel() * tensor.element_size() for tensor in exported.state_dict.values())
    if size > LARGEST:
        raise ValueError(f'The weights take {size / 1e9:.1f} GB, but an ONNX file holds at most 2 GB. Choose the '
                         'format pt2.')
    program: Any = torch.onnx.export(
        exported, input_names=['images'], output_names=['output'], dynamic_shapes=({0: 'batch'},), verbose=False)
    program.save(path, external_data=False)
    if int8:
        from onnxruntime.quantization import quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process
        quant_pre_process(path, path, skip_onnx_shape=True, skip_symbolic_shape=True)  # folds transposed weights
        # 7 bits: on a processor without VNNI, sums of two products of 8 bits each overflow
        quantize_dynamic(path, path, op_types_to_quantize=['MatMul', 'Gemm'], reduce_range=True)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, about)
    onnx.save(model, path)


def _write_pt2(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    torch.export.save(exported, path, extra_files={METADATA: json.dumps(about)})


def _write_aoti(exported: ExportedProgram, path: Path, about: dict[str, str], int8: bool) -> None:
    from torch._inductor import aoti_compile_and_package, config
    configs: dict[str, Any] = {'aot_inductor.metadata': about}
    if hasattr(config.aot_inductor, 'check_lowerbound'):  # with AOTI_RUNTIME_CHECK_INPUTS=1, it would refuse one image
        configs['aot_inductor.check_lowerbound'] = False
    aoti_compile_and_package(exported, package_path=str(path), inductor_configs=configs)


FORMATS = {
    'onnx': Format('.onnx', ('onnx', 'onnxscript'), ('onnxruntime',), _write_onnx),
    'pt2': Format('.pt2', (), ('torchao',), _write_pt2),
    'aoti': Format('.pt2', (), ('torchao',), _write_aoti),
}
