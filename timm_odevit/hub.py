"""Save a model as a folder that `timm.create_model('local-dir:...')` rebuilds exactly."""
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import timm
import torch
from safetensors.torch import save_file
from timm.layers import to_2tuple
from timm.models import save_for_hf
from timm.utils import unwrap_model
from torch import nn

from .blocks import OdeBlocks, find_ode_blocks
from .config import PREFIX, OdeConfig

__all__ = ['describe', 'save_pretrained']

WEIGHTS = 'model.safetensors'
CONFIG = 'config.json'
# attributes that do not change what an eval-mode model computes
_RUNTIME = ('training', 'grad_checkpointing', 'fused_attn', 'distilled_training', 'evaluations')
_TOP = ('img_size', 'num_classes', 'in_chans', 'global_pool')  # arguments that a caller may override on loading


def save_pretrained(
        model: nn.Module,
        folder: Union[str, Path],
        *,
        base: Optional[str] = None,
        base_args: Optional[Dict[str, Any]] = None,
) -> Path:
    """Save an ODE-ViT, or any timm model, in timm's own format: config.json and model.safetensors.

    Both files are complete or not there at all, and a saved model is rebuilt once, without weights, to make sure that
    the folder describes it. Settings are those of this moment, such as `model.blocks.steps`.

    Args:
        model: Model made by `timm.create_model`, converted or not; may be wrapped for compilation or distribution.
        folder: Folder, made if need be; files of the same names are replaced.
        base: timm name of the base, for a converted model that was not made by `timm.create_model`.
        base_args: Keywords of the base, likewise.

    Returns:
        The folder.

    Raises:
        ValueError: The description would rebuild another model; the message names the first difference.
    """
    model = unwrap_model(model)
    architecture, args, rebuilt = _describe(model, base, base_args)
    rebuilt.pretrained_cfg = getattr(model, 'pretrained_cfg', None) or rebuilt.pretrained_cfg
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"Cannot save to '{folder}': a file of that name exists. Give a folder.")
    temporary = Path(tempfile.mkdtemp(prefix=f'.{folder.name}-', dir=folder.parent))
    try:
        only_config: Any = None  # neither True nor False: timm writes no weights
        save_for_hf(rebuilt, str(temporary), safe_serialization=only_config)
        save_file(weights, temporary / WEIGHTS, metadata={'format': 'pt'})
        path = temporary / CONFIG
        config = json.loads(path.read_text())
        config.update(architecture=architecture, model_args=args)
        if 'img_size' in args:  # timm before 1.0.31 writes the size of the pretrained model
            config['pretrained_cfg']['input_size'] = [args['in_chans'], *to_2tuple(args['img_size'])]
        path.write_text(json.dumps(config, indent=2) + '\n')
        folder.mkdir(exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            os.replace(temporary / name, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def describe(
        model: nn.Module,
        *,
        base: Optional[str] = None,
        base_args: Optional[Dict[str, Any]] = None,
) -> Tuple[str, Dict[str, Any]]:
    """Architecture and keywords with which `timm.create_model` rebuilds a model.

    Raises:
        ValueError: No description that rebuilds the model was found; the message says what to pass.
    """
    return _describe(model, base, base_args)[:2]


def _describe(
        model: nn.Module,
        base: Optional[str],
        base_args: Optional[Dict[str, Any]],
) -> Tuple[str, Dict[str, Any], Any]:
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    architecture = base or cfg.get('architecture')
    hint = "Pass base='<timm name>' and base_args={...}, with which timm.create_model built it."
    if not architecture:
        raise ValueError(
            f'This {type(model).__name__} was not made by timm.create_model, so it has no name to reload it by. {hint}')
    # timm records what create_model was given; versions before 1.0.31 do not
    args = dict(getattr(model, '_model_args', {})) if base_args is None else dict(base_args)
    args = {k: v for k, v in args.items() if not (k.endswith('drop_rate') or k == 'drop_path_rate')}
    args.update({name: value for name, value in _current(model).items() if value is not None})
    blocks = find_ode_blocks(model)
    if blocks:
        # the settings are those of this moment
        args = {k: v for k, v in args.items() if not k.startswith(PREFIX)}
        if architecture == 'odevit_converted' or not architecture.startswith('odevit_'):
            own = dict(args.pop('base_args', None) or {}, **{k: v for k, v in args.items() if k not in ('base', *_TOP)})
            args = {'base': args.get('base', architecture), 'base_args': own,
                    **{k: v for k, v in args.items() if k in _TOP}}
            architecture = 'odevit_converted'
        args.update(_settings(blocks).to_args())
    try:
        args = json.loads(json.dumps(args))
    except TypeError as e:
        raise ValueError(f'A keyword of this model cannot be written as JSON ({e}). {hint}') from None
    with torch.device('meta'):
        rebuilt = timm.create_model(architecture, **args)
    difference = _first_difference(_structure(model), _structure(rebuilt))
    if difference:
        raise ValueError(f'{architecture} with {args} would not rebuild this model: {difference}. {hint}')
    return architecture, args, rebuilt


def _settings(blocks: List[OdeBlocks]) -> OdeConfig:
    """The settings from which all of a model's OdeBlocks follow."""
    config = blocks[0].config
    if len(blocks) > 1:  # stages: what each took from its own depth is left out
        config = replace(config, steps=tuple(b.steps for b in blocks), T=None, boundaries='uniform')
    return config


def _current(model: nn.Module) -> Dict[str, Any]:
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)
    pool = getattr(model, 'global_pool', None)
    return {
        'img_size': list(size) if size is not None else None,
        'num_classes': getattr(model, 'num_classes', None),
        'in_chans': getattr(model, 'in_chans', None),
        'global_pool': pool if isinstance(pool, str) else None,
    }


def _structure(model: nn.Module) -> List[str]:
    """Kind and settings of every module but dropout, and the shape of every tensor, in order."""
    lines = []
    for name, module in model.named_modules():
        if 'drop' not in name.rsplit('.', 1)[-1]:
            about = '' if isinstance(module, nn.ParameterDict) else module.extra_repr()  # a device is no difference
            lines.append(f'{name}: {type(module).__name__}({about})')
            lines += [f'{name}.{k}'.strip('.') + f' = {v}' for k, v in sorted(vars(module).items())
                      if type(v) in (bool, int, float, str) and not k.startswith('_') and k not in _RUNTIME]
    lines += [f'{name}: {list(tensor.shape)}' for name, tensor in model.state_dict().items()]
    return lines


def _first_difference(ours: List[str], theirs: List[str]) -> str:
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f'it has {a}, the rebuilt one {b}'
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        return f'one has {longer[min(len(ours), len(theirs))]}, the other nothing in its place'
    return ''
