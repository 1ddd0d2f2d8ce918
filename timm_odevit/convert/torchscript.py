"""What TorchScript needs: it iterates only over registered modules, and has no *args or context variables."""
import copy
from typing import TYPE_CHECKING, Any, List, Optional, Sequence

from torch import Tensor, nn

from ..ode.blocks import OdeBlocks
from ..ode.fields import Context, Field
from ..ode.halting import Halts
from .merge import MergedBlocks, merged_steps

__all__ = ['scriptable_copy']


def scriptable_copy(model: nn.Module) -> nn.Module:
    """The model as `torch.jit.script` needs it: a shallow copy whose steps each own their field.

    If the shared block depends on time, it is merged for each step. All other parameters are the model's own, and
    `torch.jit.script` does not change the model.

    Raises:
        ValueError: The method is adaptive, or TorchScript does not support the blocks.
    """
    blocks: Any = model.blocks
    if isinstance(blocks, Halts):
        config = blocks.settings
        if config.tokens < 1 or config.halting is not None or config.method == 'reversible':
            raise ValueError("TorchScript supports neither merged tokens nor halting nor method 'reversible'. Set "
                             'tokens=1, halting=None and another method first, or use torch.export.')
    if isinstance(blocks, OdeBlocks):
        if blocks.config.adaptive:
            raise ValueError(
                f"TorchScript does not support the adaptive method '{blocks.method}'. Set a fixed-step method first, "
                "such as model.blocks.method = 'rk4'.")
        chosen: Sequence[nn.Module] = [*blocks.before, *merged_steps(blocks), *blocks.after]
    elif isinstance(blocks, MergedBlocks):
        chosen = list(blocks)
    else:  # pruned to kept blocks
        return model
    unscriptable = {type(f).__name__ for step in chosen for f in step.modules()
                    if isinstance(f, Field) and not f.scriptable}
    if unscriptable:
        raise ValueError(f"TorchScript does not support {' or '.join(sorted(unscriptable))}. Use torch.export instead.")
    clone = copy.copy(model)
    clone.__dict__.pop('__prepare_scriptable__', None)
    clone._modules = dict(model._modules)
    steps: List[nn.Module] = [_Scriptable(step) if hasattr(step, 'advance') else step for step in chosen]
    sequence = nn.Sequential(*steps)
    sequence.training = blocks.training
    clone._modules['blocks'] = sequence
    return clone


class _Scriptable(nn.Module):
    """A step with the signature of timm's ViT block."""

    if TYPE_CHECKING:
        step: Any

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.training = step.training

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        return self.step.advance(x, Context(attn_mask, is_causal, None, {}))
