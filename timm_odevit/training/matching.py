"""Whether student, teacher and loss fit together, and which teacher's state each step is to reach."""
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..convert.block_kinds import find_stages, has_class_token, prefix_tokens
from ..hooks import evaluating, watch_blocks
from ..ode.blocks import OdeBlocks, find_ode_blocks
from .config import LossConfig


def is_one_sequence(student: Any) -> bool:
    """Whether an ODE-ViT's tokens are one sequence, prefix tokens first."""
    tokens = all(hasattr(student, name) for name in ('patch_embed', 'num_prefix_tokens'))
    return isinstance(getattr(student, 'blocks', None), OdeBlocks) and tokens


def check_models(student: Any, teacher: Any) -> None:
    """Refuse a student that is no ODE-ViT, or whose states cannot follow its teacher's."""
    for each in (student, teacher):
        if each is not None and unwrap_model(each) is not each:
            raise TypeError(f'Give student and teacher without {type(each).__name__}; fit(compile=True) compiles them.')
    if not find_ode_blocks(student):
        raise TypeError(f'The student must be an ODE-ViT; this {type(student).__name__} is none. Call convert_ first.')
    if teacher is None:
        return
    if find_ode_blocks(teacher) or {*student.parameters()} & {*teacher.parameters()}:
        raise ValueError('The teacher must be the model as it was before its conversion, and share no parameters with '
                         'the student. Make it with copy.deepcopy(model) before convert_.')
    alike = is_one_sequence(student)
    ours, theirs = (_alike(model) if alike else _outside_the_blocks(model) for model in (student, teacher))
    if other := next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None):
        todo = ('Give models of equal width, tokens and classes.' if alike else
                'Give the model that the student was converted from.')
        raise ValueError(f'Student and teacher differ in {other}: {ours.get(other)} and {theirs.get(other)}. {todo}')


def _alike(model: Any) -> dict[str, Any]:
    names = 'embed_dim', 'in_chans', 'num_prefix_tokens', 'num_classes'
    embed = getattr(model, 'patch_embed', None)
    return {**{name: getattr(model, name, None) for name in names},
            'patch grid': getattr(embed, 'grid_size', None) or getattr(embed, 'num_patches', None)}


def _outside_the_blocks(model: nn.Module) -> dict[str, Any]:
    return {'type': type(model).__name__, **{
        name: tuple(p.shape) for name, p in model.named_parameters() if '.blocks.' not in f'.{name}'}}


def can_drop_patches(student: Any, teacher: Any) -> bool:
    return is_one_sequence(student) and all(
        isinstance(getattr(model, 'patch_drop', None), nn.Identity) and not getattr(model, 'rope', None)
        for model in (student, teacher))


def check_loss(student: Any, teacher: nn.Module | None, config: LossConfig) -> None:
    name, odes, one = f'a {type(student).__name__}', find_ode_blocks(student), is_one_sequence(student)
    has_cls = one and has_class_token(student)
    several, weights = len(odes) > 1, config.weights
    for wrong, why in (
            (any(k < ode.fewest_steps for ode in odes for of in config.counts(ode.steps) for k in of),
             f'steps={config.steps}: each of the {max(ode.fewest_steps for ode in odes)} shared blocks needs a step. '
             'Give more of them.'),
            *((teacher is None and weights[part] > 0, f'{part}_weight needs a teacher. Give one, or set it to 0.')
              for part in ('trajectory', 'kd')),
            (weights['task'] > 0 and (config.embedding or student.num_classes == 0),
             'task_weight compares classes, but the outputs are embeddings. Set it to 0.'),
            (weights['kd'] > 0 and getattr(student, 'num_classes', None) == 1 and not config.embedding,
             'kd_weight compares classes, but there is one output. Set it to 0, or embedding=True.'),
            (weights['trajectory'] and not (config.patch_weight or (has_cls and config.cls_weight) or (
                one and prefix_tokens(student) > has_cls and config.register_weight)),
             f'patch_weight is 0, and so are the weights of the other tokens of {name}. Set it above 0.'),
            (config.patch_drop and not can_drop_patches(student, teacher),
             f'patch_drop needs a teacher, and models that run on some of their patches, unlike {name}. Set it to 0.'),
            ((weights['jasmin'] or config.exits) and not one,
             f'jasmin_weight and exits need one sequence of tokens, prefix tokens first, but {name} has none.'),
            (config.exits and (odes[0].readout is None or odes[0].after),
             f'exits apply the final norm and the head to earlier states, which does not work for {name}.'),
            (weights['jasmin'] and not all(ode.shared.has_attention_maps for ode in odes),
             "jasmin_weight needs timm's plain attention (no windows, RoPE or position bias), which the blocks of "
             f'{name} do not use.'),
            (several and config.checkpoints != 'uniform',
             f"checkpoints='distance' needs one sequence of blocks, but {name} has {len(odes)} stages."),
            (several and any(isinstance(k, int) for of in config.of_updates for k in of),
             f'steps={config.steps}: {name} has {len(odes)} stages with step counts of their own. Give shares of '
             "them, such as ['50%', '100%', '200%'].")):
        if wrong:
            raise ValueError(why)


