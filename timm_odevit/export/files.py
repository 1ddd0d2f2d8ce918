"""export_model: write a model to a file that runs without this package."""
import copy
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models import get_model_args
from timm.utils import unwrap_model
from torch import Tensor, nn

from .._version import __version__
from ..data.preprocessing import class_names, data_config, dtype_of, imagenet_of, model_name
from ..files import staged
from ..ode.blocks import find_ode_blocks
from ..ode.config import DEFAULT
from ..ode.fields import Field
from ..settings import one_line, one_of
from .html import write_html
from .onnx import write_onnx
from .program import METADATA, write_pt2

PREPARED = ('input_size', 'interpolation', 'mean', 'std', 'crop_pct', 'crop_mode')
# by the suffix of the file: what writes a copy of a model, with images [2, C, H, W], the path and metadata
FORMATS: dict[str, Callable[..., None]] = {'onnx': write_onnx, 'html': write_html, 'pt2': write_pt2}


def export_model(
        model: nn.Module, path: str | Path, *, int8: bool = False, bits: int | None = None, any_steps: bool = False,
        overwrite: bool = False,
) -> Path:
    """Write a model to a file that runs without this package and without timm, on batches of any size, or as a page.

    The file has the model's image size, its current steps, and metadata, as JSON: its name, steps and classes, and how
    images are prepared (input_size, mean, std, ...).

    Args:
        path: New file. Its ending says what it is for: .onnx, ONNX Runtime and others; .html, a page that classifies
            pictures in a browser, by weights in 4 bits, for ViTs of ordinary blocks; .pt2, torch.export.load, on the
            model's device.
        int8: Compute linear layers in int8, with a scale for each row, and store weights so (only .onnx).
        bits: 4 stores matrices in 4 bits, as `save_pretrained` does, whatever is computed in (only .onnx, of a float32
            model).
        any_steps: Make the number of steps a second input, `steps`, int64 [], which may be left out for the model's
            own; fewer than shared blocks count as one for each (only .onnx).

    Raises ImportError if a package is missing, ValueError if the file exists or the model cannot be exported.

    Examples:
        >>> import onnxruntime
        >>> path = export_model(student, 'student.onnx')
        >>> session = onnxruntime.InferenceSession(path)
        >>> logits, = session.run(None, {'images': images.numpy()})
    """
    path, model = Path(path), unwrap_model(model)
    format = one_of(FORMATS)(f"format of '{path}':", path.suffix[1:])
    odes, dtype = find_ode_blocks(model), dtype_of(model)
    for wrong, why in (
            (not hasattr(model, 'in_chans'), f'Expected a timm model; got a {type(model).__name__}.'),
            (path.is_dir() or (path.exists() and not overwrite),
             f"'{path}' exists. Give another file, or overwrite=True (--overwrite)."),
            ((int8 or bits or any_steps) and format != 'onnx',
             f'A .{format} has no int8, no other bits and fixed steps. Give a file that ends in .onnx.'),
            (bits not in (None, 4), f'bits={bits!r} is not offered. Give 4, or None.'),
            ((int8 or bits or any_steps) and dtype != torch.float32,
             f'int8, 4 bits and any_steps are made of float32; got {dtype}. Call model.float() first.'),
            (any_steps and (len(odes) != 1 or odes[0].config.halting),
             'any_steps=True (--any-steps) needs an ODE-ViT with one sequence of blocks, and no halting.'),
            (format == 'onnx' and dtype not in (torch.float32, torch.float16),
             f'ONNX Runtime does not run {dtype}. Call model.float() first, or give a .pt2.'),
            (any(ode.config.adaptive for ode in odes),
             "A file has fixed steps. Set another method first, such as model.blocks.method = 'rk4'.")):
        if wrong:
            raise ValueError(why)
    packages = ['onnx', 'onnxscript', *['onnxruntime'] * int8] if format == 'onnx' else []
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{format} needs {' and '.join(missing)}. Type: pip install {' '.join(missing)}")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    getattr(copied, 'set_grad_checkpointing', bool)(False)
    if format != 'pt2':
        copied.cpu()
    images = torch.zeros(2, *data_config(model)['input_size']).to(next(copied.parameters()))
    about = {**metadata(model), 'int8': int8, 'bits': bits, 'timm_odevit': __version__}
    if any_steps:
        about['fewest_steps'] = odes[0].fewest_steps
    about = {key: json.dumps(value) for key, value in about.items() if value not in (None, [])}
    forms = dict(int8=int8, bits=bits, any_steps=any_steps) if format == 'onnx' else {}
    with staged(path.parent, path.name) as aside:
        FORMATS[format](copied, images, aside / path.name, about, **forms)
    return path


def metadata(model: Any) -> dict[str, Any]:
    odes, name = find_ode_blocks(model), model_name(model)
    steps: Any = [ode.steps for ode in odes]
    if len(odes) == 1:
        steps, whole = steps[0], type(odes[0].shared.phases[0]).both is not Field.both
        if odes[0].config == replace(DEFAULT, method='euler' if whole else 'lie_trotter', phases=steps, steps=steps,
                                     T=steps):  # each block is used once
            name = get_model_args(model).get('base') or name.partition('.')[0]
            name, steps = f"{name} with {steps} block{'s' * (steps > 1)}", None
    imagenet = imagenet_of(model)
    names = imagenet.label_descriptions() if imagenet else class_names(model)
    return {'model': name, 'steps': steps, 'classes': names, 'num_classes': model.num_classes, **data_config(model)}


def load_exported(path: str | Path, steps: int | None = None) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The model of an 'onnx' or 'pt2' file, for images [B, C, H, W], and its metadata; or ValueError."""
    own: dict[str, Any] = {}
    try:
        if Path(path).suffix == '.onnx':
            import onnxruntime
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
            session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
            about = session.get_modelmeta().custom_metadata_map
            dtype = getattr(torch, session.get_inputs()[0].type[7:-1])  # of 'tensor(...)'
            if steps is not None and session.get_overridable_initializers():
                own['steps'] = np.array(steps, np.int64)

            def run(images: Tensor) -> Tensor:
                return torch.from_numpy(session.run(None, {'images': images.to(dtype).numpy(), **own})[0])
        else:
            zipfile.ZipFile(path).close()  # before torch prints a traceback
            program = torch.export.load(path, extra_files=(extra := {METADATA: ''}))
            module, like, about = program.module(), next(program.parameters()), json.loads(extra[METADATA])

            def run(images: Tensor) -> Tensor:
                return module(images.to(like))
        about = {key: json.loads(value) for key, value in about.items()}
        about['images'] = {key: about[key] for key in PREPARED}
    except Exception as e:
        raise ValueError(f"Cannot run '{path}': {one_line(e)}. Give a file of odevit export, as onnx (pip install "
                         'onnxruntime) or pt2.') from e
    if steps is not None and not own:
        raise ValueError(f"'{path}' has fixed steps. Leave out --steps, or export an .onnx with --any-steps.")
    if steps is not None and steps < (fewest := about.get('fewest_steps', 1)):
        raise ValueError(f"'{path}' takes at least {fewest} steps; got {steps}.")
    return run, about
