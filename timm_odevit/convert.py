"""convert_: a pretrained transformer becomes an ODE-ViT, in place, and back."""
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import timm
import torch
from timm.layers import Attention
from timm.models import group_parameters
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from .blocks import OdeBlocks, find_ode_blocks
from .config import OdeConfig
from .families import HINT, Site, check_blocks, field_class, find_sites, kinds
from .fields import WholeField
from .init import build_field, owners
from .merge import check_not_merged
from .methods import METHODS
from .patches import Patches
from .spans import check_images, input_moments, similarity_boundaries
from .torchscript import scriptable_copy

__all__ = ['Conversion', 'check_convertible', 'convert_', 'count_parameters', 'list_convertible']


_DEFAULT = OdeConfig()


def convert_(
        model: nn.Module,
        config: OdeConfig = _DEFAULT,
        *,
        images: Optional[Tensor] = None,
        keep_original: bool = True,
) -> 'Conversion':
    """Replace the blocks of a transformer by shared blocks that an ODE solver evaluates K times, in place.

    Everything is checked and built first, then assigned at once: a refused call leaves the model as it was. Device,
    dtype, mode and requires_grad carry over. Parameters are new: create the optimizer afterwards.

    Args:
        model: A timm model with a sequence of blocks of one width, or with stages (Swin); see `list_convertible()`.
        config: Settings; steps and T default to the number of converted layers.
        images: Calibration images [B, C, H, W], normalised for the model, for boundaries 'similarity' and init
            'svd_data'; a few dozen will do. 'svd_data' holds the second moments of the inputs of all linear layers of
            a sequence meanwhile: 2 GB for a ViT-L, and takes minutes there.
        keep_original: Keep the original blocks, so that `restore()` can bring them back; False frees them.

    Returns:
        A Conversion: print it for a report, call its `restore()` to undo.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is converted already, or the settings do not fit it.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    sites = _check(model, config, images)
    host: Any = model
    before = count_parameters(model)
    original = sum(count_parameters(site.owner.blocks) for site in sites)
    built, layers = [], 0
    for stage, site in enumerate(sites):
        blocks = site.blocks
        first, last = config.span(len(blocks))
        chosen = blocks[first:last + 1]
        settings = config.resolve(len(chosen), stage)
        if settings.boundaries == 'similarity' and settings.phases == 1:
            settings = replace(settings, boundaries='uniform')
        elif settings.boundaries == 'similarity':
            assert images is not None
            cuts = similarity_boundaries(model, chosen, images, settings.phases)
            settings = replace(settings, boundaries=tuple(first + cut for cut in cuts))
        moments = None
        if settings.init == 'svd_data':
            assert images is not None
            moments = input_moments(model, chosen, images, first)
        shared = build_field(settings, chosen, first, moments)
        info = getattr(host, 'feature_info', None)
        listed = site.owner is model and isinstance(info, list) and len(info) == len(blocks)
        feature = {k: v for k, v in info[first].items() if k != 'module'} if listed else None  # type: ignore[index]
        ode = OdeBlocks(shared, settings, feature, float(first), blocks[:first], blocks[last + 1:])
        built.append((site, ode.train(model.training), listed))
        layers += len(chosen)
    wanted: List[Any] = [(site.owner, 'blocks', ode) for site, ode, _ in built]
    wanted += [(host, 'feature_info', ode.feature_info) for _, ode, listed in built if listed]
    if sites[0].owner is model:
        # TorchScript looks for this attribute; nothing else reads it
        wanted.append((host, '__prepare_scriptable__', partial(scriptable_copy, model)))
        if getattr(host, 'rope_mixed', False):
            wanted.append((host.rope, 'get_embed', partial(_rope_of_steps, model)))
    if hasattr(host, 'group_matcher'):
        wanted.append((host, 'group_matcher', partial(_group_matcher, model)))
    patches = Patches(wanted)
    done = Conversion(
        model=model,
        blocks=tuple(ode for _, ode, _ in built),
        layers=layers,
        config=built[0][1].config if len(built) == 1 else config,
        parameters_before=before,
        parameters_after=before - original + sum(count_parameters(ode) for _, ode, _ in built),
        _owners=tuple(site.owner for site in sites),
        _patches=patches if keep_original else None,
        _training=model.training,
        _grids=tuple((ode.steps, ode.t, ode.end) for _, ode, _ in built),
    )
    patches.put()
    return done


def check_convertible(model: nn.Module, config: OdeConfig = _DEFAULT, *, images: Optional[Tensor] = None) -> None:
    """Raise what `convert_(model, config, images=images)` would raise, and change nothing.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is converted already, or the settings do not fit it.
    """
    _check(model, config, images)


def _check(model: nn.Module, config: OdeConfig, images: Optional[Tensor]) -> List[Site]:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f'Cannot convert {name}: expected a timm model, such as timm.create_model("vit_small_patch16_224").')
    if not isinstance(config, OdeConfig):
        raise TypeError(f'config must be an OdeConfig, such as OdeConfig(steps=12); got {type(config).__name__}.')
    check_not_merged(model)
    converted = find_ode_blocks(model)
    if converted:
        now = converted[0].config
        raise ValueError(
            f'This model is already converted ({_shared_blocks(converted)}, {now.method}, {now.steps} steps). '
            'Call restore() on its Conversion first.')
    for wrapper, inner in (('_orig_mod', 'torch.compile'), ('module', 'DataParallel or DistributedDataParallel')):
        if isinstance(getattr(model, wrapper, None), nn.Module):
            raise TypeError(f'Cannot convert {name}: convert the model before {inner} wraps it.')
    sites = find_sites(model)
    if getattr(model, 'rope_is_mixed', False):
        raise TypeError(f'Cannot convert {name}: its RoPE tables are drawn one per block while it runs. {HINT}')
    for site in sites:
        check_blocks(model, site.blocks)
    _check_structure(name, sites, config)
    if len(sites) > 1:
        for setting, value in (('blocks', config.blocks is None), ('T', config.T is None),
                               ('boundaries', config.boundaries == 'uniform'),
                               ('init', not str(config.init).startswith('block:'))):
            if not value:
                raise ValueError(
                    f'{setting}={getattr(config, setting)!r} applies only to models with one sequence of blocks, and '
                    f'{name} has {len(sites)} stages. Leave it out.')
    if isinstance(config.steps, tuple) and len(config.steps) != len(sites):
        raise ValueError(f'{name} has {len(sites)} sequences of blocks; got {len(config.steps)} numbers of steps.')
    if len(sites) == 1:
        _check_layers(name, sites[0].blocks, config)
    measured = (config.boundaries == 'similarity' and config.phases > 1) or config.init == 'svd_data'
    if images is not None and measured:
        check_images(images)
        parameter = next(model.parameters())
        if images.device != parameter.device or images.dtype != parameter.dtype:
            raise ValueError(
                f'images are {images.dtype} on {images.device}, the model {parameter.dtype} on {parameter.device}. '
                'Call images.to(...) first.')
        if images.is_meta:
            raise ValueError(
                'Nothing can be measured on the meta device. Give boundaries as layers, and init svd.')
    if images is None and measured:
        setting = 'boundaries' if config.boundaries == 'similarity' else 'init'
        raise ValueError(
            f"{setting}='{getattr(config, setting)}' is measured on images. Pass a batch of them, normalised for the "
            'model: convert_(model, config, images=batch).')
    return sites


def _check_structure(name: str, sites: Sequence[Site], config: OdeConfig) -> None:
    """The blocks can share weights, and suit the field and the method."""
    count, fields = 0, 0
    for site in sites:
        first, last = config.span(len(site.blocks))
        chosen = site.blocks[first:last + 1]
        count, fields = count + len(chosen), fields + len(set(kinds(chosen)))
        whole = sorted({type(b).__name__ for b in chosen if field_class(b) is WholeField})
        if config.field == 'lipschitz':
            _check_lipschitz(name, chosen, config)
        elif whole and config.method in METHODS and METHODS[config.method].splits:
            unsplit = [m for m in METHODS if not METHODS[m].splits]
            raise ValueError(
                f"'{config.method}' splits a block in attention and MLP, and {name}'s {whole[0]} is used whole. "
                f"Use an unsplit method ({', '.join(unsplit)}): OdeConfig(method='euler').")
    if fields == count > 1:
        shapes = {tuple((n, tuple(p.shape)) for n, p in b.named_parameters()) for s in sites for b in s.blocks}
        why = 'other parameters' if len(shapes) > 1 else 'other settings'
        raise TypeError(f'Cannot convert {name}: each of its {count} blocks has {why}, so none can share. {HINT}')


def _check_layers(name: str, blocks: Sequence[nn.Module], config: OdeConfig) -> None:
    """The layers that the settings speak of exist."""
    first, last = config.span(len(blocks))
    if last >= len(blocks):
        raise ValueError(f'blocks={config.blocks}: {name} has blocks 0 to {len(blocks) - 1}.')
    layers = last - first + 1
    if config.phases > layers:
        raise ValueError(f'phases={config.phases}: there are {layers} layers. Allowed: 1 to {layers}.')
    if isinstance(config.boundaries, tuple) and not all(first < b <= last for b in config.boundaries):
        raise ValueError(
            f'boundaries={config.boundaries}: each must be a layer from {first + 1} to {last}, where a span can start.')
    if str(config.init).startswith('block:'):
        index = int(str(config.init)[6:])
        if not first <= index <= last:
            raise ValueError(
                f"init '{config.init}': this model has {len(blocks)} blocks. "
                f'Allowed: block:{first} to block:{last}, mean, spectral.')
        if config.boundaries == 'similarity' or max(owners(config, blocks[first:last + 1], first)) > 0:
            raise ValueError(f"init '{config.init}' fills one shared block, and there would be several. Use 'mean'.")


def _check_lipschitz(name: str, blocks: Sequence[Any], config: OdeConfig) -> None:
    for block in blocks:
        if type(block) is not Block or type(block.attn) is not Attention:
            kind = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
            raise ValueError(
                f"field='lipschitz' replaces plain pre-norm ViT blocks, and {name} has a {kind}. Use field='native'.")
    if config.init == 'spectral':
        return
    mlp, norm = blocks[0].mlp, blocks[0].norm1
    if not hasattr(mlp, 'fc1') or mlp.fc1.out_features != mlp.fc2.in_features:
        raise ValueError(
            f"init '{config.init}' needs a base with a plain two-layer MLP for the lipschitz field; this one is a "
            f"{type(mlp).__name__}. Use init='spectral' or field='native'.")
    if getattr(norm, 'weight', None) is None or getattr(norm, 'bias', None) is None:
        raise ValueError(
            f"init '{config.init}' needs a base whose norms have weight and bias for the lipschitz field; this one "
            f"is a {type(norm).__name__}. Use init='spectral' or field='native'.")


def _rope_of_steps(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """RoPE tables of a base that has one per layer, here one per step: that of the layer in which the step starts."""
    rope = model.rope
    tables = type(rope).get_embed(rope, *args, **kwargs)
    blocks = model.blocks
    layers = getattr(blocks, 'layers', range(len(blocks)))  # none where it was pruned to blocks that were kept
    return tables[[min(layer, len(tables) - 1) for layer in layers]]


def _group_matcher(model: Any, coarse: bool = False) -> Callable[[str], int]:
    """The base's groups of parameters by depth, for layer decay: a shared block stands where its layers began."""
    renamed = {name: name for name, _ in model.named_parameters()}
    for prefix, ode in ((n, m) for n, m in model.named_modules() if isinstance(m, OdeBlocks)):
        first = ode.layers[0]
        places = {'shared': int(ode.t), **{f'before.{i}': first + i for i in range(len(ode.before))}}
        places.update({f'after.{i}': layer for i, layer in enumerate(ode.layers[len(ode) - len(ode.after):])})
        for part, layer in places.items():
            start = f'{prefix}.{part}.'
            renamed.update({n: f'{prefix}.{layer}.{n.removeprefix(start)}' for n in renamed if n.startswith(start)})
    layers: Any = SimpleNamespace(named_parameters=lambda: [(n, None) for n in renamed.values()])
    groups = group_parameters(layers, type(model).group_matcher(model, coarse=coarse), reverse=True)
    return lambda name: groups[renamed[name]]


