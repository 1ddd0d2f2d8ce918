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

__all__ = ['NAMES', 'build_vit', 'mlp_ratio', 'nearest', 'refusal', 'renamed']

# (width, patch size) -> timm name; every size is passed as a keyword, so the name only has to be of the same kind
NAMES = {
    (192, 16): 'vit_tiny_patch16_224',
    (384, 16): 'vit_small_patch16_224',
    (384, 32): 'vit_small_patch32_224',
    (768, 16): 'vit_base_patch16_224',
    (768, 32): 'vit_base_patch32_224',
    (1024, 16): 'vit_large_patch16_224',
    (1024, 32): 'vit_large_patch32_224',
    (1280, 14): 'vit_huge_patch14_224',
}
# what timm records about its own weights, which does not apply to these
_NO_SOURCE = dict(
    url='', file=None, hf_hub_id=None, hf_hub_filename=None, source=None, tag=None, custom_load=False, label_names=None,
    label_descriptions=None, license=None, description=None, origin_url=None, paper_name=None, paper_ids=None,
    notes=None)


def nearest(width: int, patch_size: int) -> str:
    """The timm name of the plain ViT that is nearest to a width and a patch size."""
    return NAMES[min(NAMES, key=lambda size: (abs(math.log(size[0] / width)), abs(size[1] - patch_size)))]


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio from which timm computes exactly this number of hidden units."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)  # timm truncates the product


def refusal(host: nn.Module, reason: str) -> ValueError:
    """The error for a model that cannot be built."""
    return ValueError(f"Cannot build a timm model from this {type(host).__module__.split('.')[0]} "
                      f'{type(host).__name__}: {reason}.')


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """A state dict with every occurrence of some parts of names replaced, one after the other."""
    found = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def build_vit(
        host: nn.Module,
        name: str,
        state: Mapping[str, Tensor],
        outputs: Callable[[Tensor], Sequence[Tensor]],
        overlay: Mapping[str, Any],
        without_bias: Sequence[str] = (),
        **args: Any,
) -> VisionTransformer:
    """Build the timm model `name` with copies of a host's weights, and compare the two on a random image.

    Device, dtype, mode and requires_grad are the host's. A host on the meta device is not compared.

    Args:
        host: The other library's model; it does not change.
        name: timm name.
        state: The host's tensors, by timm's names or by names that timm's `checkpoint_filter_fn` knows; made while
            gradients are recorded, so that they tell what requires them.
        outputs: From images [1, C, H, W] to the host's logits or embedding, after its tokens or without them.
        overlay: What differs from timm's pretrained_cfg.
        without_bias: Layers that have a bias in timm alone; it is 0.
        args: Keywords of `timm.create_model`.

    Raises:
        ValueError: A tensor has no place in timm's model, or none takes its place, or the outputs differ.
    """
    with on_meta():  # timm's random initialisation takes no time there and draws no random numbers
        model: Any = timm.create_model(name, pretrained_cfg_overlay={**_NO_SOURCE, **overlay}, **args)
    state = checkpoint_filter_fn(dict(state), model)
    for layer in without_bias:
        state[f'{layer}.bias'] = 0 * state[f'{layer}.weight'].flatten(1)[:, 0]
    ours = model.state_dict()
    for key in [*state, *ours]:
        theirs, mine = (list(tensors[key].shape) if key in tensors else None for tensors in (state, ours))
        if mine is None:
            raise refusal(host, f'timm has no place for {key}')
        if theirs != mine:
            raise refusal(host, f"in place of {key}, which is {mine} in timm, it has {theirs or 'nothing'}")
    if len(dtypes := sorted({str(tensor.dtype) for tensor in state.values()})) > 1:
        raise refusal(host, f"its parameters are of several dtypes ({', '.join(dtypes)}), which timm does not mix. "
                            'Call model.float() first, or model.half()')
    eps = {module.eps for module in host.modules() if isinstance(module, nn.LayerNorm)}
    if len(eps) > 1:
        raise refusal(host, f"its norms have several eps ({', '.join(map(str, sorted(eps)))})")
    model.load_state_dict({key: tensor.detach().clone(memory_format=torch.contiguous_format)
                           for key, tensor in state.items()}, assign=True)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(state[key].requires_grad)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = next(iter(eps))
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
        except (AttributeError, RuntimeError, TypeError, ValueError) as e:
            raise refusal(host, f'it does not compute an embedding of a random image: {one_line(e)}') from e
        ours = [model.forward_features(images), model(images)][-len(theirs):]
    rounding = 1e-4 if torch.finfo(like.dtype).bits > 16 else 0.1  # of a dozen blocks
    for a, b in zip(ours, theirs, strict=True):
        if not (a.float() - b.float()).norm() <= rounding * b.float().norm():
            raise refusal(host, "its output for a random image differs from timm's, so one of its layers computes "
                                'something else, such as another activation, attention or pooling')
