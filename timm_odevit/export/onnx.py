"""ONNX files: weights as floats, in int8 or in 4 bits; a fixed number of steps, or one that is an input."""
import copy
import tempfile
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import hash_of
from ..files import staged
from ..ode.blocks import find_ode_blocks
from ..ode.fields import Context
from ..ode.methods import Step
from ..quantization import BITS, GROUP, Coded, in_groups, is_rounded
from .program import proto

DOMAIN = 'timm_odevit'
_VECTOR = 128  # numbers that have 16 bits where those of matrices have 4
Matrices = dict[Any, tuple[Coded, Tensor]]  # their groups and numbers


def write_onnx(
        model: nn.Module, images: Tensor, path: Path, about: dict[str, str], int8: bool, bits: int | None,
        any_steps: bool,
) -> None:
    """Write a model to a file; its steps are taken out of it if their number is to be an input."""
    import onnx
    groups, loops = _groups_of(model, model) if bits else {}, list[Any]()
    if any_steps:
        ode, = find_ode_blocks(model)
        K, (steps, state) = ode.steps, _take_steps_out(model, ode, images)
        loops = [_stored(proto(_AnyLength(step), 'y', x=state, h=torch.tensor(1.)), int8, groups) for step in steps]
    whole = _stored(proto(model, 'output', images=images), int8, groups)
    if any_steps:
        _put_loops(whole.graph, [loop.graph for loop in loops], steps[0].h, K)
    onnx.helper.set_model_props(whole, about)
    onnx.save(whole, path)


def rewrite(source: Path, path: Path, model: nn.Module, small: nn.Module | None) -> None:
    """Write the int8 form of a file that holds a model's floats; with the matrices of `small`, in 4 bits, if given."""
    import onnx
    whole = onnx.load(source)
    about = {entry.key: entry.value for entry in whole.metadata_props}
    whole = _stored(whole, True, _groups_of(model, small) if small else {})
    onnx.helper.set_model_props(whole, {**about, 'int8': 'true', **({'bits': str(BITS)} if small else {})})
    with staged(path.parent, path.name) as aside:
        onnx.save(whole, aside / path.name)


def _groups_of(model: nn.Module, small: nn.Module) -> Matrices:
    """The groups of the matrices of `small`, and their numbers, by the floats of a model; also of transposed ones."""
    found: Matrices = {}
    for tensor, other in zip(model.state_dict().values(), small.state_dict().values(), strict=True):
        if is_rounded(tensor):
            groups, values = found[hash_of([tensor]), tensor.shape] = _pair(other)
            if tensor.ndim == 2:
                found[hash_of([tensor.T]), values.T.shape] = groups, values.T
    return found


def _pair(tensor: Tensor) -> tuple[Coded, Tensor]:
    groups = in_groups(tensor)
    return groups, groups.values(tensor.shape)


