"""The matrix products and the attention of a forward pass alone: the time that no implementation can save."""
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

__all__ = ['products_of']

PRODUCTS = (F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, torch.bmm, torch.mm, torch.addmm,
            torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.addmm)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: List[Tuple[Callable[..., Tensor], Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def products_of(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """The products of one forward pass, to be called again: weights as they are, all else contiguous and random.

    Args:
        model: Any model.
        images: Images [B, C, H, W].
    """
    with _Recorder() as recorder:
        model(images)
    kept = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others: Dict[Tuple[Any, torch.dtype], Tensor] = {}

    def replaced(x: Tensor) -> Tensor:
        if id(x) in kept or not x.is_floating_point():
            return x
        return others.setdefault((x.shape, x.dtype), torch.randn_like(x, memory_format=torch.contiguous_format))
    calls = [(func, *tree_map_only(Tensor, replaced, (args, kwargs))) for func, args, kwargs in recorder.found]

    def run() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)
    return run