def layer_times(student: Any, teacher: Any, config: LossConfig, images: Iterable[Tensor]) -> list[list[float]]:
    """By stage, relative times in (0, 1] of the states after those of the teacher's layers that were converted.

    Images, in batches on its device, are for checkpoints by 'distance'.
    """
    found = []
    for ode, site in zip(find_ode_blocks(student), find_stages(teacher), strict=True):
        layers = len(site.blocks)
        times = ([(i + 1) / layers for i in range(layers)] if config.checkpoints == 'uniform' else
                 distance_times(teacher, images))
        first, last = ode.config.blocks or (0, layers - 1)
        if last >= layers:
            raise ValueError(f'The teacher has only {layers} layers; the student has blocks={ode.config.blocks}.')
        start = times[first - 1] if first else 0.
        found.append([(time - start) / (times[last] - start) for time in times[first:last + 1]])
    return found


def targets(ode: OdeBlocks, times: Sequence[float], states: Sequence[Tensor]) -> dict[int, Tensor]:
    """The teacher's states that an ODE is to reach, by the index of the block after which it is.

    `states` are those before the teacher's first block and after each, `times` those of the converted ones.
    """
    ends = [(step.t + step.h - ode.t) / (ode.end - ode.t) for step in ode.solver]
    first = len(ode.before)
    return {first + step: _state_at(states[first:], [0., *times], ends[step]) for step in match(times, ends)}


def _state_at(states: Sequence[Tensor], times: Sequence[float], t: float) -> Tensor:
    """The state at a time, interpolated linearly between those recorded at strictly increasing times."""
    right = min(max(bisect_right(times, t + 1e-6), 1), len(times) - 1)
    share = min((t - times[right - 1]) / (times[right] - times[right - 1]), 1.)
    if share < 1e-5:
        return states[right - 1]
    return states[right] if share > 1 - 1e-5 else torch.lerp(states[right - 1], states[right], share)


def softmax_times(distances: Sequence[float]) -> list[float]:
    """Relative times in (0, 1] that give a layer more time the further it moves the state (arXiv 2511.16501)."""
    d = torch.tensor(distances, dtype=torch.float64)
    w = (d / d.mean().clamp_min(1e-12)).softmax(0)
    w = 0.999 * w + 0.001 / len(w)  # times must increase, also where one of many layers moves it alone
    times = w.cumsum(0)
    return (times / times[-1]).tolist()


@torch.no_grad()
def distance_times(teacher: Any, batches: Iterable[Tensor]) -> list[float]:
    """The `softmax_times`, by batches of images [B, C, H, W] on the teacher's device."""
    moved = []
    for batch in batches:
        with evaluating(teacher), watch_blocks([find_stages(teacher)[0].blocks]) as seen:
            teacher(batch)
        path = [state.flatten(1) for state in seen[0][0]]
        moved.append(torch.stack([(b - a).float().norm(dim=1).cpu().double().sum() for a, b in pairwise(path)]))
    if not moved:
        raise ValueError("checkpoints='distance' needs calibration images; pass calibration=[images, ...].")
    return softmax_times(sum(moved[1:], moved[0]).tolist())


def match(times: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Which of K steps, with these ends, are compared with a teacher whose L layers are at increasing times in (0, 1].

    min(L, K) strictly increasing indices, the last K - 1: each step or, if there are more steps, one near each layer.
    """
    chosen: list[int] = []
    for i, time in enumerate(times[:len(ends)]):
        low, high = chosen[-1] + 1 if chosen else 0, len(ends) - min(len(times), len(ends)) + i  # room for the others
        nearest = min(range(len(ends)), key=lambda j: abs(ends[j] - time))
        chosen.append(min(max(nearest, low), high))
    return chosen
