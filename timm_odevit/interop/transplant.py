"""A timm VisionTransformer with the parameters and settings of another library's modules."""
import copy
import math
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Type

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..hooks import on_meta

__all__ = ['NAMES', 'Transplant', 'mlp_ratio', 'nearest']

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


class Transplant:
    """Collects what stands in the place of each module and parameter of a timm VisionTransformer, and builds it.

    Args:
        kind: What the host is, for messages.
        host: The other library's model; it does not change.
        alike: Classes of its modules that compute what another class does, which timm uses.
    """

    def __init__(self, kind: str, host: nn.Module, alike: Optional[Mapping[Type[Any], Type[Any]]] = None) -> None:
        self.kind, self.host = kind, host
        self._alike: Dict[Any, Any] = {NonDynamicallyQuantizableLinear: nn.Linear, **(alike or {})}
        self._modules: Dict[str, nn.Module] = {}
        self._tensors: Dict[str, Tensor] = {}
        self._sources: Dict[int, Tuple[Tensor, ...]] = {}  # of a tensor that is made from others

    def one_dtype(self) -> None:
        """Refuse a host whose norms and layers differ in dtype, between which it casts as timm does not."""
        dtypes = {p.dtype for p in self.host.parameters()}
        if len(dtypes) > 1:
            raise self.refusal(f"its parameters are of several dtypes ({', '.join(sorted(map(str, dtypes)))}), which "
                               'timm does not mix. Call model.float() first, or model.half()')

    def same_in_each(self, what: str, values: Sequence[Any]) -> None:
        """Refuse a host whose layers differ in a setting."""
        other = [i for i, value in enumerate(values) if value != values[0]]
        if other:
            found = f'{values[0]} in layer 0, {values[other[0]]} in layer {other[0]}'
            raise self.refusal(f'its layers differ in {what}: {found}')

    def refusal(self, reason: str) -> ValueError:
        return ValueError(f'Cannot build a timm model from this {self.kind}: {reason}.')

    def module(self, name: str, module: nn.Module) -> None:
        """The host's module in the place of timm's `name`."""
        self._modules[name] = module

    def tensor(self, name: str, tensor: Tensor, *sources: Tensor) -> None:
        """A tensor in the place of timm's `name`: the host's own, or made from some of the host's."""
        self._tensors[name] = self._made(tensor.detach(), sources) if sources else tensor

    def attention(self, name: str, attention: nn.MultiheadAttention, split: bool = False) -> None:
        """PyTorch's attention in the place of timm's, which has a layer 'qkv', or two, 'q' and 'kv'."""
        weight, bias, width = attention.in_proj_weight, attention.in_proj_bias, attention.embed_dim
        if split:
            for part, rows in (('q', slice(width)), ('kv', slice(width, None))):
                made = [self._made(t.detach()[rows], [t]) for t in (weight, bias)]
                self._linear(f'{name}.{part}', width, made, attention)
        else:
            self._linear(f'{name}.qkv', width, (weight, bias), attention)
        self.module(f'{name}.proj', attention.out_proj)

    def joined(self, name: str, layers: Sequence[nn.Linear]) -> None:
        """Several linear layers of one input in the place of timm's one."""
        made = []
        for key in ('weight', 'bias'):
            tensors = [getattr(layer, key) for layer in layers]
            if any(t is None for t in tensors):
                raise self.refusal(f'one of the {len(layers)} layers in place of {name} has no {key}')
            made.append(self._made(torch.cat([t.detach() for t in tensors]), tensors))
        self._linear(name, layers[0].in_features, made, layers[0])

    def _linear(self, name: str, width: int, tensors: Sequence[Optional[Tensor]], like: nn.Module) -> None:
        weight, bias = tensors
        stand_in: Any = nn.Linear(width, 3 * width if weight is None else len(weight), device='meta')
        stand_in.weight, stand_in.bias = weight, bias
        self.module(name, stand_in.train(like.training))

    def _made(self, tensor: Tensor, sources: Sequence[Tensor]) -> nn.Parameter:
        learns = {source.requires_grad for source in sources}
        if len(learns) > 1:
            names = [name for name, p in self.host.named_parameters() if any(p is source for source in sources)]
            raise self.refusal(f"of {', '.join(names)}, which are one in timm, only a part requires gradients")
        parameter = nn.Parameter(tensor, requires_grad=learns.pop())
        self._sources[id(parameter)] = tuple(sources)
        return parameter

    def build(self, name: str, overlay: Mapping[str, Any], **args: Any) -> VisionTransformer:
        """The timm model `name` with some keywords, and everything that was collected."""
        # on the meta device timm's random initialisation takes no time and draws no random numbers
        with on_meta():
            model: Any = timm.create_model(name, pretrained_cfg_overlay={**_NO_SOURCE, **overlay}, **args)
        model.train(self.host.training)  # then module by module, as a frozen part may be in eval mode
        for name, theirs in self._modules.items():
            self._carry_settings(name, model.get_submodule(name), theirs)
        pairs = dict(self._tensors)
        for name, theirs in self._modules.items():
            if next(theirs.children(), None) is None:
                pairs.update({f'{name}.{key}': p for key, p in theirs.named_parameters(recurse=False)})
        self._copy_parameters(model, pairs)
        return model

    def _carry_settings(self, name: str, ours: Any, theirs: Any) -> None:
        ours.training = theirs.training
        if next(ours.children(), None) is not None:
            return
        for key in ('p', 'eps'):  # rate of a dropout, eps of a norm
            if hasattr(ours, key) and hasattr(theirs, key):
                setattr(ours, key, getattr(theirs, key))
        kind = self._alike.get(type(theirs), type(theirs))
        if not isinstance(ours, kind) or ours.extra_repr() != theirs.extra_repr().replace(', padding=valid', ''):
            raise self.refusal(
                f'in place of {name}, which is {type(ours).__name__}({ours.extra_repr()}) in timm, it has '
                f'{type(theirs).__name__}({theirs.extra_repr()})')

    def _copy_parameters(self, model: nn.Module, pairs: Dict[str, Tensor]) -> None:
        placed = {id(source) for tensor in pairs.values() for source in self._sources.get(id(tensor), (tensor,))}
        buffers = [(name, b) for name, b in self.host.named_buffers() if name in self.host.state_dict()]
        for name, tensor in [*self.host.named_parameters(), *buffers]:
            if id(tensor) not in placed:
                raise self.refusal(f'timm has no place for {name}')
        ours = dict(model.named_parameters())
        for name in [*ours, *pairs]:
            a, b = (list(tensors[name].shape) if name in tensors else 'nothing' for tensors in (pairs, ours))
            if a != b:
                raise self.refusal(f'in place of {name}, which is {b} in timm, it has {a}')
        copies: Dict[int, Any] = {}  # a parameter in two places stays one
        for name, tensor in pairs.items():
            owner, _, key = name.rpartition('.')
            setattr(model.get_submodule(owner), key, copy.deepcopy(tensor, copies))
