"""A classifier as one HTML file: its weights in 4 bits, and JavaScript that runs them in a browser."""
import base64
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from timm import layers
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..convert.conversion import convert_
from ..ode.blocks import OdeBlocks
from ..ode.fields import CenterNorm, LipschitzField, NativeField, PiecewiseField
from ..ode.methods import Euler, LieTrotter
from ..ode.solver import Solver
from ..quantization import is_rounded, packed

# what page.html computes, or what does nothing there
MODULES = (
    VisionTransformer, Block, layers.Attention, layers.LayerNorm, layers.LayerScale, layers.Mlp, layers.PatchEmbed,
    layers.DropPath, layers.PatchDropout, nn.Conv2d, nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear,
    nn.ModuleList, nn.Sequential, OdeBlocks, Solver, Euler, LieTrotter, CenterNorm, LipschitzField, NativeField,
    PiecewiseField)
LAYERS = {*'patch_embed.proj norm_pre norm fc_norm head'.split(), *(
    f'blocks.{name}' for name in 'norm1 qkv q_norm k_norm proj ls1 norm2 fc1 fc2 ls2'.split())}


def write_html(model: Any, path: Path, about: dict[str, str]) -> None:
    """Write a classifier, in eval mode and float32 on the CPU, as a page; ValueError for one that it cannot run."""
    known = {key: json.loads(value) for key, value in about.items()}
    if found := next(_obstacles(model, known), None):
        raise ValueError(
            f"A page cannot run this model: {found}. It runs timm's VisionTransformer, converted (lie_trotter, euler) or "
            'not, on square RGB images, with two or more classes, softmax attention, GELU, LayerNorm, LayerScale, and '
            'a class token or the average of tokens. For others, choose the format onnx.')
    if not isinstance(model.blocks, OdeBlocks):
        convert_(model, phases=len(model.blocks), keep_original=False)
    ode, state = model.blocks, {f'host.{k}': v for k, v in model.state_dict().items() if not k.startswith('blocks.')}
    for i, phase in enumerate(ode.shared.phases):
        inner = getattr(phase, 'block', phase)
        state |= {f'{i}.{_short(k)}': v for k, v in inner.state_dict().items()}
    first, prefix = model.patch_embed, 0 if model.pool_include_prefix else model.num_prefix_tokens
    known |= {
        'tensors': [[*name.split('.', 1), t.numel(), is_rounded(t)] for name, t in state.items()],
        'patch': first.patch_size, 'heads': getattr(inner, 'attn', inner).num_heads, 'method': ode.method,
        'pool': [0, 1] if model.global_pool == 'token' else [prefix, None], 'T': ode.config.T,
        'center': inner is phase, 'eps': next((m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)), 0.),
        'times': getattr(ode.shared, 'times', [0]), 'which': getattr(ode.shared, 'which', [0]),
        'borders': ode.shared.borders}
    weights = b''.join(tensor.numpy().tobytes() for tensor in packed(state).values())
    page = Template(files(__package__).joinpath('page.html').read_text(encoding='utf-8'))
    path.write_text(page.substitute(
        title=escape(known['model']), model=json.dumps(known).replace('<', '\\u003c'),  # a name may be a stranger's
        weights=base64.b64encode(weights).decode()), encoding='utf-8')


def _short(name: str) -> str:
    return name.removeprefix('attn.').removeprefix('mlp.')


def _obstacles(model: Any, about: dict[str, Any]) -> Iterator[str]:
    """What of a model the page cannot run."""
    for name, module in model.named_modules():
        if type(module) not in MODULES:
            yield f"{name or 'it'} is a {type(module).__name__}"
    config = getattr(model.blocks, 'config', None)
    norms = {(m.eps, m.weight is None) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    side, patches = about['input_size'][1], [*model.patch_embed.patch_size]
    blocks = (*model.blocks.shared.phases,) if config else model.blocks
    names = [f'blocks.{_short(k)}' for block in blocks for k in getattr(block, 'block', block).state_dict()]
    names += [k for k in model.state_dict() if not k.startswith('blocks.')]
    for wrong, what in (
            (model.num_classes < 2, f'its number of classes is {model.num_classes}'),
            (about['input_size'] != [3, side, side] or any(side % patch for patch in patches),
             f"its images are {about['input_size']} [C, H, W], with patches of {patches}"),
            (about['interpolation'] not in ('bicubic', 'bilinear') or about['crop_mode'] == 'border'
             or about['crop_pct'] > 1, 'its images are prepared with {interpolation}, {crop_mode}'.format(**about)),
            (model.global_pool not in ('token', 'avg'), f'it pools tokens by {model.global_pool!r}'),
            (len(norms) > 1 or any(bare for _, bare in norms), 'its norms have no weights, or several eps'),
            (any(getattr(m, 'approximate', 'none') != 'none' for m in model.modules()), 'its GELU is an approximation'),
            (config and (config.tokens < 1 or config.halting), 'it merges tokens, or lets images halt'),
            (config and [*model.blocks.before, *model.blocks.after], 'it kept some blocks of the base')):
        if wrong:
            yield what
    for name in names:
        if name.rpartition('.')[0] not in LAYERS and name not in ('cls_token', 'reg_token', 'pos_embed'):
            yield f'it has a parameter {name}'
