"""convert_: a pretrained ViT becomes an ODE-ViT, in place, and back."""
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, List, Optional, Tuple

import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from .blocks import OdeBlocks, find_ode_blocks, scriptable_copy
from .config import OdeConfig
from .init import build_field
from .methods import METHODS

__all__ = ['Conversion', 'check_convertible', 'convert_', 'count_parameters', 'list_convertible']


_DEFAULT = OdeConfig()


def convert_(model: nn.Module, config: OdeConfig = _DEFAULT, *, keep_original: bool = True) -> 'Conversion':
    """Replace the blocks of a ViT by one shared block that an ODE solver evaluates K times, in place.

    Everything is checked and built first, then assigned at once: a refused call leaves the model as it was. Device,
    dtype, mode and requires_grad carry over. Parameters are new: create the optimizer afterwards.

    Args:
        model: A timm VisionTransformer of plain pre-norm blocks.
        config: Settings; steps and T default to the depth of the model.
        keep_original: Keep the original blocks, so that `restore()` can bring them back; False frees them.

    Returns:
        A Conversion: print it for a report, call its `restore()` to undo.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is converted already, or the settings do not fit it.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    check_convertible(model, config)
    host: Any = model
    original = host.blocks
    depth = len(original)
    config = config.resolve(depth)
    before = count_parameters(model)
    shared = build_field(config.field, config.init, list(original))
    feature = {key: value for key, value in host.feature_info[0].items() if key != 'module'}
    blocks = OdeBlocks(shared, config, feature).train(model.training)
    done = Conversion(
        model=model,
        blocks=blocks,
        depth=depth,
        config=config,
        parameters_before=before,
        parameters_after=before - count_parameters(original) + count_parameters(blocks),
        _original=original if keep_original else None,
        _feature_info=host.feature_info,
        _training=model.training,
    )
    host.blocks = blocks
    host.feature_info = blocks.feature_info
    # TorchScript looks for this attribute; nothing else reads it
    host.__prepare_scriptable__ = partial(scriptable_copy, model)
    return done


def check_convertible(model: nn.Module, config: OdeConfig = _DEFAULT) -> None:
    """Raise what `convert_(model, config)` would raise, and change nothing.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is converted already, or the settings do not fit it.
    """
    name = type(model).__name__
    hint = 'See timm_odevit.list_convertible().'
    if not isinstance(model, nn.Module):
        raise TypeError(
            f'Cannot convert {name}: expected a timm model, such as timm.create_model("vit_small_patch16_224").')
    if not isinstance(config, OdeConfig):
        raise TypeError(f'config must be an OdeConfig, such as OdeConfig(steps=12); got {type(config).__name__}.')
    converted = find_ode_blocks(model)
    if converted:
        now = converted[0].config
        raise ValueError(
            f'This model is already converted (1 shared block, {now.method}, {now.steps} steps). '
            'Call restore() on its Conversion first.')
    for wrapper, inner in (('_orig_mod', 'torch.compile'), ('module', 'DataParallel or DistributedDataParallel')):
        if isinstance(getattr(model, wrapper, None), nn.Module):
            raise TypeError(f'Cannot convert {name}: convert the model before {inner} wraps it.')
    if not isinstance(model, VisionTransformer):
        if not isinstance(getattr(model, 'blocks', None), (nn.Sequential, nn.ModuleList)):
            raise TypeError(f'Cannot convert {name}: it has no sequence of transformer blocks. {hint}')
        raise TypeError(f'Cannot convert {name}: only VisionTransformer is supported. {hint}')
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        # by class object: several timm modules have a class called Block
        if type(block) is not Block or type(block.attn) is not Attention:
            kind = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
            raise TypeError(
                f'Cannot convert {name}: block {i} is a {kind}; only plain pre-norm blocks with plain attention are '
                f'supported. {hint}')
        if _shapes(block) != _shapes(blocks[0]):
            raise ValueError(
                f'Cannot convert {name}: block {i} has other parameters than block 0, so they cannot share weights.')
    if config.init.startswith('block:') and int(config.init[6:]) >= len(blocks):
        raise ValueError(
            f"init '{config.init}': this model has {len(blocks)} blocks. "
            f'Allowed: block:0 to block:{len(blocks) - 1}, mean, spectral.')
    if config.field == 'lipschitz' and config.init != 'spectral':
        first: Any = blocks[0]
        mlp, norm = first.mlp, first.norm1
        if not hasattr(mlp, 'fc1') or mlp.fc1.out_features != mlp.fc2.in_features:
            raise ValueError(
                f"init '{config.init}' needs a base with a plain two-layer MLP for the lipschitz field; this one is a "
                f"{type(mlp).__name__}. Use init='spectral' or field='native'.")
        if getattr(norm, 'weight', None) is None or getattr(norm, 'bias', None) is None:
            raise ValueError(
                f"init '{config.init}' needs a base whose norms have weight and bias for the lipschitz field; this one "
                f"is a {type(norm).__name__}. Use init='spectral' or field='native'.")


@dataclass(eq=False)
class Conversion:
    """What `convert_` did: a report to print, and the way back.

    Attributes:
        model: The converted model.
        blocks: Its OdeBlocks.
        depth: Number of original blocks.
        config: Settings, with steps and T filled in.
        parameters_before: Parameters of the model before.
        parameters_after: Parameters of the model after.
    """
    model: Any
    blocks: OdeBlocks
    depth: int
    config: OdeConfig
    parameters_before: int
    parameters_after: int
    _original: Optional[nn.Module]
    _feature_info: List[Any]
    _training: bool

    def restore(self) -> nn.Module:
        """Put the original blocks back, bit for bit, on the device and in the mode that the model has now.

        Returns:
            The model.

        Raises:
            ValueError: The original blocks were not kept, the model does not hold this conversion any more, or it has
                another dtype now.
        """
        if self._original is None:
            raise ValueError(
                'The original blocks were not kept. Convert with keep_original=True to be able to restore.')
        if getattr(self.model, 'blocks', None) is not self.blocks:
            raise ValueError(
                'This model does not hold the blocks of this conversion: it was restored or changed since.')
        now, then = next(self.blocks.parameters()), next(self._original.parameters())
        if now.dtype != then.dtype:
            raise ValueError(
                f'The model is {now.dtype} now, its original blocks {then.dtype}. Call model.to({then.dtype}) first.')
        if not now.is_meta:
            self._original.to(now.device)
        if self.model.training != self._training:
            self._original.train(self.model.training)
        self.model.blocks = self._original
        self.model.feature_info = self._feature_info
        del self.model.__prepare_scriptable__
        return self.model

    def __str__(self) -> str:
        config = self.config
        steps, T = config.grid
        nfe = 'adaptive' if config.adaptive else f'{steps * METHODS[config.method].evaluations} evaluations'
        native = config.field == 'native'
        kept = "the base's own" if native else 'new: no biases, no qk-norm, CenterNorm for LayerNorm'
        share = 100 * self.parameters_after / self.parameters_before
        return (
            f'{type(self.model).__name__}: blocks 0-{self.depth - 1} -> 1 shared block\n'
            f'  field       {config.field}, init {config.init}\n'
            f'  sub-layers  {kept}\n'
            f'  solver      {config.method}, {steps} steps on [0, {T:g}], {nfe}\n'
            f'  parameters  {self.parameters_before:,} -> {self.parameters_after:,} ({share:.1f} %)')


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())


def list_convertible(filter: str = '') -> List[str]:
    """Names of the timm models that `convert_` takes, found by building each on the meta device.

    Args:
        filter: Wildcard for model names, such as 'vit_small*'; all by default, which takes about half a minute.
    """
    return list(_convertible(filter))


@cache
def _convertible(filter: str) -> Tuple[str, ...]:
    names = []
    for name in timm.list_models(filter):
        module = import_module(timm.model_entrypoint(name).__module__)
        if name.startswith('odevit') or not hasattr(module, 'VisionTransformer'):
            continue
        with torch.device('meta'):
            model = timm.create_model(name)
        try:
            check_convertible(model)
        except (TypeError, ValueError):
            continue
        names.append(name)
    return tuple(names)


def _shapes(block: nn.Module) -> List[tuple]:
    return [(name, tuple(p.shape)) for name, p in block.named_parameters()]
