"""Flow: what a model does to the tokens of some images, as a sequence of maps; their Jacobians; batch by batch."""
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..convert.block_kinds import has_class_token, prefix_tokens
from ..data.batches import read_batches
from ..hooks import evaluating, watch_blocks
from ..ode.blocks import find_ode_blocks
from ..ode.methods import Step

Images = Tensor | Iterable[Any] | None
Measured = TypeVar('Measured', bound='PerImage')
SOFTMAX = (torch.softmax, F.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention)


@dataclass(frozen=True, repr=False)
class Flow:
    """Maps of a state: the steps of an ODE-ViT, the blocks of a ViT, or any other functions."""
    start: Tensor  # [B, N, D] or [B, ...], before the first map, of B independent systems
    maps: tuple[Callable[[Tensor], Tensor], ...]
    times: tuple[float, ...]  # before the first map and after each; one unit is one block of the base
    head: Callable[[Tensor], Tensor] | None = None  # from the last state to the logits [B, classes]
    prefix: int = 0  # tokens that come before those of the patches
    class_token: bool = False  # whether the first of them is a class token
    path: tuple[Tensor, ...] = ()  # the states, if they are known

    def states(self) -> list[Tensor]:
        return list(self.path or accumulate(self.maps, lambda x, step: step(x), initial=self.start))

    def logits(self, state: Tensor) -> Tensor:
        if self.head is None:
            raise TypeError('There is no norm and head: `forward_head(norm(state))` of the model must give its logits.')
        return self.head(state)

    def clock(self) -> Tensor:
        return torch.tensor(self.times, dtype=torch.float64)


@contextmanager
def follow(model: Any, images: Any) -> Iterator[Flow]:
    """That of a model for images [B, C, H, W], valid inside: in eval mode, without gradients. A Flow is its own."""
    if isinstance(model, Flow):
        yield model
        return
    model = unwrap_model(model)  # of torch.compile
    if any(ode.config.adaptive or ode.config.tokens < 1 for ode in find_ode_blocks(model)):
        raise ValueError("With an adaptive method or token merging, a step is no map of the state alone. Set "
                         "model.blocks.method = 'rk4', say, and tokens=1.")
    host = model if hasattr(model, 'blocks') else getattr(model, 'encoder', None)
    blocks = list(getattr(host, 'blocks', ()))
    with evaluating(model), torch.no_grad():
        with watch_blocks([blocks]) as [(states, handed)]:
            logits = model(images)
        if len(states) != len(blocks) + 1 or len({getattr(x, 'shape', None) for x in states}) > 1:
            raise TypeError(f'A {type(model).__name__} has no single sequence of blocks.')
        maps = (partial(_call, block, *passed) for block, passed in zip(blocks, handed, strict=True))
        times = accumulate((block.h if isinstance(block, Step) else 1. for block in blocks), initial=0.)
        yield Flow(states[0], tuple(maps), tuple(times), _head(model, states[-1], logits), prefix_tokens(model),
                   has_class_token(model), tuple(states))


def _head(model: Any, last: Tensor, logits: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Norm and head, if they give the logits for the last state."""
    if not getattr(model, 'num_classes', 0) or not callable(getattr(model, 'norm', None)):
        return None

    def head(x: Tensor) -> Tensor:
        return model.forward_head(model.norm(x))
    own = head(last)
    same = own.shape == logits.shape and torch.allclose(own, logits, rtol=1e-3, atol=1e-4, equal_nan=True)
    return head if same else None


def _call(block: Any, args: tuple[Any, ...], kwargs: Any, x: Tensor) -> Tensor:
    return block(x, *args, **kwargs)


@dataclass(frozen=True, repr=False)
class PerImage:
    """Measurements of B images; all fields but those in SHARED have a row for each."""
    SHARED: ClassVar[tuple[str, ...]] = ('method', 'steps', 'prefix', 'times')

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != 'times'}
        shared = [f'{name} {values.pop(name)}, ' for name in self.SHARED if name in values]
        means = [f'{name} {float(x.cpu().double().nanmean()):.3g}' for name, x in values.items()]
        count = len(next(iter(values.values())))
        return f'{type(self).__name__}({"".join(shared)}{count} images; on average {", ".join(means)})'


def joined(parts: Sequence[Measured]) -> Measured:
    columns = {f.name: [getattr(part, f.name) for part in parts]
               for f in fields(parts[0]) if f.name not in PerImage.SHARED}
    return replace(parts[0], **{name: torch.cat(rows) if isinstance(rows[0], Tensor) else sum(rows, ())
                                for name, rows in columns.items()})


def over_images(measure: Callable[[Flow], Measured], model: Any, images: Images, batch_size: int) -> Measured:
    parts: list[Measured] = []
    images = [] if images is None else images
    batches = [(None, None)] if isinstance(model, Flow) else read_batches(images, labels=False, size=batch_size)
    for batch, _ in batches:
        # derivatives need inference mode off
        with torch.inference_mode(False), torch.no_grad(), follow(model, batch) as flow:
            parts.append(measure(flow))
    return joined(parts)


def norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


def along(numbers: Tensor, x: Tensor) -> Tensor:
    """A number per state [B], in a shape that multiplies x [B, ...]."""
    return numbers.view(-1, *[1] * (x.ndim - 1))


def noise(x: Tensor) -> Tensor:
    """Normal random numbers in the shape of x [B, ...], the same for every state."""
    return torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x).expand_as(x)


class Jacobian:
    """Products of the Jacobian J of a map at a state [B, ...] with vectors [B, ...]; the map runs once for all."""

    def __init__(self, step: Callable[[Tensor], Tensor], state: Tensor) -> None:
        with PlainAttention(state):
            self._after, self._pull = torch.func.vjp(lambda x: step(x.clone()), state)[:2]  # it may change its input

    def pull(self, vector: Tensor) -> Tensor:
        """J^T u."""
        return self._pull(vector)[0]

    @cached_property
    def push(self) -> Callable[[Tensor], Tensor]:
        """J v, by the transposed Jacobian of J^T u, which is linear in u."""
        push = torch.func.vjp(self.pull, torch.zeros_like(self._after))[1]
        return lambda vector: push(vector)[0]


class PlainAttention(TorchFunctionMode):  # of one thread
    """Attention without fused kernels, which have no second derivative. `found` is the first of all tokens of x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.shape = (len(x), *x.shape[1:-1], *x.shape[1:-1])  # of its probabilities, but for the heads
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out, probabilities = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)
        else:
            out = probabilities = func(*args, **kwargs)
        if self.found is None and func in SOFTMAX and probabilities.ndim == 4 and (
                probabilities.shape[0], *probabilities.shape[2:]) == self.shape:
            self.found = probabilities.float()
        return out
