"""ONNX files: weights as floats, in int8 or in 4 bits; a fixed number of steps, or one that is an input."""
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..files import staged
from ..ode.blocks import find_ode_blocks
from ..ode.fields import Context
from ..ode.methods import Step
from ..quantization import GROUP, Coded, in_groups, is_rounded
from .program import proto

DOMAIN = 'timm_odevit'
_VECTOR = 128  # numbers that have 16 bits where those of matrices have 4
# a function in the file, folded when it is loaded: of 33 rows, the last has the zero points of the groups
_UNPACK = f"""
<opset_import: ["" : 20], domain: "{DOMAIN}">
Unpack (pairs, scale, shape) => (values)
{{
  four = Constant <value = uint8 {{4}}> ()
  mask = Constant <value = uint8 {{15}}> ()
  upper = BitShift <direction = "RIGHT"> (pairs, four)
  lower = BitwiseAnd (pairs, mask)
  both = Concat <axis = 0> (upper, lower)
  numbers = Cast <to = 1> (both)
  row = Constant <value = int64[2] {{{GROUP + 1}, -1}}> ()
  rows = Reshape (numbers, row)
  lengths = Constant <value = int64[2] {{{GROUP}, 1}}> ()
  codes, zero = Split <axis = 0> (rows, lengths)
  centred = Sub (codes, zero)
  wide = Cast <to = 1> (scale)
  scaled = Mul (centred, wide)
  groups = Transpose <perm = [1, 0]> (scaled)
  line = Constant <value = int64[1] {{-1}}> ()
  flat = Reshape (groups, line)
  start = Constant <value = int64[1] {{0}}> ()
  count = ReduceProd <keepdims = 1> (shape)
  used = Slice (flat, start, count)
  values = Reshape (used, shape)
}}
"""


def write_onnx(
        model: nn.Module, images: Tensor, path: Path, about: dict[str, str], int8: bool, bits: int | None,
        any_steps: bool,
) -> None:
    """Write a model to a file; its steps are taken out of it if their number is to be an input."""
    import onnx
    groups, loops = _groups_of(model) if bits else {}, list[Any]()
    if any_steps:
        ode, = find_ode_blocks(model)
        K, (steps, state) = ode.steps, _take_steps_out(model, ode, images)
        loops = [_stored(proto(_AnyLength(step), 'y', x=state, h=torch.tensor(1.)), int8, groups) for step in steps]
    whole = _stored(proto(model, 'output', images=images), int8, groups)
    if any_steps:
        _put_loops(whole.graph, [loop.graph for loop in loops], steps[0].h, K)
    onnx.helper.set_model_props(whole, about)
    onnx.save(whole, path)


def rewrite(source: Path, path: Path, model: nn.Module, bits: int | None) -> None:
    """Write the int8 form of a file that holds a model's floats."""
    import onnx
    whole = onnx.load(source)
    about = {entry.key: entry.value for entry in whole.metadata_props}
    whole = _stored(whole, True, _groups_of(model) if bits else {})
    onnx.helper.set_model_props(whole, {**about, 'int8': 'true', **({'bits': str(bits)} if bits else {})})
    with staged(path.parent, path.name) as aside:
        onnx.save(whole, aside / path.name)


def _groups_of(model: nn.Module) -> dict[Any, tuple[Coded, Tensor]]:
    """The groups of each matrix, and their numbers, by the floats of which they are made; also of a transposed one."""
    found: dict[Any, tuple[Coded, Tensor]] = {}
    for tensor in model.state_dict().values():
        if is_rounded(tensor):
            groups, values = found[tensor.numpy().tobytes(), tensor.shape] = _pair(tensor)
            if tensor.ndim == 2:
                found[tensor.T.contiguous().numpy().tobytes(), values.T.shape] = groups, values.T
    return found


def _pair(tensor: Tensor) -> tuple[Coded, Tensor]:
    groups = in_groups(tensor)
    return groups, groups.values(tensor.shape)


