"""save_pretrained: a folder that `timm.create_model('local-dir:...')` rebuilds exactly; push_to_hub: sends it."""
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from timm.models import get_model_args, is_model_in_modules, save_for_hf
from timm.utils import unwrap_model
from torch import nn

from ..convert.block_kinds import structure
from ..data.preprocessing import cfg_of, data_config
from ..files import staged
from ..hooks import on_meta
from ..ode.blocks import find_ode_blocks
from ..ode.config import PREFIX
from ..quantization import BITS, packed
from ..settings import one_line
from .cards import model_card
from .loading import CALLER, CONFIG, WEIGHTS, check_args

CARD, REFERENCE = 'README.md', 'test/tensors.safetensors'
# the files of a model's folder that are sent; never a pickle
_SENT = [WEIGHTS, CONFIG, CARD, REFERENCE, 'recipe.yaml', 'earlier*.yaml', 'results.json']
_TOP = ('img_size', 'num_classes', 'in_chans', 'global_pool')  # arguments that a caller may override when loading


def copy_model(source: Path, folder: Path) -> None:
    with staged(folder, WEIGHTS, CONFIG) as aside:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(source / name, aside / name)


def save_pretrained(model: nn.Module, folder: str | Path, *, bits: int | None = None) -> Path:
    """Save an ODE-ViT, or any timm model, in timm's own format: config.json and model.safetensors.

    The folder holds the old model or the new one; a process that is killed between them may leave no config.json, which
    the next save repairs. The current settings are saved, such as `model.blocks.steps`. With `bits=4`, matrices of an
    ODE-ViT are stored in 4 bits, in groups of 32 with a scale and a zero point, and all else in 16.

    Raises ValueError if `timm.create_model` cannot rebuild the model, OSError if the files could not be written.

    Examples:
        >>> folder = save_pretrained(student, 'student')
        >>> again = timm.create_model('local-dir:student', pretrained=True)
    """
    model, folder = unwrap_model(model), Path(folder)
    if bits not in (None, BITS):
        raise ValueError(f'bits={bits} is not offered. Give {BITS}, or None.')
    architecture, args, rebuilt = describe(model)
    if bits and not is_model_in_modules(architecture, {'registry'}):
        raise ValueError(f'timm itself loads {architecture}, and does not unpack 4 bits. convert_(model, phases=depth) '
                         'keeps all blocks and what they compute, and can be saved so.')
    cfg = {**cfg_of(model), 'input_size': data_config(model)['input_size']}
    names = cfg.pop('label_names', None)
    rebuilt.pretrained_cfg = cfg
    with staged(folder, WEIGHTS, CONFIG) as aside:
        save_for_hf(rebuilt, str(aside), safe_serialization=None)  # type: ignore[arg-type]  # writes no weights
        state = model.state_dict()
        weights = packed(state) if bits else {name: tensor.contiguous().clone() for name, tensor in state.items()}
        save_file(weights, aside / WEIGHTS, metadata={'format': 'pt'})
        path = aside / CONFIG
        config = json.loads(path.read_text())
        # the number of classes is read at the top level
        config.update(architecture=architecture, model_args={k: v for k, v in args.items() if k != 'num_classes'})
        if names and len(names) == rebuilt.num_classes:  # otherwise they are those of an earlier head
            config['label_names'] = names
        try:
            check_args(folder, {**config['pretrained_cfg'], 'label_names': config.get('label_names')}, args)
        except (TypeError, ValueError) as e:
            raise ValueError(f'Saved so, the model would not load again: {e}') from None
        path.write_text(json.dumps(config, indent=2) + '\n')
        (aside / WEIGHTS).chmod(path.stat().st_mode)  # safetensors lets only the owner read it
    return folder


