"""What several commands share: arguments and their types, models by name, images, folders to write to."""
import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
from safetensors import SafetensorError
from timm.models import load_state_dict, parse_model_name
from torch import nn

from ..data.arrays import array_images
from ..data.folders import image_loaders
from ..files import OWN
from ..interop.from_libraries import from_open_clip, from_transformers
from ..ode.blocks import find_ode_blocks
from ..saving.loading import CONFIG
from ..saving.save import save_pretrained
from ..settings import Settings, one_line, suggest

__all__ = [
    'DATA', 'IMAGES', 'MODEL', 'TOWERS', 'add_number', 'add_quiet', 'add_settings', 'add_steps', 'add_weights',
    'add_workers', 'check_file', 'check_name', 'given', 'images_of', 'load', 'load_as_saved',
    'refuse_existing', 'save', 'set_steps', 'step_counts', 'whole_number',
]

MODEL = ("a timm name, such as deit_tiny_patch16_224; 'local-dir:FOLDER' for a saved model; or the image tower of "
         "'open_clip:NAME/TAG' or 'transformers:NAME'")
TOWERS = ('open_clip:', 'transformers:')
DATA = ('folder with one sub-folder of images per class, or with train/ and val/ folders of that kind; or an .npz of '
        'small images: x_train, y_train, x_test, y_test')
IMAGES = 'folder of images, or an .npz of small images; labels are ignored'


def add_settings(parser: Any, kind: type[Settings]) -> None:
    """Add an option for each setting; its help and default come from the settings."""
    about = kind.about()
    for f in fields(kind):
        text, default = about[f.name], ','.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        if f.default is None:  # the description says what None stands for
            default = ''.join(re.findall(r'None for ([^;.]+)', text))
            text = re.sub(r'[;.] None for [^;.]+', '', text)
        options: Any = dict(type=_value, metavar='VALUE')
        shown = f"{text.rstrip('.')} (default: {default})"
        if isinstance(f.default, bool):
            options, shown = dict(action='store_const', const=not f.default), text.rstrip('.')
        text = re.sub(r'\((\d+), (\d+)\)', r'\1,\2', shown).replace('%', '%%')
        parser.add_argument(f"--{f.name.replace('_', '-')}", dest=f.name, help=text, **options)


def given(args: argparse.Namespace, kind: type[Settings]) -> dict[str, Any]:
    """Return the settings given on the command line."""
    return {name: value for name in kind.names() if (value := getattr(args, name, None)) is not None}


