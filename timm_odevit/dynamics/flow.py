"""Flow: what a model does to the tokens of some images, as a sequence of maps; measures, batch by batch."""
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..convert.block_kinds import prefix_tokens
from ..data.batches import read_batches
from ..hooks import evaluating, watch_blocks
from ..ode.blocks import find_ode_blocks
from ..ode.methods import Step
from ..settings import integer

__all__ = ['Flow', 'Images', 'PerImage', 'along', 'batches', 'check_derivatives', 'follow', 'noise', 'norms',
           'over_images', 'unit']

Images = Tensor | Iterable[Any] | None
Measured = TypeVar('Measured', bound='PerImage')


@dataclass(frozen=True, repr=False)
class Flow:
    """A sequence of maps of a state: the steps of an ODE-ViT, the blocks of a ViT, or any other functions.

    Attributes:
        start: State before the first map [B, N, D] or [B, ...]: B systems that do not act on one another.
        maps: The maps, each from the state at one time to the state at the next.
        times: The time before the first map and after each; one unit is one block of the base.
        head: From the last state to the logits [B, classes]; None for maps without classes.
        blocks: The steps or blocks of a model behind the maps.
        prefix: How many tokens, such as a class token, come before those of the patches.
        class_token: Whether the first of them is a class token.
    """
    start: Tensor
    maps: tuple[Callable[[Tensor], Tensor], ...]
    times: tuple[float, ...]
    head: Callable[[Tensor], Tensor] | None = None
    blocks: tuple[Any, ...] = ()
    prefix: int = 0
    class_token: bool = False

    def __post_init__(self) -> None:
        if not self.maps or len(self.times) != len(self.maps) + 1:
            raise ValueError(f'A Flow needs a map, and one time more than maps; got {len(self.maps)} maps and '
                             f'{len(self.times)} times.')

    def states(self) -> list[Tensor]:
        """The state before the first map, and after each."""
        states = [self.start]
        for step in self.maps:
            states.append(step(states[-1]))
        return states

    def logits(self, state: Tensor) -> Tensor:
        """The logits [B, classes] for a last state; raises TypeError without a head."""
        if self.head is None:
            raise TypeError('This measure reads a class from every state, but there is no norm and head. Use a model '
                            'whose `forward_head(norm(state))` gives its logits.')
        return self.head(state)

    def lengths(self) -> list[float]:
        """The length of each step in time."""
        return [after - before for before, after in pairwise(self.times)]

    def clock(self, first: int = 0, last: int | None = None) -> Tensor:
            return torch.tensor(self.times[first:last], dtype=torch.float64)


@contextmanager
def follow(model: Any, images: Any = None) -> Iterator[Flow]:
    """The flow of a model for images [B, C, H, W], valid inside: in eval mode, without gradients. A Flow is its own.

    Raises:
        TypeError: The model has no single sequence of blocks.
        ValueError: Its method is adaptive, or it merges tokens, so that its steps are not maps of the state alone.
    """
    if isinstance(model, Flow):
        yield model
        return
    blocks = _sequence(model)
    with evaluating(model), torch.no_grad():
        with watch_blocks([blocks]) as [(states, handed)]:
            logits = model(images)
        shapes = {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in states}
        if len(shapes) > 1 or len(states) != len(blocks) + 1:
            raise TypeError(
                f'A {type(model).__name__} has no single sequence of blocks whose states could be followed; they have '
                f"the shapes {', '.join(sorted(map(str, shapes)))}.")
        maps = tuple(partial(_call, block, *passed) for block, passed in zip(blocks, handed, strict=True))
        times = tuple(accumulate((block.h if isinstance(block, Step) else 1. for block in blocks), initial=0.))
        prefix = prefix_tokens(model)
        has_class = prefix > 0 and getattr(model, 'cls_token', None) is not None
        yield Flow(states[0], maps, times, _head(model, states[-1], logits), tuple(blocks), prefix, has_class)


