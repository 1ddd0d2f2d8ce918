"""put_tower_: a timm model as the image tower of an open_clip or transformers model."""
from typing import Any

from timm.layers import to_2tuple
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..hooks import on_meta, watch_blocks
from .build_vit import type_of
from .from_libraries import HOLDERS, kind_of

__all__ = ['PutTower', 'put_tower_']

_OPEN_CLIP = ('open_clip.transformer.VisionTransformer', 'open_clip.timm_model.TimmModel')
_KEPT = ('preprocess_cfg', 'image_mean', 'image_std')  # what open_clip records at a tower


class PutTower:
    """The result of `put_tower_`; `tower` is the timm model that is the image tower now."""

    def __init__(self, program: Any, tower: nn.Module, modules: dict[str, nn.Module]) -> None:
        self.tower, self._program, self._new = tower, program, modules
        self._former = {name: getattr(program, name) for name in modules}
        for name, module in modules.items():
            setattr(program, name, module)

    def restore(self) -> None:
        """Put the former tower back, on the device and in the dtype that the model has now.

        Raises ValueError if the model no longer holds this tower.
        """
        if any(getattr(self._program, name) is not module for name, module in self._new.items()):
            raise ValueError('The model no longer holds this tower: it was restored already, or another one was put in '
                             'later and must be restored first.')
        now = next(self.tower.parameters())
        for name, module in self._former.items():
            module.to(now.device)
            if next(module.parameters(), now).dtype != now.dtype:  # some programs keep their norms in another one
                module.to(now.dtype)
            setattr(self._program, name, module)

    def __repr__(self) -> str:
        return f'PutTower({type(self.tower).__name__})'


def put_tower_(model: nn.Module, tower: nn.Module) -> PutTower:
    """Make a timm model the image tower of an open_clip or transformers model, in place; the text tower is left alone.

    If the tower has no classes, the model applies its own projection, if that lies outside the former tower. The tower
    is used as it is, not copied. The model saves it with the rest, but cannot rebuild it: save it by `save_pretrained`,
    and put it in again after loading.

    Args:
        model: open_clip CLIP or CustomTextCLIP; or transformers CLIPModel, CLIPVisionModelWithProjection, SiglipModel.
        tower: timm model, converted or not.

    Returns:
        PutTower, whose restore() puts the former tower back.

    Raises:
        TypeError: The model has no image tower that could be replaced, or the tower is no timm model.
        ValueError: The tower's embeddings have another width, or its parameters another dtype.

    Examples:
        >>> tower = from_open_clip(clip)
        >>> done = convert_(tower, time='low_rank', rank=8)
        >>> put = put_tower_(clip, tower)
        >>> embedding = clip.encode_image(images)
        >>> put.restore()
    """
    program: Any = unwrap_model(model)
    if not all(hasattr(tower, name) for name in ('forward_features', 'forward_head', 'num_classes', 'num_features')):
        raise TypeError(f'The tower must be a timm model; got {type(tower).__name__}. See from_open_clip and '
                        'from_transformers.')
    visual = unwrap_model(getattr(program, 'visual', None))
    if type_of(visual) in _OPEN_CLIP:
        return PutTower(program, tower, {'visual': _in_open_clip(program, visual, tower)})
    if kind_of(program) in HOLDERS:
        return PutTower(program, tower, _in_transformers(program, tower))
    raise TypeError(
        f'put_tower_ got a {type(program).__name__}: expected an open_clip model whose visual is its VisionTransformer '
        f"or a TimmModel, or one of transformers ({', '.join(HOLDERS)}).")


def _check_dtype(old: nn.Module, tower: nn.Module) -> None:
    wanted, dtype = (next(m.parameters()).dtype for m in (old, tower))
    if dtype != wanted:
        raise ValueError(f'The tower is {dtype}, the tower of this model {wanted}. Call tower.to({wanted}) first.')


def _features(tower: Any) -> int:
    """The width of what a tower without classes gives; timm's convolutional heads widen the features."""
    return int(getattr(tower, 'head_hidden_size', tower.num_features))


