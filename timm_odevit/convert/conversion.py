"""convert_: turn a pretrained transformer into an ODE-ViT, in place, and back."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from timm.models import group_parameters
from torch import Tensor, nn

from ..ode.blocks import OdeBlocks, count_parameters
from ..ode.config import FIELDS, OdeConfig
from ..ode.methods import METHODS
from .block_kinds import Site, class_token_comes_later, prefix_tokens
from .initialisation import build_field, input_moments
from .merge import Replacements, check_not_merged, hosts_of
from .planning import check_all, count_in_words

__all__ = ['Conversion', 'convert_']


def convert_(
        model: nn.Module,
        config: OdeConfig | None = None,
        *,
        images: Tensor | None = None,
        keep_original: bool = True,
        **settings: Any,
) -> 'Conversion':
    """Replace the blocks of a transformer with shared blocks that an ODE solver evaluates K times, in place.

    Device, dtype, mode and requires_grad carry over. Parameters are new: create the optimizer afterwards.

    Args:
        model: A timm model with a sequence of blocks of one width, or with stages (Swin); see `list_convertible()`.
        config: Settings; steps and T default to the number of converted layers.
        images: For init 'svd_data', a few dozen images [B, C, H, W], normalised for the model. For a ViT-L, that takes
            2 GB of memory and minutes.
        keep_original: Keep the original blocks, so that `restore()` can bring them back; False frees their memory.
        **settings: Instead of `config`, any of its settings, such as steps=6; see OdeConfig.

    Returns:
        A Conversion: print it for a report, call its `restore()` to undo.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is already converted, or the settings do not fit it.

    Examples:
        >>> done = convert_(vit, time='low_rank', rank=8)
        >>> print(done)
        >>> vit.blocks.steps = 6    # any number, at any time
        >>> done.restore()

    Source: ODE-ViT, arXiv 2511.16501.
    """
    config = OdeConfig.from_keywords(config, settings, 'convert_')
    sites = check_all(model, config, images)
    counts, before = [len(site.converted(config)) for site in sites], count_parameters(model)
    built = tuple(_build(model, site, config.resolve(count, stage), images)
                  for stage, (site, count) in enumerate(zip(sites, counts, strict=True)))
    replacements = Replacements(model, _replacements(model, sites, built))
    return Conversion(
        model, built, sum(counts), built[0].config if len(built) == 1 else config, before, count_parameters(model),
        replacements if keep_original else None)


def _build(model: Any, site: Site, config: OdeConfig, images: Tensor | None) -> OdeBlocks:
    """The OdeBlocks for one sequence of blocks, which do not change."""
    blocks, chosen, own = site.blocks, site.converted(config), site.host is model
    first, last = config.converted_layers(len(blocks))
    moments = input_moments(model, chosen, images, first) if config.init == 'svd_data' and images is not None else {}
    info: Any = getattr(model, 'feature_info', None)
    listed = own and isinstance(info, list) and len(info) == len(blocks)  # an entry for each block
    readable = own and isinstance(getattr(model, 'norm', None), nn.Module) and hasattr(model, 'forward_head') and (
        not class_token_comes_later(model))
    ode = OdeBlocks(
        build_field(config, chosen, first, moments),
        config,
        {k: v for k, v in info[first].items() if k != 'module'} if listed else None,
        float(first), blocks[:first], blocks[last + 1:],
        readout=partial(_logits, model) if readable else None,
        num_prefix_tokens=prefix_tokens(model) if own else 0)
    kept = {module for block in (*ode.before, *ode.after) for module in block.modules()}
    for module in {*ode.modules()} - kept:
        module.training = model.training
    return ode


def _replacements(model: Any, sites: Sequence[Site], built: Sequence[OdeBlocks]) -> list[tuple[Any, str, Any]]:
    """Owner, attribute and new value of everything that a conversion changes."""
    rows: list[tuple[Any, str, Any]] = [(site.host, 'blocks', ode) for site, ode in zip(sites, built, strict=True)]
    rows += [(model, 'feature_info', ode.feature_info) for ode in built if ode.feature]
    if sites[0].host is model and getattr(model, 'rope_mixed', False):
        rows.append((model.rope, 'get_embed', partial(_rope_of_steps, model)))
    for method, new in (('group_matcher', _group_matcher), ('set_input_size', _set_input_size)):
        if hasattr(model, method):
            rows.append((model, method, partial(new, model)))
    return rows


def _logits(model: Any, state: Tensor) -> Tensor:
    """The logits [B, classes] that a model gives for a last state [B, N, D]."""
    if model.num_classes < 2:
        raise ValueError("Halting by 'entropy' needs two classes or more. Use 'acceleration', or set halting=None.")
    return model.forward_head(model.norm(state))


def _rope_of_steps(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One RoPE table per step, that of the layer in which it starts, of a base with one per layer."""
    tables = type(model.rope).get_embed(model.rope, *args, **kwargs)
    layers = getattr(model.blocks, 'layers', range(len(model.blocks)))  # absent if the model was pruned to kept blocks
    return tables[[min(layer, len(tables) - 1) for layer in layers]]


