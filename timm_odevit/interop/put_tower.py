"""put_tower_: a timm model as the image tower of an open_clip or transformers model."""
from typing import Any

from timm.layers import to_2tuple
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..convert.conversion import Replacements
from ..hooks import on_meta, watch_blocks
from .from_libraries import HOLDERS, kind_of, type_of, unexpected

_OPEN_CLIP = ('open_clip.transformer.VisionTransformer', 'open_clip.timm_model.TimmModel')


class PutTower(Replacements):
    """The result of `put_tower_`."""
    what = 'this tower'

    def restore(self) -> None:
        """Put the former tower back, on the device and in the dtype that the model has now."""
        super().restore()
        now = next(self._rows[0][2].parameters())
        for _, _, _, former in self._rows:
            if now.dtype not in {p.dtype for p in former.parameters()}:  # some programs keep their norms in another one
                former.to(now.dtype)


def put_tower_(model: nn.Module, tower: nn.Module) -> PutTower:
    """Make a timm model the image tower of an open_clip or transformers model, in place; the text tower is left alone.

    If the tower has no classes, the model applies its own projection, if that lies outside the former tower. The tower
    is not copied, so it needs the dtype of the model, which cannot rebuild it: save it by `save_pretrained`, and put it
    in again after loading. `restore()` of the returned PutTower puts the former tower back.

    Args:
        model: open_clip CLIP or CustomTextCLIP; or transformers CLIPModel, CLIPVisionModelWithProjection, SiglipModel.

    Raises TypeError if the model has no such tower, ValueError if the embeddings have another width.

    Examples:
        >>> tower = from_open_clip(clip)
        >>> done = convert_(tower, phases=3)
        >>> put = put_tower_(clip, tower)
        >>> embedding = clip.encode_image(images)
        >>> put.restore()
    """
    program = unwrap_model(model)
    visual = unwrap_model(getattr(program, 'visual', None))
    if not hasattr(tower, 'forward_head'):
        raise unexpected('put_tower_', tower, 'a timm model as the tower')
    if kind_of(program) in HOLDERS:
        modules = _in_transformers(program, tower)
    elif type_of(visual) in _OPEN_CLIP and not getattr(visual, 'output_tokens', False):
        modules = {'visual': _in_open_clip(visual, tower)}
    else:
        raise unexpected(
            'put_tower_', program, f'a {", ".join(HOLDERS)}, or a model of open_clip whose visual is a '
                                   'VisionTransformer or TimmModel and gives no patch tokens')
    return PutTower(program, [(program, name, module) for name, module in modules.items()])


def _check_width(tower: Any, needed: int) -> None:
    if (width := _width(tower)) != needed:
        raise ValueError(f'The tower gives embeddings of width {width}; this model needs {needed}. Build it with '
                         f'num_classes={needed}.')


def _width(tower: Any) -> int:
    return tower.num_classes or getattr(tower, 'head_hidden_size', tower.num_features)  # some heads widen them


def _in_open_clip(old: Any, tower: Any) -> nn.Module:
    from open_clip.timm_model import TimmModel
    head, needed = None, getattr(old, 'output_dim', 0)
    if isinstance(old, TimmModel):
        layers = [module for module in old.head.modules() if isinstance(module, nn.Linear)]
        needed = layers[-1].out_features if layers else _width(old.trunk)
        if layers and not hasattr(old.head, 'pool') and not tower.num_classes:
            head, needed = old.head, layers[0].in_features
    _check_width(tower, needed)
    with on_meta():  # open_clip's own wrapper, which builds a model by name
        visual = TimmModel('test_vit', needed, pool='', proj='none')
    visual.trunk = tower
    if head is not None:
        visual.head = head
    size = getattr(getattr(tower, 'patch_embed', None), 'img_size', None)
    visual.image_size = old.image_size if size is None else to_2tuple(size)
    for key in ('preprocess_cfg', 'image_mean', 'image_std'):  # what open_clip records at a tower
        if hasattr(old, key):
            setattr(visual, key, getattr(old, key))
    visual.training = old.training
    return visual


def _in_transformers(program: Any, tower: Any) -> dict[str, nn.Module]:
    projection = getattr(program, 'visual_projection', None)
    projects = projection is not None and tower.num_classes == projection.out_features
    visual = _VisionModel(tower, program.config, normed=projection is None, pre_logits=projects)
    visual.training = program.vision_model.training  # the tower keeps its own mode
    if projects:
        return {'vision_model': visual, 'visual_projection': _Head(tower)}
    _check_width(tower, getattr(program.config, 'vision_config', program.config).hidden_size)
    return {'vision_model': visual}


class _Head(nn.Module):
    """The head of a tower that is part of the model already."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self._tower = [tower]  # in a list, so that its parameters are not registered twice

    def forward(self, pooled: Tensor) -> Any:
        return self._tower[0].get_classifier()(pooled)


class _VisionModel(nn.Module):
    """`normed`: whether last_hidden_state is after the last norm, as in SigLIP, but not in CLIP."""

    def __init__(self, tower: Any, config: Any, *, normed: bool, pre_logits: bool) -> None:
        super().__init__()
        self.tower, self.config, self.normed, self.pre_logits = tower, config, normed, pre_logits

    @property
    def gradient_checkpointing(self) -> bool:
        return bool(getattr(self.tower, 'grad_checkpointing', False))

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.tower.set_grad_checkpointing(enable)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        for key in ('output_hidden_states', 'output_attentions', 'interpolate_pos_encoding'):
            if kwargs.get(key, getattr(self.config, key, False)):
                raise ValueError(f'{key}=True does not work with a timm tower. Use forward_intermediates(images), '
                                 'attention_over_time or, for other image sizes, dynamic_img_size=True.')
        tower = self.tower
        norm = None if self.normed else getattr(tower, 'norm', None)
        with watch_blocks([[norm]] if isinstance(norm, nn.Module) else []) as records:
            features = tower.forward_features(pixel_values.to(next(tower.parameters()).dtype))
        output = BaseModelOutputWithPooling(
            last_hidden_state=records[0][0][0] if records else features,
            pooler_output=tower.forward_head(features, pre_logits=self.pre_logits))
        return output.to_tuple() if kwargs.get('return_dict') is False else output
