"""A timm VisionTransformer with the weights of another library's model, checked to compute the same."""
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..hooks import evaluating, on_meta
from ..settings import one_line

__all__ = ['build_vit', 'mlp_ratio', 'refusal', 'renamed', 'type_of']

# what timm records about its own weights, which does not apply to these
_NO_SOURCE = dict.fromkeys((
    'file', 'hf_hub_id', 'hf_hub_filename', 'source', 'tag', 'label_names', 'label_descriptions', 'license',
    'description', 'origin_url', 'paper_name', 'paper_ids', 'notes')) | dict(url='', custom_load=False)


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio from which timm computes exactly this number of hidden units."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)  # timm truncates the product


def type_of(model: Any) -> str:
    """A model's class with its module, such as 'torchvision.models.vision_transformer.VisionTransformer'."""
    return f'{type(model).__module__}.{type(model).__qualname__}'


def refusal(host: nn.Module, reason: str) -> ValueError:
    """The error for a model that cannot be built."""
    return ValueError(f"Cannot build a timm model from this {type(host).__module__.split('.')[0]} "
                      f'{type(host).__name__}: {reason}.')


def renamed(host: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a model, with some parts of their names replaced, one after the other."""
    state = {}
    for name, tensor in host.state_dict(keep_vars=True).items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name] = tensor
    return state


def build_vit(
        host: nn.Module,
        name: str,
        state: Mapping[str, Tensor],
        outputs: Callable[[Tensor], Sequence[Tensor]],
        overlay: Mapping[str, Any],
        **args: Any,
) -> VisionTransformer:
    """Build the timm model `name` with copies of a host's weights, and compare the two on a random image.

    A bias that timm alone has is 0. A host on the meta device is not compared.

    Args:
        host: The other library's model; it does not change.
        name: timm name.
        state: The host's tensors, by timm's names or by names that timm's `checkpoint_filter_fn` knows; made while
            gradients are recorded, so that they tell what requires them.
        outputs: From images [1, C, H, W] to the host's logits or embedding, maybe after its tokens.
        overlay: What differs from timm's pretrained_cfg.
        **args: Keywords of `timm.create_model`.

    Raises:
        ValueError: A tensor has no place in timm's model, or none takes its place, or the outputs differ.
    """
    with on_meta():  # timm's random initialisation takes no time there and draws no random numbers
        model: Any = timm.create_model(name, pretrained_cfg_overlay={**_NO_SOURCE, **overlay}, **args)
    made = {'head.bias', 'patch_embed.proj.bias'} - set(state)  # which timm makes in float32, without a gradient
    state = {key: tensor for key, tensor in checkpoint_filter_fn(dict(state), model).items() if key not in made}
    for key in model.state_dict():
        weight = state.get(f'{key.removesuffix("bias")}weight')
        if key.endswith('.bias') and key not in state and weight is not None:
            state[key] = 0 * weight.reshape(len(weight), -1)[:, 0]
    try:
        model.load_state_dict({key: tensor.detach().clone(memory_format=torch.contiguous_format)
                               for key, tensor in state.items()}, assign=True)
    except RuntimeError as e:
        raise refusal(host, one_line(e).rstrip('.')) from e
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(state[key].requires_grad)
    eps = [module.eps for module in host.modules() if isinstance(module, nn.LayerNorm)]
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and eps:
            module.eps = eps[0]
    model.train(host.training)
    _compare(host, model, outputs)
    return model


def _compare(host: nn.Module, model: Any, outputs: Callable[[Tensor], Sequence[Tensor]]) -> None:
    like = next(model.parameters())
    if like.is_meta:
        return
    size = model.pretrained_cfg['input_size']
    images = torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(like)
    with evaluating(host), evaluating(model), torch.no_grad():
        try:
            theirs = outputs(images)
            ours = [model.forward_features(images), model(images)][-len(theirs):]
        except (AttributeError, RuntimeError, TypeError, ValueError) as e:
            raise refusal(host, f'it does not compute an embedding of a random image: {one_line(e)}') from e
    rounding = 1e-4 if torch.finfo(like.dtype).bits > 16 else 0.1  # of a dozen blocks
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or not (a.float() - b.float()).norm() <= rounding * b.float().norm():
            raise refusal(host, "its output for a random image differs from timm's, so one of its layers computes "
                                'something else, such as another activation, attention or pooling')
