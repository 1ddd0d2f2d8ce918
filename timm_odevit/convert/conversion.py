"""convert_: turn a pretrained transformer into an ODE-ViT, in place, and back."""
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from timm.models import group_parameters
from torch import Tensor, nn

from ..ode.blocks import OdeBlocks, count_parameters
from ..ode.config import OdeConfig
from ..ode.fields import FIELDS
from .block_kinds import Site, class_token_comes_later, prefix_tokens
from .initialisation import build_field
from .planning import check_all, count_in_words


class Replacements:
    """Attributes of a model and of its parts, given as owner, name and new value; the first value is a module.

    They are replaced together, at construction, and restored together.
    """
    what = ''

    def __init__(self, model: nn.Module, rows: list[tuple[Any, str, Any]]) -> None:
        self.model: Any = model
        self._rows = [(owner, name, new, _own(owner, name)) for owner, name, new in rows]
        self._training = model.training
        for owner, name, new in rows:
            setattr(owner, name, new)

    def restore(self) -> None:
        """What is put back follows the model's device and its mode; ValueError if what replaced it is gone."""
        modules = [row for row in self._rows if isinstance(row[2], nn.Module)]
        if any(_own(owner, name) is not module for owner, name, module, _ in modules):
            raise ValueError(f'This model no longer holds {self.what}: it was restored already, or what was put in '
                             'later must be restored first.')
        device = next(modules[0][2].parameters()).device
        for _, _, _, module in modules:
            module.to(device)
            if self.model.training != self._training:
                module.train(self.model.training)
        for owner, name, _, value in self._rows:
            if value is None:  # what the class defines
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    """An attribute of a module itself, not of its class, or None."""
    return owner._modules.get(name, vars(owner).get(name))


class Conversion(Replacements):
    """The result of `convert_`: print it for a report, call its `restore()` to undo.

    Attributes:
        model: The converted model.
        blocks: Its OdeBlocks: one, or one per stage.
        layers: Number of converted blocks.
        config: Without stages, steps and T are filled in.
        parameters_before: Number of parameters.
        parameters_after: The same, converted.

    Examples:
        >>> done = convert_(vit)
        >>> done.restore()
    """
    what = 'the blocks of this conversion'
    blocks: tuple[OdeBlocks, ...]

    def __init__(
            self, model: nn.Module, sites: list[Site], blocks: tuple[OdeBlocks, ...], config: OdeConfig,
            keep_original: bool) -> None:
        self.parameters_before, self.blocks = count_parameters(model), blocks
        self.config = blocks[0].config if len(blocks) == 1 else config
        self.layers = sum(len(site.converted(config)) for site in sites)
        rows: list[tuple[Any, str, Any]] = [(site.host, 'blocks', ode) for site, ode in zip(sites, blocks, strict=True)]
        rows += [(model, 'feature_info', ode.feature_info) for ode in blocks if ode.feature]
        if getattr(host := sites[0].host, 'rope_mixed', False):
            rows.append((host.rope, 'get_embed', partial(_rope_of_steps, host)))
        for method in ('group_matcher', 'set_input_size', 'init_weights'):
            if hasattr(model, method):
                new = _group_matcher if method == 'group_matcher' else partial(_on_blocks, method)
                rows.append((model, method, partial(new, model)))
        super().__init__(model, rows)
        if not keep_original:
            self._rows.clear()
        self.parameters_after = count_parameters(model)

    def restore(self) -> None:
        """Put the original blocks back, bit for bit, on the model's device and in its mode; all else stays as it is:
        after `set_input_size`, call that again.

        Raises ValueError if they were not kept, or the model no longer holds this conversion.
        """
        if not self._rows:
            raise ValueError('The original blocks were not kept. Convert with keep_original=True.')
        super().restore()

    def __repr__(self) -> str:
        config, first = self.blocks[0].config, int(self.blocks[0].t)
        where = f'blocks {first}-{first + self.layers - 1}' if len(self.blocks) == 1 else (
            f'{self.layers} blocks in {len(self.blocks)} stages')
        shared = count_in_words(sum(len(ode.shared.phases) for ode in self.blocks))
        solver = '; '.join(ode.extra_repr() for ode in self.blocks)
        nfe = 'adaptive' if config.adaptive else f'{sum(ode.nfe for ode in self.blocks)} evaluations'
        share = 100 * self.parameters_after / self.parameters_before
        lines = [
            f'{type(self.model).__name__}: {where} -> {shared}',
            f'  field       {config.field}, init {config.init}',
            f'  sub-layers  {FIELDS[config.field].about}',
            f'  solver      {solver}, {nfe}',
            f'  parameters  {self.parameters_before:,} -> {self.parameters_after:,} ({share:.1f} %)']
        if config.tokens < 1:
            lines.insert(-1, f'  tokens      merged along t, {100 * config.tokens:g} % of the patches left at T')
        return '\n'.join(lines)


