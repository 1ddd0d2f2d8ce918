"""The reversible method: its steps can be undone, so that training keeps the last state instead of all of them."""
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fields import Context, Field
from .skeleton import skeleton

__all__ = ['Companion', 'can_reverse', 'run_reversibly', 'step_forth']

COUPLING = 0.99  # lambda of the source; below 1, the two states are pulled together


class Companion:
    """The second state of a pass through reversible steps; it starts as a copy of the first.

    Args:
        start: Time at which the first step starts.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.t, self.z = start, torch.empty(0)

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images [B', as indices] of the batch."""
        self.z = self.z[images]

    def step(self, step: Any, x: Tensor, context: Context) -> Tensor:
        """Run a step on the state x [B, N, D] and on its companion."""
        if step.t <= self.start + 1e-6 or not self.z.numel():  # a new pass, or a step alone
            self.t, self.z = step.t, x
        if abs(self.t - step.t) > 1e-6:
            raise RuntimeError(
                f"A 'reversible' step goes on where the one before it ended, at t = {self.t:g}; this one starts at "
                f't = {step.t:g}. Run all steps in order, and without gradient checkpointing, which repeats steps: '
                'this method does not need it.')
        x, self.z = step_forth(step, x, self.z, context)
        self.t = step.t + step.h
        return x


def step_forth(
        step: Any, y: Tensor, z: Tensor, context: Context, dtype: Optional[torch.dtype] = None,
) -> Tuple[Tensor, Tensor]:
    """Both states [B, N, D] at t + h from those at t; the field is evaluated in a dtype of its own, if given."""
    def change(t: float, x: Tensor) -> Tensor:
        return (step.h * step.field(t, x.to(dtype or x.dtype), context, '')).to(x.dtype)
    y = COUPLING * y + (1 - COUPLING) * z + change(step.t, z)
    return y, z + change(step.t + step.h, y)


def can_reverse(field: Field) -> bool:
    """Whether a backward pass can use the field's parameters again: not while they are sharded or transformed."""
    if getattr(torch._C, '_are_functorch_transforms_active', bool)():
        return False
    return not any(hasattr(module, '_get_fsdp_state') for module in field.modules()) and not any(
        hasattr(p, 'full_tensor') for p in field.parameters())


def run_reversibly(steps: Sequence[Any], x: Tensor, context: Context, field: Field) -> Tensor:
    """Run all steps, and keep for the backward pass no state but the last one.

    The gradients are those of the steps that were run, up to the rounding with which the states are reconstructed. The
    two states are in float32 at least, whatever the dtype in which the field is evaluated.

    Args:
        steps: Bound steps.
        x: State before the first one [B, N, D].
        context: What the host passes to its blocks.
        field: The field, whose parameters get gradients.

    Returns:
        The state after the last step [B, N, D].

    Raises:
        ValueError: The field is random (dropout), so its states cannot be reconstructed.

    Source: McCallum & Foster, arXiv 2410.11648, with Euler steps.
    """
    for name, module in field.named_modules():
        rate = getattr(module, 'p', getattr(module, 'drop_prob', 0.))
        if module.training and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"'reversible' reconstructs states in the backward pass, but {name} drops at random. Build the model "
                'without dropout and drop path, or use another method.')
    passed = {key: value for key, value in context.passed.items() if isinstance(value, Tensor)}
    own = dict(field.named_parameters())
    kept = skeleton(field, own)  # the backward pass needs these tensors, even if the field has others by then
    steps = [step.bound(kept.select(step.t)) for step in steps]
    tensors = [*own.values(), *passed.values()]
    found: Tensor = _Reversible.apply(x, steps, context._replace(weights=None), tuple(passed), *tensors)
    return found


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
            ctx: Any, x: Tensor, steps: Sequence[Any], context: Context, names: Tuple[str, ...], *tensors: Tensor,
    ) -> Tensor:
        y = z = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.no_grad():
            for step in steps:
                y, z = step_forth(step, y, z, context, x.dtype)
        ctx.steps, ctx.context, ctx.names, ctx.dtype = steps, context, names, x.dtype
        ctx.cast = (x.device.type, torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(y, z, *tensors)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, z, *tensors = ctx.saved_tensors
        device, enabled, dtype = ctx.cast
        wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        total: List[Optional[Tensor]] = [None] * len(tensors)
        grad_y, grad_z = grads[0].to(y.dtype), torch.zeros_like(z)
        handed = len(tensors) - len(ctx.names)
        copies = [t.detach().requires_grad_(t.requires_grad) for t in tensors[handed:]]
        context = ctx.context._replace(passed={**ctx.context.passed, **dict(zip(ctx.names, copies, strict=True))})
        inputs = [*tensors[:handed], *copies]

        def slope(step: Any, t: float, x: Tensor) -> Tuple[Tensor, Any]:
            """h times the slope at x, and a function that takes a gradient of it back to x and adds to `total`."""
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                out = (step.h * step.field(t, x.to(ctx.dtype), context, '')).to(x.dtype)

            def back(grad: Tensor) -> Tensor:
                found, *more = torch.autograd.grad(out, [x, *(inputs[i] for i in wanted)], grad, allow_unused=True)
                for i, part in zip(wanted, more, strict=True):
                    so_far = total[i]
                    if part is not None:
                        total[i] = part if so_far is None else so_far + part
                return found
            return out.detach(), back
        with torch.autocast(device, dtype, enabled=enabled):
            for step in reversed(ctx.steps):  # undo step_forth, with its gradients
                change, back = slope(step, step.t + step.h, y)
                z = z - change
                grad_y = grad_y + back(grad_z)
                change, back = slope(step, step.t, z)
                y = (y - (1 - COUPLING) * z - change) / COUPLING
                grad_y, grad_z = COUPLING * grad_y, grad_z + (1 - COUPLING) * grad_y + back(grad_y)
        return (grad_y + grad_z).to(ctx.dtype), None, None, None, *total