def _head(model: Any, last: Tensor, logits: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The norm and head of a model, if they give its logits for its last state."""
    if not getattr(model, 'num_classes', 0) or not isinstance(getattr(model, 'norm', None), nn.Module) or not hasattr(
            model, 'forward_head'):
        return None

    def head(x: Tensor) -> Tensor:
        return model.forward_head(model.norm(x))
    own = head(last)
    same = own.shape == logits.shape and torch.allclose(own, logits, rtol=1e-3, atol=1e-4, equal_nan=True)
    return head if same else None


def _call(block: Any, args: tuple[Any, ...], kwargs: Any, x: Tensor) -> Tensor:
    return block(x, *args, **kwargs)


def _sequence(model: Any) -> list[Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a timm model or a Flow; got {type(model).__name__}.')
    blocks: Any = getattr(model, 'blocks', None)
    odes = find_ode_blocks(model)
    if not hasattr(blocks, '__iter__') or len(odes) > 1:
        raise TypeError(f'A {type(model).__name__} has no single sequence of blocks whose states could be followed.')
    if odes and odes[0].config.adaptive:
        raise ValueError(f"'{odes[0].method}' chooses its own steps for each batch, so there is no fixed map to "
                         "follow. Set a fixed-step method first: model.blocks.method = 'rk4'.")
    if odes and odes[0].config.tokens < 1:
        raise ValueError('With token merging, a step depends on the steps before it, not on the state alone. Set '
                         'tokens=1 first.')
    return list(blocks)


def batches(images: Images, batch_size: int) -> Iterator[Tensor]:
    """Batches of images [B, C, H, W]; ValueError if there are none, or batch_size is out of range."""
    if images is None or (isinstance(images, Tensor) and not len(images)):
        raise ValueError('There are no images to measure on.')
    size = integer(1)('batch_size', batch_size)
    return (batch for batch, _ in read_batches(images, labels=False, size=size))


@dataclass(frozen=True, repr=False)
class PerImage:
    """Measurements of images; all fields but those in SHARED have a row for each."""
    SHARED: ClassVar[tuple[str, ...]] = ('class_token', 'method', 'prefix', 'steps', 'times')

    @classmethod
    def per_image(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls) if f.name not in cls.SHARED)

    def __repr__(self) -> str:
        values = {name: x for name in self.per_image() if isinstance(x := getattr(self, name), Tensor)}
        means = [f'{name} {float(x.cpu().double().nanmean()):.3g}' for name, x in values.items()]
        return f'{type(self).__name__}({len(next(iter(values.values())))} images; on average {", ".join(means)})'

    @classmethod
    def joined(cls, parts: list[Any]) -> Any:
        """The measurements of several batches as one."""
        rows = {}
        for name in cls.per_image():
            values = [getattr(part, name) for part in parts]
            rows[name] = torch.cat(values) if isinstance(values[0], Tensor) else tuple(chain.from_iterable(values))
        return replace(parts[0], **rows)


def over_images(
        measure: Callable[..., Measured], model: Any, images: Images, batch_size: int, other: Any = None,
) -> Measured:
    """Measure a flow, or a model on images, batch by batch; `measure` gets its flow, then that of another, if any."""
    models = [model] if other is None else [model, other]
    if len({isinstance(each, Flow) for each in models}) > 1:
        raise TypeError('A Flow can be compared with another Flow, and a model with a model; got one of each.')
    parts: list[Measured] = []
    for batch in [None] if isinstance(model, Flow) else batches(images, batch_size):
        with torch.no_grad(), ExitStack() as stack:
            parts.append(measure(*(stack.enter_context(follow(each, batch)) for each in models)))
    joined: Measured = parts[0].joined(parts)
    return joined


def check_derivatives(x: Tensor) -> None:
    if torch.is_inference_mode_enabled() or x.is_inference():
        raise RuntimeError('Derivatives cannot be computed in inference mode. Use torch.no_grad() instead.')


def norms(x: Tensor) -> Tensor:
    """The Euclidean norm of each state [B] of x [B, ...]."""
    return x.flatten(1).norm(dim=1)


def along(numbers: Tensor, x: Tensor) -> Tensor:
    """One number per state [B], in a shape that multiplies x [B, ...]."""
    return numbers.view(-1, *[1] * (x.ndim - 1))


def unit(x: Tensor) -> Tensor:
    """Each state of x [B, ...] scaled to norm 1; 0 stays 0."""
    return x / along(norms(x).clamp_min(torch.finfo(x.dtype).tiny), x)


def noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random numbers in the shape of x [B, ...], the same for every state."""
    return torch.randn(x.shape[1:], generator=generator).to(x).expand_as(x)
