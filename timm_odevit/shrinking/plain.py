"""Plain students of equal size: some of the model's own blocks."""
import timm
import torch
from torch import nn

from ..convert.block_kinds import find_stages
from ..convert.conversion import convert_
from ..ode.blocks import count_parameters
from ..saving.save import describe

__all__ = ['plain_student']


def plain_student(model: nn.Module, parameters: int) -> nn.Module | None:
    """A model of the same kind with so many of the model's blocks that it has about as many parameters, evenly spaced.

    It has one block per layer, which an OdeBlocks holds, so that it is trained like any student.

    Returns:
        The student; None if timm cannot build the model with fewer blocks.
    """
    sites = find_stages(model)
    blocks = sites[0].blocks
    outside = count_parameters(model) - sum(map(count_parameters, blocks))
    count = min(len(blocks) - 1, max(1, round((parameters - outside) / count_parameters(blocks[0]))))
    if len(sites) > 1 or count < 1:
        return None
    architecture, args, _ = describe(model)
    prefix = f'{sites[0].name}.blocks.'.lstrip('.')
    layers = torch.linspace(0, len(blocks) - 1, count).round().int().tolist()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    for i, layer in enumerate(layers):
        state.update({f'{prefix}{i}.{name}': tensor for name, tensor in blocks[layer].state_dict().items()})
    try:
        plain = timm.create_model(architecture, **{**args, 'depth': count})
        plain.load_state_dict(state)
    except (AssertionError, RuntimeError, TypeError, ValueError):  # depth is no keyword, or other tensors depend on it
        return None
    plain.pretrained_cfg = plain.default_cfg = dict(model.pretrained_cfg)  # type: ignore[arg-type,assignment]
    first = next(model.parameters())
    return convert_(plain.to(first.device, first.dtype), phases=count, keep_original=False).model