def _stored(model: Any, int8: bool, groups: Matrices) -> Any:
    """A model with linear layers that compute in int8, and with its matrices in groups, if there are any."""
    import onnx
    from onnx import helper, numpy_helper
    known: Matrices = {}
    if int8:
        import onnxruntime
        from onnxruntime.quantization import quantize_dynamic
        from onnxruntime.quantization.onnx_model import ONNXModel
        weights = {tensor.name for tensor in model.graph.initializer}  # transposed ones are folded
        if any(node.op_type == 'Transpose' and node.input[0] in weights for node in model.graph.node):
            options = onnxruntime.SessionOptions()  # like quant_pre_process, which fails in some versions
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            with tempfile.TemporaryDirectory() as folder:
                options.optimized_model_filepath = f'{folder}/model.onnx'
                onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
                model.graph.CopyFrom(onnx.load(options.optimized_model_filepath).graph)  # not its imports
        helper.set_model_props(model, {'onnx.quant.pre_process': 'onnxruntime.quant'})  # it needs no more
        ONNXModel(model).replace_gemm_with_matmul()  # transposes weights, under names that depend on the version
    kinds = 'Gemm', 'MatMul', 'Transpose'
    factors = {name for node in model.graph.node if node.op_type in kinds for name in node.input}
    for tensor in model.graph.initializer if groups else ():
        weight = torch.from_numpy(numpy_helper.to_array(tensor).copy())
        found = groups.get((hash_of([weight]), weight.shape))
        if found or (is_rounded(weight) and tensor.name in factors):  # what was folded is in none of the groups
            known[tensor.name] = found = found or _pair(weight)
            tensor.CopyFrom(numpy_helper.from_array(found[1].contiguous().numpy(), tensor.name))
    if int8:
        with tempfile.TemporaryDirectory() as folder:
            # 7 bits: without VNNI, sums of two products of 8 bits overflow
            quantize_dynamic(model, f'{folder}/model.onnx', op_types_to_quantize=['MatMul', 'Gemm'], reduce_range=True,
                             per_channel=True, extra_options={'DefaultTensorType': onnx.TensorProto.FLOAT})
            model = onnx.load(f'{folder}/model.onnx')
        del model.graph.value_info[:]
    if groups:
        for tensor in list(model.graph.initializer):
            stem = tensor.name.removesuffix('_quantized')
            if stem in known:
                _unpack(model.graph, tensor, *known[stem], stem)
        for tensor in model.graph.initializer:
            name, array = tensor.name, numpy_helper.to_array(tensor)
            if array.dtype == np.float32 and array.size >= _VECTOR:
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float16), f'{name}.half'))
                _insert(model.graph, 'Cast', [tensor.name], name, to=onnx.TensorProto.FLOAT)
        # a function in the file, folded when it is loaded: of 33 rows, the last has the zero points of the groups
        text = Template(Path(__file__).with_name('unpack.txt').read_text(encoding='utf-8'))
        model.functions.append(onnx.parser.parse_function(text.substitute(domain=DOMAIN, group=GROUP, rows=GROUP + 1)))
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    elif int8:
        for tensor in list(model.graph.initializer):  # the large ones that are still floats
            if rounded := _round(torch.from_numpy(numpy_helper.to_array(tensor).copy())):
                name = tensor.name
                _insert(model.graph, 'Mul', [f'{name}_scale', f'{name}_float'], name)
                _insert(model.graph, 'Cast', [f'{name}_int8'], f'{name}_float', to=tensor.data_type)
                model.graph.initializer.append(numpy_helper.from_array(rounded[1].numpy(), f'{name}_scale'))
                tensor.CopyFrom(numpy_helper.from_array(rounded[0].numpy(), f'{name}_int8'))
    return model


