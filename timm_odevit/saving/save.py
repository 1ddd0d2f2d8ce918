"""save_pretrained: a folder that `timm.create_model('local-dir:...')` rebuilds exactly."""
import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models import get_model_args, save_for_hf
from timm.utils import unwrap_model
from torch import nn

from ..convert.merge import check_not_merged
from ..files import staged
from ..hooks import on_meta
from ..ode.blocks import find_ode_blocks
from ..ode.config import PREFIX
from ..ode.methods import Step
from ..ode.solver import Solver
from .loading import CONFIG, WEIGHTS, check_args

__all__ = ['CARD', 'REFERENCE', 'describe', 'save_pretrained', 'save_reference', 'structure']

CARD, REFERENCE = 'README.md', 'test/tensors.safetensors'
# attributes that do not change what an eval-mode model computes
_RUNTIME = ('training', 'grad_checkpointing', 'fused_attn', 'distilled_training')
_TOP = ('img_size', 'num_classes', 'in_chans', 'global_pool')  # arguments that a caller may override when loading


def save_pretrained(
        model: nn.Module,
        folder: str | Path,
        *,
        base: str | None = None,
        base_args: dict[str, Any] | None = None,
) -> Path:
    """Save an ODE-ViT, or any timm model, in timm's own format: config.json and model.safetensors.

    The folder holds the old model or the new one; a process that ends at the very moment between them may leave no
    config.json, which the next save repairs. The current settings are saved, such as `model.blocks.steps`.

    Args:
        model: Model made by `timm.create_model`, converted or not; may be wrapped for compilation or distribution.
        folder: Folder, created if it does not exist; a model that it holds is replaced.
        base, base_args: timm name and keywords of the base, for a model that was not made by `timm.create_model`.

    Returns:
        The folder.

    Raises:
        ValueError: The description would rebuild a different model (the message names the first difference), or the
            model is merged or has no weights.
        OSError: The files could not be written; the old ones remain.

    Examples:
        >>> folder = save_pretrained(student, 'student')
        >>> again = timm.create_model('local-dir:student', pretrained=True)
    """
    model = unwrap_model(model)
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ValueError('The model is on the meta device, so it has no weights to save. Build it on another device.')
    architecture, args, rebuilt = describe(model, base, base_args)
    # the licence is that of weights, which an architecture does not have
    cfg = dict(getattr(model, 'pretrained_cfg', None) or {**rebuilt.pretrained_cfg, 'license': None})
    cfg.setdefault('input_size', rebuilt.pretrained_cfg['input_size'])
    names = cfg.pop('label_names', None)
    rebuilt.pretrained_cfg = cfg
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder = Path(folder)
    with staged(folder, WEIGHTS, CONFIG) as aside:
        only_config: Any = None  # neither True nor False: timm writes no weights
        save_for_hf(rebuilt, str(aside), safe_serialization=only_config)
        save_file(weights, aside / WEIGHTS, metadata={'format': 'pt'})
        path = aside / CONFIG
        config = json.loads(path.read_text())
        # timm reads the number of classes at the top level, and transformers reads it only there
        config.update(architecture=architecture, model_args={k: v for k, v in args.items() if k != 'num_classes'})
        if names and len(names) == rebuilt.num_classes:  # otherwise they are those of an earlier head
            config['label_names'] = names
        try:
            about = {key: config[key] for key in ('num_classes', 'label_names') if key in config}
            check_args(str(folder), {**config['pretrained_cfg'], **about}, config['model_args'])
        except ValueError as e:
            raise ValueError(f'Saved so, the model would not load again: {e}') from None
        path.write_text(json.dumps(config, indent=2) + '\n')
        (aside / WEIGHTS).chmod(path.stat().st_mode)  # safetensors lets only the owner read it
    return folder


def save_reference(model: nn.Module, folder: Path) -> None:
    """Store an input [2, C, H, W] and the model's output for it."""
    size = resolve_model_data_config(model)['input_size']
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    path = folder / REFERENCE
    with torch.no_grad(), staged(path.parent, path.name) as aside:
        save_file({'input': images, 'output': model.cpu().float()(images).contiguous()}, aside / path.name)


def describe(
        model: nn.Module,
        base: str | None = None,
        base_args: dict[str, Any] | None = None,
) -> tuple[str, dict[str, Any], Any]:
    """The architecture and keywords with which `timm.create_model` rebuilds a model, and it on the meta device.

    Raises ValueError if there are none; the message says what to pass.
    """
    check_not_merged(model)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    architecture = base or cfg.get('architecture')
    hint = "Pass base='<timm name>' and base_args={...} with which timm.create_model builds the base."
    if not architecture:
        raise ValueError(
            f'This {type(model).__name__} was not made by timm.create_model, so it has no name to reload it by. {hint}')
    args = get_model_args(model, base_args)
    blocks = find_ode_blocks(model)
    if blocks:
        # the current settings count
        args = {k: v for k, v in args.items() if not k.startswith(PREFIX)}
        if architecture == 'odevit_converted' or not architecture.startswith('odevit_'):
            own = {**(args.pop('base_args', None) or {}), **args}
            own = {k: v for k, v in own.items() if k not in ('base', *_TOP)}
            args = {'base': args.get('base', architecture), 'base_args': own,
                    **{k: v for k, v in args.items() if k in _TOP}}
            architecture = 'odevit_converted'
        config = blocks[0].config
        if len(blocks) > 1:  # stages: leave out what each derives from its own depth
            config = replace(config, steps=tuple(b.steps for b in blocks), T=None, boundaries='uniform')
        args.update(config.to_args())
    try:
        args = json.loads(json.dumps(args))
    except TypeError as e:
        raise ValueError(f'A keyword of this model cannot be written as JSON ({e}). {hint}') from None
    with on_meta():
        rebuilt = timm.create_model(architecture, **args)
    for ours, theirs in zip_longest(structure(model), structure(rebuilt), fillvalue='nothing in its place'):
        if ours != theirs:
            raise ValueError(f'{architecture} with {args} would not rebuild this model: it has {ours}, the rebuilt one '
                             f'{theirs}. {hint}')
    return architecture, args, rebuilt


def structure(model: nn.Module) -> list[str]:
    """Type and settings of every module except dropout, and the shape of every tensor, in order."""
    lines = []
    for name, module in model.named_modules():
        # steps follow from the settings of OdeBlocks
        if 'drop' not in name.rsplit('.', 1)[-1] and not isinstance(module, (Solver, Step)):
            about = '' if isinstance(module, nn.ParameterDict) else module.extra_repr()  # the device does not matter
            lines.append(f'{name}: {type(module).__name__}({about})')
            lines += [f'{name}.{k}'.strip('.') + f' = {v}' for k, v in sorted(vars(module).items())
                      if type(v) in (bool, int, float, str) and not k.startswith('_') and k not in _RUNTIME]
    lines += [f'{name}: {list(tensor.shape)}' for name, tensor in model.state_dict().items()]
    return lines
