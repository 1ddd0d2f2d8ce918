"""put_tower_: a timm model as the image tower of an open_clip or transformers model."""
from typing import Any

from timm.layers import to_2tuple
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..hooks import on_meta, watch_blocks
from .from_libraries import HOLDERS, kind_of

__all__ = ['PutTower', 'put_tower_']

_OPEN_CLIP = ('open_clip.transformer.VisionTransformer', 'open_clip.timm_model.TimmModel')
_KEPT = ('preprocess_cfg', 'image_mean', 'image_std')  # what open_clip records at a tower


class PutTower:
    """The result of `put_tower_`.

    Attributes:
        tower: The timm model that is the image tower now.
    """

    def __init__(self, tower: nn.Module, replaced: list[tuple[Any, str, Any, Any]]) -> None:
        self.tower = tower
        self._replaced = replaced  # owner, name, new and former module

    def restore(self) -> None:
        """Put back the tower that was there before, on the device and in the dtype that the model has now.

        Raises:
            ValueError: The model no longer holds this tower: it was restored, or another one was put in.
        """
        if any(getattr(owner, name) is not new for owner, name, new, _ in self._replaced):
            raise ValueError('The model no longer holds this tower: restore() was called already, or another tower '
                             'was put in later and must be restored first.')
        now = next(self.tower.parameters())
        for owner, name, _, former in self._replaced:
            former.to(now.device)
            if next(former.parameters(), now).dtype != now.dtype:  # some programs keep their norms in another one
                former.to(now.dtype)
            setattr(owner, name, former)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({type(self.tower).__name__})'


def put_tower_(model: nn.Module, tower: nn.Module) -> PutTower:
    """Make a timm model the image tower of an open_clip or transformers model, in place; the text tower is left alone.

    The tower comes from `from_open_clip` or `from_transformers`, or was trained for the same embeddings. If it has no
    classes, the model applies its own projection, if that lies outside the former tower. The tower is used as it is,
    not copied. The model saves it with the rest, but cannot rebuild it: save it by `save_pretrained`, and put it in
    again after loading.

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
    visual = unwrap_model(program.visual) if isinstance(getattr(program, 'visual', None), nn.Module) else None
    if not all(hasattr(tower, name) for name in ('forward_features', 'forward_head', 'num_classes', 'num_features')):
        raise TypeError(f'The tower must be a timm model; got {type(tower).__name__}. See from_open_clip and '
                        'from_transformers.')
    if f'{type(visual).__module__}.{type(visual).__qualname__}' in _OPEN_CLIP:
        wanted = _in_open_clip(program, visual, tower)
    elif kind_of(program) in HOLDERS:
        wanted = _in_transformers(program, tower)
    else:
        has = '' if visual is None else f' whose visual is a {type(visual).__module__}.{type(visual).__qualname__}'
        raise TypeError(
            f'put_tower_ got a {type(program).__name__}{has}: expected an open_clip model whose visual is its '
            f"VisionTransformer or a TimmModel, or one of transformers ({', '.join(HOLDERS)}).")
    done = PutTower(tower, [(owner, name, new, getattr(owner, name)) for owner, name, new in wanted])
    for owner, name, new in wanted:
        setattr(owner, name, new)
    return done


def _check_dtype(old: nn.Module, tower: nn.Module) -> None:
    wanted, found = (next((p.dtype for p in m.parameters()), None) for m in (old, tower))
    if wanted != found:
        raise ValueError(f'The tower is {found}, the tower of this model {wanted}. Call tower.to({wanted}) first.')


def _features(tower: Any) -> int:
    """The width of what a tower without classes gives; timm's convolutional heads widen the features."""
    return int(getattr(tower, 'head_hidden_size', tower.num_features))


def _width(tower: Any) -> int:
    return tower.num_classes or _features(tower)


def _in_open_clip(program: Any, old: Any, tower: Any) -> list[tuple[Any, str, Any]]:
    from open_clip.timm_model import TimmModel
    if getattr(old, 'output_tokens', False):
        raise TypeError(
            f'A {type(program).__name__} also uses the patch tokens of its image tower, but a timm tower gives only '
            'embeddings.')
    _check_dtype(old, tower)
    head, width = None, getattr(old, 'output_dim', 0)
    if isinstance(old, TimmModel):
        layers = [module for module in old.head.modules() if isinstance(module, nn.Linear)]
        width = layers[-1].out_features if layers else _width(old.trunk)
        if layers and 'pool' not in dict(old.head.named_children()) and not tower.num_classes:
            head = old.head
            if _features(tower) != layers[0].in_features:
                raise ValueError(f'The tower has no classes and {_features(tower)} features; this model projects '
                                 f'{layers[0].in_features} to {width}.')
    if head is None and _width(tower) != width:
        raise ValueError(f'The tower gives embeddings of width {_width(tower)}; this model needs {width}.')
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
    return [(program, 'visual', visual)]


def _in_transformers(program: Any, tower: Any) -> list[tuple[Any, str, Any]]:
    old = program.vision_model
    _check_dtype(old, tower)
    projection = getattr(program, 'visual_projection', None)
    hidden = program.config.hidden_size if kind_of(program) == 'CLIPVisionModelWithProjection' else (
        program.config.vision_config.hidden_size)
    width = hidden if projection is None else projection.out_features
    visual = _VisionModel(tower, projection is None, program.config)
    visual.training = old.training  # the tower keeps its own mode
    wanted: list[tuple[Any, str, Any]] = [(program, 'vision_model', visual)]
    if tower.num_classes and projection is not None and tower.num_classes == width:
        wanted.append((program, 'visual_projection', _Head(tower)))
    elif tower.num_classes or _features(tower) != hidden:
        takes = f'{hidden} features without classes (num_classes=0)' + (
            f', which it projects to {width}, or a head of {width} classes.' if projection is not None else '.')
        raise ValueError(f'The tower has {_features(tower)} features and {tower.num_classes} classes; this '
                         f'{type(program).__name__} takes {takes}')
    return wanted


class _Head(nn.Module):
    """The head of a tower that the program owns already: its parameters are registered there, once."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self._tower = [tower]  # a list keeps it from being registered here, too

    def forward(self, pooled: Tensor) -> Tensor:
        tower: Any = self._tower[0]
        embedding: Tensor = tower.get_classifier()(pooled)
        return embedding


class _VisionModel(nn.Module):
    """A timm tower with the arguments and the outputs of a vision model of transformers."""

    def __init__(self, tower: nn.Module, normed: bool, config: Any) -> None:
        super().__init__()
        self.tower = tower
        self.config = config
        self.normed = normed  # whether last_hidden_state is after the last norm: in SigLIP, but not in CLIP

    @property
    def gradient_checkpointing(self) -> bool:
        """What `gradient_checkpointing_enable()` of transformers sets."""
        return bool(getattr(self.tower, 'grad_checkpointing', False))

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        tower: Any = self.tower
        tower.set_grad_checkpointing(enable)

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
        tower: Any = self.tower
        images = pixel_values.to(next(tower.parameters()).dtype)
        norm = None if self.normed else getattr(tower, 'norm', None)
        with watch_blocks([[norm]] if isinstance(norm, nn.Module) else []) as records:
            features = tower.forward_features(images)
        output = BaseModelOutputWithPooling(
            last_hidden_state=records[0][0][0] if records else features,
            pooler_output=tower.forward_head(features, pre_logits=True))
        return output.to_tuple() if kwargs.get('return_dict') is False else output