def _stored(model: Any, int8: bool, groups: dict[Any, tuple[Coded, Tensor]]) -> Any:
    """A model with linear layers that compute in int8, and with its matrices in groups, if there are any."""
    import onnx
    from onnx import helper, numpy_helper
    known: dict[str, tuple[Coded, Tensor]] = {}
    if int8:
        from onnxruntime.quantization.onnx_model import ONNXModel
        model = _folded(model)
        ONNXModel(model).replace_gemm_with_matmul()  # transposes weights, under names that depend on the version
    for tensor in model.graph.initializer if groups else ():
        weight = torch.from_numpy(numpy_helper.to_array(tensor).copy())
        found = groups.get((weight.numpy().tobytes(), weight.shape))
        if found or is_rounded(weight):  # what was folded is in none of the groups
            known[tensor.name] = found = found or _pair(weight)
            tensor.CopyFrom(numpy_helper.from_array(found[1].contiguous().numpy(), tensor.name))
    if int8:
        model = _in_int8(model, rest=not groups)
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
        model.functions.append(onnx.parser.parse_function(_UNPACK))
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def _insert(graph: Any, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
    from onnx import helper
    graph.node.insert(0, helper.make_node(kind, inputs, [output], **attributes))


def _unpack(graph: Any, tensor: Any, groups: Coded, values: Tensor, stem: str) -> None:
    """Put the groups of a matrix in the place of its numbers, or of their int8."""
    from onnx import numpy_helper
    rows = torch.cat([groups.codes.T, groups.zero.T]).numpy()  # [33, groups]
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    upper, lower = rows.reshape(2, -1)
    scale = np.pad(groups.scale.numpy().T, ((0, 0), (0, rows.shape[1] - len(groups.scale))))
    name, transposed = tensor.name, not values.is_contiguous()
    shape = np.array(values.shape[::-1] if transposed else values.shape)
    for part, array in (('pairs', upper << 4 | lower), ('scale', scale), ('shape', shape)):
        graph.initializer.append(numpy_helper.from_array(array, f'{name}.{part}'))
    # from the last to the first, since each node goes before the others
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


def _folded(model: Any) -> Any:
    """The model with transposed weights as weights."""
    import onnx
    import onnxruntime
    weights = {tensor.name for tensor in model.graph.initializer}
    if any(node.op_type == 'Transpose' and node.input[0] in weights for node in model.graph.node):
        options = onnxruntime.SessionOptions()  # like quant_pre_process, which fails in some versions
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = f'{folder}/model.onnx'
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
            model = onnx.load(options.optimized_model_filepath)
    onnx.helper.set_model_props(model, {'onnx.quant.pre_process': 'onnxruntime.quant'})  # it needs no more
    return model


def _in_int8(model: Any, rest: bool) -> Any:
    """The model with linear layers that compute in int8; the `rest` of the large weights is stored so, too."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    with tempfile.TemporaryDirectory() as folder:
        # 7 bits: on a processor without VNNI, sums of two products of 8 bits each overflow
        quantize_dynamic(model, f'{folder}/model.onnx', op_types_to_quantize=['MatMul', 'Gemm'], reduce_range=True,
                         per_channel=True, extra_options={'DefaultTensorType': onnx.TensorProto.FLOAT})
        model = onnx.load(f'{folder}/model.onnx')
    if rest:
        _round_initializers(model.graph)
    del model.graph.value_info[:]
    return model


class _AnyLength(nn.Module):
    """A step whose length is an input."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.field = step, step.field

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        step = copy.copy(self.step)
        step.h = h.item()  # type: ignore[assignment]
        return step.advance(x, self.field.context((), {}, self.field.fold()))


class _Solve(nn.Module):
    """All steps, as one node of the graph."""

    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.field = field

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.onnx.ops.symbolic(f'{DOMAIN}::Solve', [x], dtype=x.dtype, shape=x.shape)


def _take_steps_out(model: nn.Module, ode: Any, images: Tensor) -> tuple[list[Step], Tensor]:
    """Put one node in the place of a model's steps; a step for each span, as long as this, and a state."""
    caught: list[Any] = []
    spans = [ode.t, *(t for t in ode.shared.borders if ode.t + 1e-6 < t < ode.end - 1e-6)]
    ode.config = replace(ode.config, steps=len(spans))
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


def _put_loops(graph: Any, bodies: Sequence[Any], span: float, K: int) -> None:
    """Put a loop over the steps of each span in the place of the node that stands for all."""
    from onnx import TensorProto, compose, helper, numpy_helper
    at = next(i for i, node in enumerate(graph.node) if node.op_type == 'Solve')
    state, after = graph.node[at].input[0], graph.node[at].output[0]
    nodes: list[Any] = []

    def add(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def number(name: str, value: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(value), f'solve.{name}'))
        return f'solve.{name}'
    graph.input.append(helper.make_tensor_value_info('steps', TensorProto.INT64, []))
    graph.initializer.append(numpy_helper.from_array(np.array(K), 'steps'))
    spans = number('spans', len(bodies))
    at_least = add('Max', ['steps', spans], 'solve.steps')
    for i, body in enumerate(bodies):
        more = add('Add', [at_least, number(f'{i}.more', len(bodies) - 1 - i)], f'solve.{i}.sum')
        count = add('Div', [more, spans], f'solve.{i}.count')
        floats = add('Cast', [count], f'solve.{i}.floats', to=TensorProto.FLOAT)
        add('Div', [number(f'{i}.length', np.float32(span)), floats], f'solve.{i}.h')
        inner = compose.add_prefix_graph(body, f'solve.{i}.')
        of = f'solve.{i}.x', f'solve.{i}.y'
        del inner.input[:], inner.output[:]
        inner.input.extend([
            helper.make_tensor_value_info(f'solve.{i}.step', TensorProto.INT64, []),
            helper.make_tensor_value_info(f'solve.{i}.on', TensorProto.BOOL, []),
            helper.make_tensor_value_info(of[0], TensorProto.FLOAT, None)])
        inner.node.append(helper.make_node('Identity', [f'solve.{i}.on'], [f'solve.{i}.on_too']))
        inner.output.extend([helper.make_tensor_value_info(f'solve.{i}.on_too', TensorProto.BOOL, []),
                             helper.make_tensor_value_info(of[1], TensorProto.FLOAT, None)])
        state = add('Loop', [count, '', state], after if i == len(bodies) - 1 else f'solve.{i}.state', body=inner)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*rest[:at], *nodes, *rest[at + 1:]])


def _round(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight as int8, and a scale for each row, or token of a position embedding [1, N, D]; None for a small one."""
    if weight.ndim < 2 or weight.numel() < 4096 or not weight.is_floating_point():
        return None
    rows = [2] if weight.ndim == 3 else list(range(1, weight.ndim))
    scale = weight.abs().amax(dim=rows, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def _round_initializers(graph: Any) -> None:
    """Store the large weights of an ONNX graph that are still floats as int8."""
    from onnx import numpy_helper
    for tensor in list(graph.initializer):
        rounded = _round(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
        if rounded is not None:
            name = tensor.name
            _insert(graph, 'Mul', [f'{name}_scale', f'{name}_float'], name)
            _insert(graph, 'Cast', [f'{name}_int8'], f'{name}_float', to=tensor.data_type)
            graph.initializer.append(numpy_helper.from_array(rounded[1].numpy(), f'{name}_scale'))
            tensor.CopyFrom(numpy_helper.from_array(rounded[0].numpy(), f'{name}_int8'))