def _insert(graph: Any, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
    import onnx
    graph.node.insert(0, onnx.helper.make_node(kind, inputs, [output], **attributes))


def _unpack(graph: Any, tensor: Any, groups: Coded, values: Tensor, stem: str) -> None:
    """Put the groups of a matrix in the place of its numbers, or of their int8."""
    import onnx
    rows = torch.cat([groups.codes.T, groups.zero.T]).numpy()  # [33, groups]
    even = (0, 0), (0, len(groups.scale) % 2)  # to an even number of groups
    upper, lower = np.pad(rows, even).reshape(2, -1)
    scale = np.pad(groups.scale.numpy().T, even)
    name, transposed = tensor.name, not values.is_contiguous()
    shape = np.array(values.shape[::-1] if transposed else values.shape, np.int64)
    for part, array in (('pairs', upper << 4 | lower), ('scale', scale), ('shape', shape)):
        graph.initializer.append(onnx.numpy_helper.from_array(array, f'{name}.{part}'))
    # last first: each node goes before the others
    made = name
    if name != stem:  # int8
        _insert(graph, 'Cast', [f'{name}.round'], made, to=tensor.data_type)
        _insert(graph, 'Round', [f'{name}.ratio'], f'{name}.round')
        _insert(graph, 'Div', [f'{name}.floats', f'{stem}_scale'], f'{name}.ratio')
        made = f'{name}.floats'
    if transposed:
        _insert(graph, 'Transpose', [f'{name}.rows'], made, perm=[1, 0])
        made = f'{name}.rows'
    _insert(graph, 'Unpack', [f'{name}.{part}' for part in ('pairs', 'scale', 'shape')], made, domain=DOMAIN)
    graph.initializer.remove(tensor)


class _AnyLength(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.field = step, step.field

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        step = copy.copy(self.step)
        step.h = h.item()  # type: ignore[assignment]
        return step.advance(x, self.field.context((), {}, self.field.fold()))


class _Solve(nn.Module):
    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.field = field

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.onnx.ops.symbolic('Solve', [x], dtype=x.dtype, shape=x.shape)


def _take_steps_out(model: nn.Module, ode: Any, images: Tensor) -> tuple[list[Step], Tensor]:
    """Put one node in the place of a model's steps; a step for each span, as long as this, and a state."""
    caught: list[Any] = []
    ode.steps = ode.fewest_steps
    ode.solver[0].register_forward_pre_hook(lambda _, inputs: caught.append(inputs))
    model(images)
    (state, *contexts), steps = caught[0], [*ode.solver]
    for wrong, why in (
            (ode.config.tokens < 1, f'tokens={ode.config.tokens:g} merges others at each step'),
            ({*ode.shared.jumps} - {*ode.shared.borders}, 'its shared blocks take turns within a span'),
            (any(abs(step.h - steps[0].h) > 1e-6 for step in steps), 'its spans are not of equal length'),
            (not contexts, 'the model runs each of them itself'),
            (given := [name for each in contexts for name, value in each.block_kwargs.items() if value is not None],
             f"its blocks take {' and '.join(given)} besides the state")):
        if wrong:
            raise ValueError(f'The steps of this model cannot be an input: {why}. Leave out any_steps (--any-steps).')
    ode.solver = nn.ModuleList([_Solve(ode.shared)])
    return steps, state


def _put_loops(graph: Any, bodies: list[Any], span: float, K: int) -> None:
    """Put a loop over the steps of each span in the place of the node that stands for all."""
    from onnx import TensorProto, compose, helper, numpy_helper
    info = helper.make_tensor_value_info
    at = next(i for i, node in enumerate(graph.node) if node.op_type == 'Solve')
    state, after = graph.node[at].input[0], graph.node[at].output[0]
    nodes: list[Any] = []

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def number(name: str, value: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(torch.tensor(value).numpy(), name))
        return name
    graph.input.append(info('steps', TensorProto.INT64, []))
    steps, spans = number('steps', K), number('solve.spans', len(bodies))
    at_least = add('Max', [steps, spans], 'solve.steps')
    for i, body in enumerate(bodies):
        own = f'solve.{i}.'
        more = add('Add', [at_least, number(f'{own}more', len(bodies) - 1 - i)], f'{own}sum')
        count = add('Div', [more, spans], f'{own}count')
        floats = add('Cast', [count], f'{own}floats', to=TensorProto.FLOAT)
        add('Div', [number(f'{own}length', np.float32(span)), floats], f'{own}h')
        inner = compose.add_prefix_graph(body, own)
        del inner.input[:], inner.output[:]
        inner.input.extend([info(f'{own}step', TensorProto.INT64, []), info(f'{own}on', TensorProto.BOOL, []),
                            info(f'{own}x', TensorProto.FLOAT, None)])
        inner.node.append(helper.make_node('Identity', [f'{own}on'], [f'{own}on_too']))
        inner.output.extend([info(f'{own}on_too', TensorProto.BOOL, []), info(f'{own}y', TensorProto.FLOAT, None)])
        state = add('Loop', [count, '', state], after if i == len(bodies) - 1 else f'{own}state', body=inner)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*rest[:at], *nodes, *rest[at + 1:]])


def _round(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight as int8, and a scale for each row, or token of a position embedding [1, N, D]; None for a small one."""
    if weight.ndim < 2 or weight.numel() < 4096 or not weight.is_floating_point():
        return None
    rows = [2] if weight.ndim == 3 else list(range(1, weight.ndim))
    scale = weight.abs().amax(dim=rows, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round().to(torch.int8), scale