@dataclass(eq=False)
class Conversion:
    """What `convert_` did: a report to print, and the way back.

    Attributes:
        model: The converted model.
        blocks: Its OdeBlocks, one, or one a stage.
        layers: Number of blocks that were converted.
        config: Settings; for one sequence of blocks with steps, T and boundaries filled in.
        parameters_before: Parameters of the model before.
        parameters_after: Parameters of the model after.
    """
    model: Any
    blocks: Tuple[OdeBlocks, ...]
    layers: int
    config: OdeConfig
    parameters_before: int
    parameters_after: int
    _owners: Tuple[nn.Module, ...]
    _patches: Optional[Patches]
    _training: bool
    _grids: Tuple[Tuple[int, float, float], ...]

    def restore(self) -> nn.Module:
        """Put the original blocks back, bit for bit, on the device and in the mode that the model has now.

        Blocks that were not converted are those of now, with what they have learned since.

        Returns:
            The model.

        Raises:
            ValueError: The original blocks were not kept, the model does not hold this conversion any more, or it has
                another dtype now.
        """
        if self._patches is None:
            raise ValueError(
                'The original blocks were not kept. Convert with keep_original=True to be able to restore.')
        check_not_merged(self.model)
        if any(getattr(owner, 'blocks', None) is not ode
               for owner, ode in zip(self._owners, self.blocks, strict=True)):
            raise ValueError(
                'This model does not hold the blocks of this conversion: it was restored or changed since.')
        originals = self._patches.before[:len(self._owners)]
        now = next(self.blocks[0].shared.parameters())
        then = next(originals[0][int(self.blocks[0].t)].parameters())
        if now.dtype != then.dtype:
            raise ValueError(
                f'The model is {now.dtype} now, its original blocks {then.dtype}. Call model.to({then.dtype}) first.')
        for original in originals:
            if not now.is_meta:
                original.to(now.device)
            if self.model.training != self._training:
                original.train(self.model.training)
        self._patches.take_off()
        return self.model

    def __str__(self) -> str:
        config, first = self.config, self.blocks[0]
        where = f'blocks {int(first.t)}-{int(first.t) + self.layers - 1}' if len(self.blocks) == 1 else (
            f'{self.layers} blocks in {len(self.blocks)} stages')
        per_step = None if config.adaptive else METHODS[config.method].evaluations
        solver = '; '.join(f'{steps} steps on [{t:g}, {end:g}]' for steps, t, end in self._grids)
        nfe = 'adaptive' if per_step is None else f'{sum(grid[0] for grid in self._grids) * per_step} evaluations'
        native = config.field == 'native'
        kept = "the base's own" if native else 'new: no biases, no qk-norm, CenterNorm for LayerNorm'
        time = {'autonomous': 'autonomous', 'vectors': 'vectors of each layer',
                'low_rank': f'vectors of each layer, residuals of rank {config.rank}'}[config.time]
        if isinstance(config.boundaries, tuple):
            time += f", phases from layers {', '.join(map(str, (int(first.t), *config.boundaries)))}"
        share = 100 * self.parameters_after / self.parameters_before
        return (
            f'{type(self.model).__name__}: {where} -> {_shared_blocks(self.blocks)}\n'
            f'  field       {config.field}, init {config.init}\n'
            f'  sub-layers  {kept}\n'
            f'  time        {time}\n'
            f'  solver      {config.method}, {solver}, {nfe}\n'
            f'  parameters  {self.parameters_before:,} -> {self.parameters_after:,} ({share:.1f} %)')


