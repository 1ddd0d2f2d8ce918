"""Models by name, and the folders and files that a command writes to."""
from pathlib import Path
from typing import Any

import timm
from timm.models import load_state_dict
from torch import nn

from timm_odevit import from_open_clip, from_transformers, save_pretrained

from ..files import OWN
from ..ode.blocks import find_ode_blocks
from ..settings import one_line, suggest

__all__ = ['TOWERS', 'check_file', 'load', 'refuse_existing', 'save', 'set_steps']

TOWERS = ('open_clip:', 'transformers:')


def load(name: str, args: Any, pretrained: bool = True, **kwargs: Any) -> Any:
    """Build a model by name, with --checkpoint and --img-size if the command has them, on the device.

    Raises:
        ValueError: It could not be built; the message is one line that says what to do.
    """
    checkpoint, size = (getattr(args, option, None) for option in ('checkpoint', 'img_size'))
    if size is not None:
        kwargs['img_size'] = size
    if name.startswith(TOWERS):
        if checkpoint or not pretrained or kwargs.keys() - {'num_classes'}:
            raise ValueError(f"'{name}' has its own weights and settings. Leave out --random, --checkpoint, --img-size "
                             'and model_args.')
        tower = _tower(name).float()
        if kwargs.get('num_classes') is not None:
            tower.reset_classifier(kwargs['num_classes'])
        return tower.to(args.device)
    if checkpoint and not Path(checkpoint).is_file():
        raise ValueError(f"There is no checkpoint file '{checkpoint}'.")
    try:
        if checkpoint:
            kwargs['pretrained_cfg_overlay'] = _overlay(name, checkpoint)
        return timm.create_model(name, pretrained=pretrained, **kwargs).to(args.device)
    except Exception as e:  # a foreign file can raise anything
        hint, stem = '', name.partition('.')[0]
        if Path(name).is_dir():
            hint = f'For a saved model, type local-dir:{name}'
        elif name.startswith('local-dir:'):
            hint = 'Give a folder that odevit convert or save_pretrained has written.'
        elif isinstance(e, OSError):
            file = '--checkpoint FILE or ' if 'checkpoint' in args else ''
            hint = f'Without a network, give {file}local-dir:FOLDER.'
        elif 'nknown model' in str(e) or 'pretrained tag' in str(e):
            known = timm.list_pretrained(f'{stem}.*') if timm.is_model(stem) else timm.list_models()
            hint = f'{suggest(name, known)}See timm.list_models() and timm.list_pretrained().'
        source = f"checkpoint '{checkpoint}'" if checkpoint else f"'{name}'"
        raise ValueError(f"Cannot build {source}: {one_line(e).rstrip('.')}. {hint}") from e


def _tower(name: str) -> Any:
    """The image tower of a model of open_clip or transformers."""
    source, _, name = name.partition(':')
    try:
        if source == 'transformers':
            from transformers import AutoModel
            return from_transformers(AutoModel.from_pretrained(name))
        import open_clip
        name, _, tag = name.partition('/') if not name.startswith('hf-hub:') else (name, '', '')
        return from_open_clip(open_clip.create_model(name, pretrained=tag or None))
    except ImportError as e:
        package = source.replace('open_clip', 'open_clip_torch')
        raise ImportError(f"'{source}:{name}' needs {source}. Type: pip install {package}") from e
    except (OSError, RuntimeError, ValueError) as e:
        raise ValueError(f"Cannot build '{source}:{name}': {one_line(e)}") from e


def _overlay(name: str, checkpoint: str) -> dict[str, Any]:
    """What tells timm to load a file's weights, with its head if the number of classes fits."""
    overlay: dict[str, Any] = {'state_dict': load_state_dict(checkpoint), 'source': ''}
    cfg = timm.get_pretrained_cfg(name)
    heads: Any = () if cfg is None else [cfg.classifier] if isinstance(cfg.classifier, str) else cfg.classifier
    head = next((overlay['state_dict'].get(f'{layer}.weight') for layer in heads or ()), None)
    return overlay if head is None else {**overlay, 'num_classes': len(head)}


def set_steps(model: nn.Module, args: Any) -> None:
    """Set the number of steps of an ODE-ViT to --steps, if it is given."""
    if args.steps is not None:
        blocks = find_ode_blocks(model)
        if len(blocks) != 1:
            raise ValueError(f"--steps needs an ODE-ViT with one sequence of blocks; '{args.model}' is not one. Leave "
                             'it out.')
        blocks[0].steps = args.steps


def save(model: nn.Module, out: str) -> None:
    save_pretrained(model, out)
    print(f"saved {out}: timm.create_model('local-dir:{out}', pretrained=True)")


def check_file(file: str | None) -> None:
    """Raise ValueError if a file cannot be written."""
    if file and Path(file).is_dir():
        raise ValueError(f"'{file}' is a folder. Give a file to write to.")
    if file and not Path(file).parent.is_dir():
        raise ValueError(f"There is no folder '{Path(file).parent}' to write {Path(file).name} to.")


def refuse_existing(out: str, instead: str = 'remove it') -> None:
    """Raise ValueError for a folder that is not empty; `instead` is the option that allows it."""
    path = Path(out)
    if path.is_file():
        raise ValueError(f"'{out}' is a file. Give a folder to write to.")
    if path.is_dir() and any(not p.name.startswith(OWN) for p in path.iterdir()):
        raise ValueError(f"'{out}' is not empty. Give another folder, or {instead}.")