def _value(text: str) -> Any:
    """Parse a number, a word, or several of them separated by commas; the settings check what is allowed."""
    if ',' in text:
        return tuple(_value(part) for part in text.split(','))
    words = {'true': True, 'false': False, 'none': None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def add_number(parser: Any, name: str, text: str, least: int = 1, default: int | None = None) -> None:
    """Add an option that takes a whole number."""
    parser.add_argument(name, type=whole_number(least), metavar='N', default=default, help=(
        text if default is None else f'{text} (default: %(default)s)'))


def add_steps(parser: argparse.ArgumentParser) -> None:
    add_number(parser, '--steps', 'number of solver steps (default: as saved)')


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--quiet', action='store_true', help='show no progress bars')


def add_weights(parser: argparse.ArgumentParser, whose: str) -> None:
    add_number(parser, '--img-size', f'image size of {whose} in pixels (default: its own)')
    parser.add_argument('--checkpoint', metavar='FILE',
                        help=f'file with the weights of {whose}, instead of a download')


def add_workers(parser: argparse.ArgumentParser) -> None:
    add_number(parser, '--workers', 'processes that load images (default: min(2, usable CPU cores - 1))', 0)


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argument type: a whole number of at least `least`."""
    def parse(text: str) -> int:
        if not re.fullmatch(r'\d+', text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}; got '{text}'")
        return int(text)
    return parse


def step_counts(text: str) -> list[int]:
    """Parse a list of step counts, such as 1-6,12,24."""
    counts: list[int] = []
    try:
        for part in text.split(','):
            first, _, last = part.partition('-')
            counts += range(whole_number(1)(first), whole_number(whole_number(1)(first))(last or first) + 1)
    except argparse.ArgumentTypeError:
        counts = []
    if not counts:
        raise argparse.ArgumentTypeError(f"expected step counts, such as 1-6,12,24; got '{text}'")
    return counts


def images_of(
        path: str, model: nn.Module, batch_size: int = 64, workers: int | None = None, seed: int = 0,
) -> tuple[Any, Any]:
    """Make batches of images whose labels do not matter, from a folder or an .npz: to calibrate on, and held out."""
    if Path(path).is_file():
        if workers is not None:
            raise ValueError('--workers applies to folders of images; an .npz is read into memory at once. Leave it '
                             'out.')
        return array_images(path, model, batch_size=batch_size, seed=seed)
    return image_loaders(path, model, batch_size=batch_size, workers=workers)


def load(name: str, args: argparse.Namespace, pretrained: bool = True, **kwargs: Any) -> nn.Module:
    """Build a model by name, with the options --checkpoint and --img-size if the command has them.

    Raises:
        ValueError: It could not be built; the message is one line that says what to do.
    """
    check_name(name)
    checkpoint, size = (getattr(args, option, None) for option in ('checkpoint', 'img_size'))
    if name.startswith(TOWERS):
        if size is not None or checkpoint is not None:
            raise ValueError(f"'{name}' has its own weights and image size. Leave out --checkpoint and --img-size.")
        if not pretrained:
            raise ValueError(f"'{name}' has its own weights. Leave out --random.")
        if others := sorted(kwargs.keys() - {'num_classes'}):
            raise ValueError(f"'{name}' is built as it is. Leave out {', '.join(others)}.")
        tower: Any = _tower(name).float()
        if kwargs.get('num_classes') is not None:
            tower.reset_classifier(kwargs['num_classes'])
        return tower.to(args.device)
    if size is not None:
        kwargs['img_size'] = size
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise ValueError(f"There is no checkpoint file '{checkpoint}'.")
    try:
        if checkpoint is not None:
            kwargs['pretrained_cfg_overlay'] = _overlay(name, checkpoint)
        return timm.create_model(name, pretrained=pretrained, **kwargs).to(args.device)
    except Exception as e:  # a foreign file can raise anything
        source = f"checkpoint '{checkpoint}'" if checkpoint else f"'{name}'"
        if isinstance(e, (SafetensorError, EOFError, UnpicklingError)) or 'PytorchStreamReader' in str(e):
            raise ValueError(f'The weights of {source} cannot be read. The file may be truncated: {one_line(e)}') from e
        if isinstance(e, OSError):
            file = '--checkpoint FILE or ' if 'checkpoint' in args else ''
            raise ValueError(f'The weights of {source} could not be loaded ({one_line(e)}). Without a network, give '
                             f'{file}local-dir:FOLDER.') from e
        known = timm.list_pretrained(f"{name.partition('.')[0]}.*") if 'pretrained tag' in str(e) else []
        hint = f" {suggest(name, known)}Known: {', '.join(known)}" if known else ''
        raise ValueError(f'Cannot build {source}: {one_line(e)}{hint}') from e


def _tower(name: str) -> nn.Module:
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


def load_as_saved(name: str, args: argparse.Namespace) -> nn.Module:
    """Build a model by name, where --checkpoint and --img-size are those of another."""
    return load(name, argparse.Namespace(device=args.device))


def _overlay(name: str, checkpoint: str) -> dict[str, Any]:
    """Return what tells timm to load a file's weights, with its head if the number of classes fits."""
    overlay: dict[str, Any] = {'state_dict': load_state_dict(checkpoint), 'source': ''}
    cfg = timm.get_pretrained_cfg(name)
    heads: Any = () if cfg is None else [cfg.classifier] if isinstance(cfg.classifier, str) else cfg.classifier
    head = next((overlay['state_dict'].get(f'{layer}.weight') for layer in heads or ()), None)
    if head is not None:
        overlay['num_classes'] = len(head)
    return overlay


def check_name(name: str) -> None:
    """Raise ValueError for a name from which no model can be built."""
    if name.startswith(TOWERS):
        return
    if Path(name).is_dir() and not timm.is_model(name):
        raise ValueError(f"'{name}' is a folder. For a saved model, type local-dir:{name}")
    source, model = parse_model_name(name)
    if source == 'local-dir':
        config = Path(model, CONFIG)
        if not config.is_file():
            raise ValueError(
                f"There is no saved model in '{model}': it has no {CONFIG}. Make one: odevit convert MODEL {model}")
        try:
            known = isinstance(json.loads(config.read_text())['architecture'], str)
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise ValueError(f"'{config}' names no architecture. Write it with save_pretrained.")
    elif source is None and not timm.is_model(name.split('.')[0]):
        raise ValueError(f"Unknown model '{name}'. {suggest(name, timm.list_models())}See timm.list_models().")


def set_steps(model: nn.Module, steps: int | None, name: str) -> None:
    """Set the number of steps of an ODE-ViT; None leaves it."""
    if steps is None:
        return
    blocks = find_ode_blocks(model)
    if len(blocks) != 1:
        raise ValueError(f"--steps needs an ODE-ViT with one sequence of blocks; '{name}' is not one. Leave it out.")
    blocks[0].steps = steps


def save(model: nn.Module, out: str) -> None:
    save_pretrained(model, out)
    print(f"saved {out}: timm.create_model('local-dir:{out}', pretrained=True)")


def check_file(file: Path | None) -> None:
    """Raise ValueError if a file cannot be written."""
    if file is not None and file.is_dir():
        raise ValueError(f"'{file}' is a folder. Give a file to write to.")
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"There is no folder '{file.parent}' to write {file.name} to.")


def refuse_existing(out: str, instead: str) -> None:
    """Raise ValueError for a folder that is not empty; `instead` is the option that allows it."""
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ValueError(f"'{out}' is a file. Give a folder to write to.")
    if path.is_dir() and any(not p.name.startswith(OWN) for p in path.iterdir()):
        raise ValueError(f"'{out}' is not empty. Give another folder, or {instead}.")
