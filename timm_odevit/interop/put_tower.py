"""put_tower_: a timm model as the image tower of an open_clip or transformers model."""
from typing import Any, List, Tuple

import torch
from timm.layers import to_2tuple
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..convert.replacements import Replacements
from ..hooks import on_meta
from ..settings import checks_keywords
from .transformers import HOLDERS, kind_of

__all__ = ['PutTower', 'put_tower_']

_OPEN_CLIP = ('open_clip.transformer.VisionTransformer', 'open_clip.timm_model.TimmModel')
_KEPT = ('preprocess_cfg', 'image_mean', 'image_std')  # what open_clip records at a tower


class PutTower:
    """The result of `put_tower_`.

    Attributes:
        tower: The timm model that is the image tower now.
    """

    def __init__(self, tower: nn.Module, replacements: Replacements) -> None:
        self.tower = tower
        self._replacements = replacements

    def restore(self) -> None:
        """Put back the tower that was there before; further calls change nothing."""
        self._replacements.take_off()

    def __repr__(self) -> str:
        return f'{type(self).__name__}({type(self.tower).__name__})'


@checks_keywords
def put_tower_(model: nn.Module, tower: nn.Module) -> PutTower:
    """Make a timm model the image tower of an open_clip or transformers model, in place; the text tower is left alone.

    The tower comes from `from_open_clip` or `from_transformers`, or was trained for the same embeddings. In
    transformers, one without classes leaves the projection to the model. It is used as it is, not copied. The program
    saves it with the rest, but cannot rebuild it: save it by `save_pretrained`, and put it in again after loading.

    Args:
        model: open_clip CLIP or CustomTextCLIP; or transformers CLIPModel, CLIPVisionModelWithProjection, SiglipModel.
        tower: timm model, converted or not.

    Returns:
        PutTower, whose restore() puts the former tower back.

    Raises:
        TypeError: The model has no image tower that could be replaced.
        ValueError: The tower's embeddings have another width.
    """
    program: Any = unwrap_model(model)
    visual = getattr(program, 'visual', None)
    if f'{type(visual).__module__}.{type(visual).__qualname__}' in _OPEN_CLIP:
        wanted = _in_open_clip(program, visual, tower)
    elif kind_of(program) in HOLDERS:
        wanted = _in_transformers(program, tower)
    else:
        raise TypeError(
            f'put_tower_ got a {type(program).__name__}: expected an open_clip model with a visual, or one of '
            f"transformers ({', '.join(HOLDERS)}).")
    replacements = Replacements(wanted)
    replacements.put()
    return PutTower(tower, replacements)


def _width(tower: Any) -> int:
    return tower.num_classes or tower.num_features


def _in_open_clip(program: Any, old: Any, tower: Any) -> List[Tuple[Any, str, Any]]:
    from open_clip.timm_model import TimmModel
    if getattr(old, 'output_tokens', False):
        raise TypeError(
            f'A {type(program).__name__} also uses the tokens of its image tower; a tower of embeddings gives none.')
    projection = getattr(getattr(old, 'head', None), 'proj', None)
    if isinstance(old, TimmModel):
        width = _width(old.trunk) if projection is None else projection.out_features
    else:
        width = old.output_dim
    if _width(tower) != width:
        raise ValueError(f'The tower gives embeddings of width {_width(tower)}; this model compares {width}.')
    with on_meta():  # open_clip's own wrapper, which builds a model of its own by name
        visual = TimmModel('test_vit', width, pool='', proj='none')
    visual.trunk = tower
    visual.image_size = to_2tuple(tower.patch_embed.img_size) if hasattr(tower, 'patch_embed') else old.image_size
    for key in _KEPT:
        if hasattr(old, key):
            setattr(visual, key, getattr(old, key))
    visual.training = old.training
    return [(program, 'visual', visual)]


def _in_transformers(program: Any, tower: Any) -> List[Tuple[Any, str, Any]]:
    old = program.vision_model
    projection = getattr(program, 'visual_projection', None)
    hidden = program.config.hidden_size if kind_of(program) == 'CLIPVisionModelWithProjection' else (
        program.config.vision_config.hidden_size)
    width = hidden if projection is None else projection.out_features
    visual = _VisionModel(tower, normed=projection is None)
    visual.training = old.training  # the tower keeps its own mode
    wanted: List[Tuple[Any, str, Any]] = [(program, 'vision_model', visual)]
    if tower.num_classes and projection is not None and tower.num_classes == width:
        wanted.append((program, 'visual_projection', _Head(tower)))
    elif tower.num_classes or tower.num_features != hidden:
        raise ValueError(
            f'The tower gives embeddings of width {_width(tower)}; this model compares {width}'
            + (f', or projects {hidden} to them.' if projection is not None else '.'))
    return wanted


class _Head(nn.Module):
    """The head of a tower that the program owns already: its parameters are registered there, once."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self._tower = [tower]  # a list keeps it from being registered here, too

    def forward(self, pooled: Tensor) -> Tensor:
        tower: Any = self._tower[0]
        found: Tensor = tower.head(pooled)
        return found


class _VisionModel(nn.Module):
    """A timm tower with the arguments and the outputs of a vision model of transformers."""

    def __init__(self, tower: nn.Module, normed: bool) -> None:
        super().__init__()
        self.tower = tower
        self.normed = normed  # whether last_hidden_state is after the last norm: in SigLIP, but not in CLIP

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        for key in ('output_hidden_states', 'output_attentions'):
            if kwargs.get(key):
                raise ValueError(
                    f'{key}=True: a timm tower has none in the form of transformers. Use '
                    'model.vision_model.tower.forward_intermediates(images) or attention_over_time.')
        if interpolate_pos_encoding:
            raise ValueError(
                'interpolate_pos_encoding=True: a timm tower takes other image sizes if it was built with '
                'dynamic_img_size=True.')
        tower: Any = self.tower
        images = pixel_values.to(next(tower.parameters()).dtype)
        features, states = tower.forward_intermediates(
            images, indices=1, norm=False, output_fmt='NLC', return_prefix_tokens=True)
        last = features if self.normed else torch.cat(states[0][::-1], dim=1)
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=tower.forward_head(features, pre_logits=True))