def push_to_hub(
        model: nn.Module | str | Path, repo_id: str, *, results: Sequence[Mapping[str, Any]] = (), dataset: str = '',
        license: str | None = None, private: bool | None = None,
) -> str:
    """Send a model to the Hugging Face Hub, for `timm.create_model('hf-hub:org/name', pretrained=True)` to load.

    One commit holds model.safetensors, config.json, README.md (the card) and test/tensors.safetensors (an input and its
    output); from a folder, also recipes and results.json. A card on the Hub is kept unless a folder, results or license
    are given.

    Args:
        model: Model, or the folder of a saved one, which is sent as it is.
        repo_id: Created if it does not exist.
        results, dataset: Rows for the card, from `json.loads(evaluate(...).to_json())`, and the name of their dataset.
        license: The Hub's identifier of the licence; None for that of the weights from which the model was made.

    Returns the address of the commit. Raises ValueError if the model cannot be saved or its licence is not known,
    OSError if the Hub refused or could not be reached.

    Examples:
        >>> address = push_to_hub(student, 'org/name', private=True)
    """
    with tempfile.TemporaryDirectory() as temporary:
        made = isinstance(model, nn.Module)
        folder = save_pretrained(model, Path(temporary, 'model')) if isinstance(model, nn.Module) else Path(model)
        saved = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()  # which may refuse it
        if made:
            card = model_card(f'hf-hub:{repo_id}', saved, results=results, dataset=dataset, license=license)
            (folder / CARD).write_text(card, encoding='utf-8')
            save_reference(saved, folder)
        elif results or dataset or license:
            raise ValueError(f"A folder is sent as it is. Write results and licence into '{folder / CARD}'.")
        api = HfApi(library_name='timm_odevit')
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise ValueError('it exists and is public. Make it private there.')
            keep_card = made and not results and not license and api.file_exists(repo_id, CARD)
            done = api.upload_folder(
                repo_id=repo_id, folder_path=folder, allow_patterns=_SENT, ignore_patterns=[CARD] * keep_card,
                commit_message='Model by timm-odevit')
        except Exception as e:  # which errors there are depends on the client's version
            raise OSError(f'Could not send the model to {repo_id} on the Hub: {one_line(e)}') from e
    return done.commit_url


def save_reference(model: nn.Module, folder: Path) -> None:
    images = torch.randn(2, *data_config(model)['input_size'], generator=torch.Generator().manual_seed(0), device='cpu')
    path = folder / REFERENCE
    with torch.no_grad(), staged(path.parent, path.name) as aside:
        save_file({'input': images, 'output': model.cpu().float()(images).contiguous()}, aside / path.name)


def describe(model: nn.Module) -> tuple[str, dict[str, Any], Any]:
    """The architecture and keywords with which `timm.create_model` rebuilds a model, and it on the meta device."""
    architecture = cfg_of(model).get('architecture')
    hint = 'Build it with timm.create_model and all its keywords, and load its weights into that.'
    if not hasattr(model, 'num_classes'):
        raise ValueError(f'A {type(model).__name__} cannot be saved: it is no timm model, or one of features_only.')
    if not architecture:
        raise ValueError(f'This {type(model).__name__} was not made by timm.create_model, so it has no name. {hint}')
    args = {k: v for k, v in get_model_args(model).items() if k not in CALLER and not k.startswith(PREFIX)}
    if blocks := find_ode_blocks(model):  # whose current settings count
        if architecture == 'odevit_converted' or not architecture.startswith('odevit_'):
            own = {**(args.pop('base_args', None) or {}), **args}
            args = {'base': args.get('base', architecture), **{k: args[k] for k in _TOP if k in args},
                    'base_args': {k: v for k, v in own.items() if k not in ('base', *_TOP)}}
            architecture = 'odevit_converted'
        config = blocks[0].config
        if len(blocks) > 1:  # stages: leave out what each derives from its own depth
            config = replace(config, steps=tuple(b.steps for b in blocks), T=None)
        args.update(config.to_args())
    try:
        args = json.loads(json.dumps(args))
    except TypeError as e:
        raise ValueError(f"{architecture} was built with what config.json cannot hold: {e}. Give names, such as "
                         "norm_layer='layernorm'.") from None
    with on_meta():
        rebuilt = timm.create_model(architecture, **args)
    extra = tuple(f'{name} = ' for name in vars(model).keys() - vars(rebuilt).keys())  # the user's own
    lines = [line for line in structure(model) if not line.startswith(extra)]
    for ours, theirs in zip_longest(lines, structure(rebuilt), fillvalue='nothing in its place'):
        if ours != theirs:
            raise ValueError(f'{architecture} with {args} would not rebuild this model: it has {ours}, the rebuilt one '
                             f'{theirs}. {hint}')
    return architecture, args, rebuilt