def _shared_blocks(blocks: Sequence[OdeBlocks]) -> str:
    count = sum(len(b.shared.parts) for b in blocks)
    return f"{count} shared block{'s' if count > 1 else ''}"


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())


def list_convertible(filter: str = '', *, refused: bool = False) -> Dict[str, str]:
    """The timm models that `convert_` takes, found by building each on the meta device.

    Args:
        filter: Wildcard for model names, such as 'vit_small*'; all by default, which takes about two minutes.
        refused: List the models that `convert_` does not take instead.

    Returns:
        Names, and for each the field and the methods that suit it, or why it is refused.
    """
    return {name: text for name, (ok, text) in _convertible(filter).items() if ok is not refused}


@cache
def _convertible(filter: str) -> Dict[str, Tuple[bool, str]]:
    found = {}
    for name in timm.list_models(filter):
        if name.startswith('odevit'):
            continue
        try:
            with torch.device('meta'):
                model = timm.create_model(name)
        except Exception as e:  # a model of someone else's that cannot be built without its files, say
            found[name] = (False, f'Cannot be built by its name alone: {e}')
            continue
        found[name] = convertibility(model)
    if not found:
        raise ValueError(f"No model of timm matches '{filter}'. Give a wildcard without a tag, such as 'vit_small*'.")
    return found


def convertibility(model: nn.Module) -> Tuple[bool, str]:
    """Whether a model can be converted, and with which field and methods, or why not."""
    try:
        try:
            sites = _check(model, _DEFAULT, None)
            methods = 'all methods'
        except ValueError:
            sites = _check(model, OdeConfig(method='euler'), None)
            methods = 'unsplit methods'
    except (TypeError, ValueError) as e:
        return False, str(e)
    shared = sum(len(set(kinds(site.blocks))) for site in sites)
    try:
        _check(model, OdeConfig(field='lipschitz', method='euler', init='spectral'), None)
        fields = 'native, lipschitz'
    except ValueError:
        fields = 'native'
    return True, f"{fields}; {methods}; {shared} shared block{'s' if shared > 1 else ''} at least"