def convert_(
        model: nn.Module, config: OdeConfig | None = None, *, keep_original: bool = True, **settings: Any,
) -> Conversion:
    """Replace the blocks of a transformer with shared blocks that an ODE solver evaluates K times, in place.

    Device, dtype, mode and requires_grad carry over. Parameters are new: create the optimizer afterwards.

    Args:
        model: A timm model with a sequence of blocks of one width, or with stages (Swin); see `list_convertible()`.
        config: Or give any of its settings as keywords, such as steps=6.
        keep_original: For `restore()`; False frees their memory.

    Raises TypeError if the model has no blocks that can be converted, ValueError if it is already converted or the
    settings do not fit it.

    Examples:
        >>> done = convert_(vit, phases=3)
        >>> print(done)
        >>> vit.blocks.steps = 6    # 3 or more, at any time
        >>> done.restore()

    Source: ODE-ViT, arXiv 2511.16501.
    """
    config = OdeConfig.from_keywords(config, settings, 'convert_')
    sites = check_all(model, config)
    built = tuple(_build(model, site, config.resolve(len(site.converted(config)), stage))
                  for stage, site in enumerate(sites))
    return Conversion(model, sites, built, config, keep_original)


def _build(model: Any, site: Site, config: OdeConfig) -> OdeBlocks:
    blocks, chosen, own = site.blocks, site.converted(config), site.host is model
    first, last = min(chosen), max(chosen)
    info: Any = getattr(model, 'feature_info', None)
    listed = own and isinstance(info, list) and len(info) == len(blocks)  # an entry for each block
    readable = own and isinstance(getattr(model, 'norm', None), nn.Module) and hasattr(model, 'forward_head') and (
        not class_token_comes_later(model))
    ode = OdeBlocks(
        build_field(config, chosen), config, info[first] if listed else {}, float(first), blocks[:first],
        blocks[last + 1:], readout=partial(_logits, model) if readable else None,
        num_prefix_tokens=prefix_tokens(site.host))
    kept = {module for block in (*ode.before, *ode.after) for module in block.modules()}
    for module in {*ode.modules()} - kept:
        module.training = model.training
    return ode


def _logits(model: Any, state: Tensor) -> Tensor:
    """[B, classes], for a last state [B, N, D]."""
    if model.num_classes < 2 or not getattr(model, 'global_pool', True):
        raise ValueError('Halting needs pooling, and two classes or more. Leave halting at None.')
    return model.forward_head(model.norm(state))


def _rope_of_steps(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One RoPE table per step, that of the layer in which it starts, of a base with one per layer."""
    tables = type(model.rope).get_embed(model.rope, *args, **kwargs)
    layers = getattr(model.blocks, 'layers', range(len(model.blocks)))  # absent if the model was pruned to kept blocks
    return tables[[min(layer, len(tables) - 1) for layer in layers]]


def _on_blocks(method: str, model: Any, *args: Any, **kwargs: Any) -> None:
    """The base's, on the blocks of all phases, used or not."""
    hosts = [(host, ode) for host in model.modules() if isinstance(ode := host._modules.get('blocks'), OdeBlocks)]
    try:
        for host, ode in hosts:
            shared = [getattr(phase, 'block', phase) for phase in ode.shared.phases]
            host._modules['blocks'] = nn.ModuleList([*ode.before, *shared, *ode.after])
        getattr(type(model), method)(model, *args, **kwargs)
    finally:
        for host, ode in hosts:
            host._modules['blocks'] = ode


def _group_matcher(model: Any, coarse: bool = False) -> Callable[[str], int]:
    """The base's groups of parameters by depth, for layer decay: all shared blocks count as one layer."""
    listed = {p: name for prefix, ode in model.named_modules() if isinstance(ode, OdeBlocks)
              for i, block in enumerate([*ode.before, ode.shared, *ode.after])
              for name, p in block.named_parameters(f'{prefix}.{i}')}
    renamed = {name: listed.get(p, name) for name, p in model.named_parameters()}
    base: Any = SimpleNamespace(named_parameters=lambda: [(n, None) for n in renamed.values()])
    groups = group_parameters(base, type(model).group_matcher(model, coarse=coarse), reverse=True)
    return lambda name: groups[renamed[name.removeprefix('_orig_mod.')]]  # of torch.compile
