"""A classifier as one HTML file: its weights in 4 bits, and JavaScript that runs them in a browser."""
import base64
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from timm import layers
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..convert.conversion import convert_
from ..ode.blocks import OdeBlocks
from ..ode.config import DEFAULT
from ..ode.fields import CenterNorm, LipschitzField, NativeField, PiecewiseField
from ..ode.methods import Euler, LieTrotter
from ..ode.solver import Solver
from ..quantization import is_rounded, packed

# what page.html computes, or what does nothing there
MODULES = (
    VisionTransformer, Block, layers.Attention, layers.LayerNorm, layers.LayerScale, layers.Mlp, layers.PatchEmbed,
    layers.DropPath, layers.GELU, layers.PatchDropout, nn.Conv2d, nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm,
    nn.Linear, nn.ModuleList, nn.Sequential, OdeBlocks, Solver, Euler, LieTrotter, CenterNorm, LipschitzField,
    NativeField, PiecewiseField)
LAYERS = ('cls_token reg_token pos_embed patch_embed.proj norm_pre norm fc_norm head '
          'norm1 qkv q_norm k_norm proj ls1 norm2 fc1 fc2 ls2').split()


def write_html(model: Any, _: Tensor, path: Path, about: dict[str, str]) -> None:
    """Write a classifier, in eval mode on the CPU, as a page; ValueError for one that it cannot run."""
    model.float()
    page = {key: json.loads(value) for key, value in about.items()}
    if found := next(_obstacles(model, page), None):
        raise ValueError(
            f"A page cannot run this model: {found}. It runs timm's VisionTransformer of ordinary parts, converted "
            '(lie_trotter, euler) or not, on square RGB images. For others, choose the format onnx.')
    if not isinstance(model.blocks, OdeBlocks):
        convert_(model, phases=len(model.blocks), keep_original=False)
    ode, state, prefix = model.blocks, _state(model), 0 if model.pool_include_prefix else model.num_prefix_tokens
    block = getattr(ode.shared.phases[0], 'block', None)
    page |= {
        'tensors': [[*name.split('.', 1), t.numel(), is_rounded(t)] for name, t in state.items()],
        'patch': model.patch_embed.patch_size, 'pool': [0, 1] if model.global_pool == 'token' else [prefix, None],
        'heads': block.attn.num_heads if block else ode.shared.phases[0].num_heads, 'center': block is None,
        'eps': next((m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)), 0.), 'method': ode.method,
        'T': ode.config.T, 'borders': [t for t in ode.shared.borders if t < ode.config.T - 1e-6],
        'times': getattr(ode.shared, 'times', [0]), 'which': getattr(ode.shared, 'which', [0])}
    text = Template(Path(__file__).with_name('page.html').read_text(encoding='utf-8')).substitute(
        title=escape(page['model']), model=json.dumps(page).replace('<', '\\u003c'),  # a name may be a stranger's
        weights=base64.b64encode(b''.join(tensor.numpy().tobytes() for tensor in packed(state).values())).decode())
    path.write_text(text, encoding='utf-8')


def _state(model: Any) -> dict[str, Tensor]:
    """The tensors of a model, by 'host' or the number of a block, and a short name."""
    blocks = getattr(getattr(model.blocks, 'shared', None), 'phases', model.blocks)
    inner = {f"{i}.{re.sub('^(attn|mlp)[.](?!norm)', '', name)}": tensor for i, block in enumerate(blocks)
             for name, tensor in getattr(block, 'block', block).state_dict().items()}
    return {f'host.{k}': v for k, v in model.state_dict().items() if not k.startswith('blocks.')} | inner


def _obstacles(model: Any, about: dict[str, Any]) -> Iterator[str]:
    modules = dict(model.named_modules())
    yield from (f"{name or 'it'} is a {type(m).__name__}" for name, m in modules.items() if type(m) not in MODULES)
    ode, size, patch = model.blocks, about['input_size'], model.patch_embed.patch_size
    config = getattr(ode, 'config', DEFAULT)
    norms = {(m.eps, m.elementwise_affine) for m in modules.values() if isinstance(m, nn.LayerNorm)}
    yield from (what for what, wrong in {
        f'it has {model.num_classes} classes': model.num_classes < 2,
        f'its images are {size} [C, H, W], its patches {list(patch)}':
            size[::2] != [3, size[1]] or size[1] % patch[0] or size[1] % patch[1],
        'its images are prepared with {interpolation}, {crop_mode}, {crop_pct}'.format(**about):
            about['interpolation'] not in ('bicubic', 'bilinear') or about['crop_mode'] == 'border'
            or about['crop_pct'] > 1,
        f'it pools tokens by {model.global_pool!r}': model.global_pool not in ('token', 'avg'),
        'its norms have no weights, or several eps': len(norms) > 1 or any(not affine for _, affine in norms),
        'its GELU is an approximation': any(getattr(m, 'approximate', 'none') != 'none' for m in modules.values()),
        'it merges tokens, or images may halt': config.tokens < 1 or config.halting,
        'it kept blocks of the base': getattr(ode, 'before', ()) or getattr(ode, 'after', ()),
    }.items() if wrong)
    yield from (f'it has a parameter {name}' for name in _state(model)
                if re.sub('[.](weight|bias|gamma)$', '', name.split('.', 1)[1]) not in LAYERS)