def _set_input_size(model: Any, *args: Any, **kwargs: Any) -> None:
    """The base's own method, on the blocks of all phases, also of those in which no step starts."""
    hosts = hosts_of(model)
    if any('position_bias_table' in name and '.up.' in name for name, _ in model.named_parameters()):
        raise ValueError('The residuals of the position bias fit only the image size at which the model was converted. '
                         'Call set_input_size before convert_.')
    fields = [[getattr(phase, 'base', phase) for phase in ode.shared.phases] for _, ode in hosts]
    try:
        for (host, ode), phases in zip(hosts, fields, strict=True):
            host._modules['blocks'] = nn.ModuleList(
                [*ode.before, *(getattr(field, 'block', field) for field in phases), *ode.after])
        type(model).set_input_size(model, *args, **kwargs)
    finally:
        for host, ode in hosts:
            host._modules['blocks'] = ode


def _group_matcher(model: Any, coarse: bool = False) -> Callable[[str], int]:
    """The base's groups of parameters by depth, for layer decay: a shared block counts as its first layer."""
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


@dataclass(eq=False, repr=False)
class Conversion:
    """The result of `convert_`: a report to print, and a way to undo it.

    Attributes:
        model: The converted model.
        blocks: Its OdeBlocks: one, or one per stage.
        layers: Number of converted blocks.
        config: Settings; with one sequence of blocks, steps and T are filled in.
        parameters_before, parameters_after: Numbers of parameters.

    Examples:
        >>> done = convert_(vit)
        >>> share = done.parameters_after / done.parameters_before
        >>> done.restore()
    """
    model: Any
    blocks: tuple[OdeBlocks, ...]
    layers: int
    config: OdeConfig
    parameters_before: int
    parameters_after: int
    _replacements: Replacements | None

    def __post_init__(self) -> None:
        self._text = self._report()  # the steps may be set later

    def restore(self) -> None:
        """Put the original blocks back, bit for bit, on the model's current device and in its current mode.

        Everything else keeps its current weights: what was trained since, or another image size, no longer fits them.
        Raises ValueError if they were not kept, or the model no longer holds this conversion.
        """
        if self._replacements is None:
            raise ValueError('The original blocks were not kept. Convert with keep_original=True.')
        check_not_merged(self.model)
        self._replacements.restore('the blocks of this conversion')

    def __repr__(self) -> str:
        return self._text

    def _report(self) -> str:
        config, first, name = self.config, int(self.blocks[0].t), type(self.model).__name__
        where = f'blocks {first}-{first + self.layers - 1}' if len(self.blocks) == 1 else (
            f'{self.layers} blocks in {len(self.blocks)} stages')
        time = 'autonomous' if config.time == 'autonomous' else 'vectors of each layer'
        if config.rank:
            time += f', residuals of rank {config.rank}'
        solver = '; '.join(f'{ode.steps} steps on [{ode.t:g}, {ode.end:g}]' for ode in self.blocks)
        nfe = 'adaptive' if config.adaptive else (
            f'{sum(ode.steps for ode in self.blocks) * METHODS[config.method].evaluations} evaluations')
        tokens = '' if config.tokens == 1 else (
            f'  tokens      merged along t, {100 * config.tokens:g} % of the patches left at T\n')
        shared = count_in_words(sum(len(ode.shared.phases) for ode in self.blocks))
        share = 100 * self.parameters_after / self.parameters_before
        larger = ', larger than the original' if share > 100 else ''
        return (
            f'{name}: {where} -> {shared}\n'
            f'  field       {config.field}, init {config.init}\n'
            f'  sub-layers  {FIELDS[config.field].about}\n'
            f'  time        {time}\n'
            f'  solver      {config.method}, {solver}, {nfe}\n'
            f'{tokens}'
            f'  parameters  {self.parameters_before:,} -> {self.parameters_after:,} ({share:.1f} %{larger})')