def _in_open_clip(program: Any, old: Any, tower: Any) -> nn.Module:
    from open_clip.timm_model import TimmModel
    if getattr(old, 'output_tokens', False):
        raise TypeError(
            f'A {type(program).__name__} also uses the patch tokens of its image tower, but a timm tower gives only '
            'embeddings.')
    _check_dtype(old, tower)
    head, width, features = None, getattr(old, 'output_dim', 0), _features(tower)
    if isinstance(old, TimmModel):
        layers = [module for module in old.head.modules() if isinstance(module, nn.Linear)]
        width = layers[-1].out_features if layers else old.trunk.num_classes or _features(old.trunk)
        if layers and 'pool' not in dict(old.head.named_children()) and not tower.num_classes:
            head = old.head
            if features != layers[0].in_features:
                raise ValueError(f'The tower has no classes and {features} features; this model projects '
                                 f'{layers[0].in_features} to {width}.')
    if head is None and (tower.num_classes or features) != width:
        raise ValueError(f'The tower gives embeddings of width {tower.num_classes or features}; this model needs '
                         f'{width}.')
    with on_meta():  # open_clip's own wrapper, which builds a model of its own by name
        visual = TimmModel('test_vit', width, pool='', proj='none')
    visual.trunk = tower
    if head is not None:
        visual.head = head
    size = getattr(getattr(tower, 'patch_embed', None), 'img_size', None)
    visual.image_size = old.image_size if size is None else to_2tuple(size)
    for key in _KEPT:
        if hasattr(old, key):
            setattr(visual, key, getattr(old, key))
    visual.training = old.training
    return visual


def _in_transformers(program: Any, tower: Any) -> dict[str, nn.Module]:
    old, projection = program.vision_model, getattr(program, 'visual_projection', None)
    _check_dtype(old, tower)
    hidden = getattr(program.config, 'vision_config', program.config).hidden_size
    visual = _VisionModel(tower, projection is None, program.config)
    visual.training = old.training  # the tower keeps its own mode
    if projection is not None and tower.num_classes == projection.out_features:
        return {'vision_model': visual, 'visual_projection': _Head(tower)}
    if tower.num_classes or _features(tower) != hidden:
        or_head = '' if projection is None else f', or a head of {projection.out_features} classes'
        raise ValueError(f'The tower has {_features(tower)} features and {tower.num_classes} classes; this '
                         f'{type(program).__name__} takes {hidden} features without classes (num_classes=0){or_head}.')
    return {'vision_model': visual}


class _Head(nn.Module):
    """The head of a tower that the program owns already, where its parameters are registered once."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self._tower = [tower]  # a list keeps it from being registered here, too

    def forward(self, pooled: Tensor) -> Tensor:
        tower: Any = self._tower[0]
        embedding: Tensor = tower.get_classifier()(pooled)
        return embedding


class _VisionModel(nn.Module):
    """A timm tower with the arguments and the outputs of a vision model of transformers."""

    def __init__(self, tower: Any, normed: bool, config: Any) -> None:
        super().__init__()
        self.tower = tower
        self.config = config
        self.normed = normed  # whether last_hidden_state is after the last norm: in SigLIP, but not in CLIP

    @property
    def gradient_checkpointing(self) -> bool:
        return bool(getattr(self.tower, 'grad_checkpointing', False))

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.tower.set_grad_checkpointing(enable)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        for key in ('output_hidden_states', 'output_attentions'):
            if kwargs.get(key, getattr(self.config, key, False)):
                raise ValueError(
                    f'{key}=True does not work with a timm tower. Use '
                    'model.vision_model.tower.forward_intermediates(images) or attention_over_time.')
        if interpolate_pos_encoding:
            raise ValueError(
                'interpolate_pos_encoding=True does not work with a timm tower. For other image sizes, build it with '
                'dynamic_img_size=True.')
        tower = self.tower
        norm = None if self.normed else getattr(tower, 'norm', None)
        with watch_blocks([[norm]] if isinstance(norm, nn.Module) else []) as records:
            features = tower.forward_features(pixel_values.to(next(tower.parameters()).dtype))
        output = BaseModelOutputWithPooling(
            last_hidden_state=records[0][0][0] if records else features,
            pooler_output=tower.forward_head(features, pre_logits=True))
        return output.to_tuple() if kwargs.get('return_dict') is False else output
