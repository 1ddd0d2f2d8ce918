"""Models by name, and the folders and files that a command writes to."""
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
from timm.models import clean_state_dict, load_state_dict

from timm_odevit import Recipe, from_open_clip, from_transformers, save_pretrained, with_steps

from ..files import OWN, locked
from ..hooks import on_meta
from ..ode.blocks import the_ode
from ..settings import one_line, suggest
from ..training.config import RECIPE

TOWERS = ('open_clip:', 'transformers:')


def load(name: str | None, args: Any, pretrained: bool = True, **kwargs: Any) -> Any:
    if name is None:
        return None
    model: Any
    checkpoint, size = (getattr(args, option, None) for option in ('checkpoint', 'img_size'))
    if size is not None:
        kwargs['img_size'] = size
    if name.startswith(TOWERS) and (checkpoint or not pretrained or kwargs.keys() - {'num_classes'}):
        raise ValueError(f"'{name}' has its own weights and settings. Leave out --random, --checkpoint, --img-size and "
                         'model_args.')
    try:
        if name.startswith(TOWERS):
            model = _tower(name, **kwargs)
        else:
            if checkpoint:
                kwargs['pretrained_cfg_overlay'] = overlay = _overlay(name, checkpoint)
                asked = kwargs.pop('num_classes', overlay['num_classes'])
                kwargs['num_classes'] = overlay['num_classes']  # else timm leaves out what does not fit
            model = timm.create_model(name, pretrained=pretrained, **kwargs)
            if checkpoint and model.num_classes != asked:
                model.reset_classifier(asked)
    except Exception as e:  # a foreign file can raise anything
        hint = ''
        if Path(name).is_dir():
            hint = f'For a saved model, type local-dir:{name}'
        elif isinstance(e, ImportError):
            hint = f"Type: pip install {'open_clip_torch' if name.startswith('open_clip') else 'transformers'}"
        elif isinstance(e, OSError) and not checkpoint and 'local-dir:' not in name:
            hint = f"Without a network, give {'--checkpoint FILE or ' * hasattr(args, 'checkpoint')}local-dir:FOLDER."
        elif 'nknown model' in str(e) or 'pretrained tag' in str(e):
            hint = suggest(name, [*timm.list_models(), *timm.list_pretrained()])
        source = f"checkpoint '{checkpoint}'" if checkpoint else f"'{name}'"
        raise ValueError(f"Cannot build {source}: {one_line(e).rstrip('.')}. {hint}") from e
    return model.to(args.device)


def _tower(name: str, num_classes: int | None = None) -> Any:
    source, _, name = name.partition(':')
    if source == 'transformers':
        from transformers import AutoModel
        tower = from_transformers(AutoModel.from_pretrained(name)).float()
    else:
        import open_clip
        name, _, tag = name.partition('/') if not name.startswith('hf-hub:') else (name, '', '')
        tower = from_open_clip(open_clip.create_model(name, pretrained=tag or None)).float()
    if num_classes is not None:
        tower.reset_classifier(num_classes)
    return tower


def _overlay(name: str, checkpoint: str) -> dict[str, Any]:
    """Tells timm to load a file's weights, maybe Lightning's, with their classes."""
    try:
        state = load_state_dict(checkpoint)
    except RuntimeError as e:
        if 'weights_only' not in str(e):
            raise
        raise ValueError('it holds Python objects, which may run code. If you trust it, save its state_dict alone: '
                         f"torch.save(torch.load('{checkpoint}', weights_only=False)['state_dict'], 'w.pth'), or "
                         'its .state_dict()') from e
    state = clean_state_dict(state.get('model_state_dict', state))
    for prefix in ('model.', 'net.'):  # of what a LightningModule trains
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        state = clean_state_dict(own) or state
    with on_meta():
        cfg: Any = timm.create_model(name).pretrained_cfg
    layers = cfg.get('classifier') or ()
    head = state.get(f"{layers if isinstance(layers, str) else next(iter(layers), '')}.weight", ())
    return {'state_dict': state, 'source': '', 'num_classes': len(head)}


def load_with_steps(args: Any) -> Any:
    model = load(args.model, args)
    asked = 'any' if getattr(args, 'any_steps', False) else args.steps
    if asked is not None and len(known := steps_of_training(model)) == 1 and asked != known[0]:
        warnings.warn(f"'{args.model}' was trained with K = {known[0]} alone, not {asked}.", RuntimeWarning, 2)
    return model if args.steps is None else with_steps(model, args.steps)


def steps_of_training(model: Any) -> tuple[int, ...]:
    """As the recipe beside its weights says, if there is one."""
    with suppress(TypeError, ValueError):  # no recipe, or of another version; or not one sequence of blocks
        path = Path(str(model.pretrained_cfg.get('file') or '')).parent / RECIPE
        return Recipe.load(path).trained_at(the_ode(model).steps)
    return ()


def save(model: Any, out: str) -> None:
    save_pretrained(model, out)
    say_saved(out)


def say_saved(out: Any) -> None:
    print(f"saved {out}: import timm, timm_odevit; "
          f"timm.create_model('local-dir:{Path(out).as_posix()}', pretrained=True)")


def check_file(file: str | None) -> None:
    if file and (Path(file).is_file() < Path(file).exists() or not Path(file).parent.is_dir()):
        raise ValueError(f"Cannot write to '{file}': it is no file, or its folder does not exist.")


@contextmanager
def new_folder(out: str, instead: str = 'remove it') -> Iterator[None]:
    """Locked until full; `instead` is the option for one that is not empty."""
    path = Path(out)
    if path.is_file() or (path.is_dir() and any(not p.name.startswith(OWN) for p in path.iterdir())):
        raise ValueError(f"'{out}' is not empty. Give another folder, or {instead}.")
    with locked(path):
        yield
