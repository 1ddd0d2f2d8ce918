"""Whether student, teacher and loss fit together, and which step is to reach which teacher's state."""
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..convert.block_kinds import class_token_comes_later, find_stages
from ..convert.merge import check_not_merged
from ..hooks import evaluating, state_at, watch_blocks
from ..ode.blocks import OdeBlocks, find_ode_blocks
from .config import LossConfig

__all__ = ['TeacherStage', 'check_converted_from', 'check_loss', 'check_models', 'check_same_time', 'check_student',
           'distance_times', 'hidden_states', 'is_one_sequence', 'match', 'softmax_times', 'teacher_stages',
           'uniform_times']


def is_one_sequence(student: Any) -> bool:
    """Whether an ODE-ViT's tokens are one sequence, prefix tokens first."""
    tokens = all(hasattr(student, name) for name in ('patch_embed', 'num_prefix_tokens'))
    return isinstance(getattr(student, 'blocks', None), OdeBlocks) and tokens


def check_student(student: nn.Module) -> None:
    """Refuse a student that is not an ODE-ViT, or is merged."""
    check_not_merged(student)
    if not find_ode_blocks(student):
        raise TypeError(f'The student must be an ODE-ViT; this {type(student).__name__} is none. Call convert_ first.')


def check_converted_from(student: nn.Module, teacher: Any) -> None:
    """Refuse a student that was not converted from this teacher, or from a model like it."""
    check_student(student)
    _check_teacher(student, teacher)
    ours, theirs = ({'type': type(m).__name__, **{
        name: tuple(p.shape) for name, p in m.named_parameters() if '.blocks.' not in f'.{name}'}}
        for m in (student, teacher))
    _check_equal(ours, theirs, 'Give the model that the student was converted from.')


def check_same_time(student: nn.Module, stages: list[list[nn.Module]]) -> None:
    """Refuse a student whose steps do not end at the states after the blocks of the teacher's stages."""
    for ode, blocks in zip(find_ode_blocks(student), stages, strict=True):
        kept, T = len(ode.before) + len(ode.after), ode.config.steps_and_end[1]
        if kept + T != len(blocks):
            raise ValueError(f'The student runs over {kept + T:g} layers, but the teacher has {len(blocks)} layers, so '
                             'the steps do not end at its states. Convert with T=None.')


def check_models(student: Any, teacher: Any) -> None:
    """Refuse models of which the student's states cannot follow the teacher's."""
    if not is_one_sequence(student):
        check_converted_from(student, teacher)
        return
    _check_teacher(student, teacher)
    names = 'embed_dim', 'in_chans', 'num_prefix_tokens', 'num_classes'
    ours, theirs = ({**{name: getattr(model, name, None) for name in names},
                     'patch grid': getattr(model.patch_embed, 'grid_size', None) or model.patch_embed.num_patches}
                    for model in (student, teacher))
    _check_equal(ours, theirs, 'Give models of equal width, tokens and classes.')


def _check_equal(ours: dict[str, Any], theirs: dict[str, Any], todo: str) -> None:
    if other := next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None):
        raise ValueError(f'Student and teacher differ in {other}: {ours.get(other)} and {theirs.get(other)}. {todo}')


def _check_teacher(student: nn.Module, teacher: Any) -> None:
    own = {id(p) for p in student.parameters()}
    if teacher is None or find_ode_blocks(teacher) or any(id(p) in own for p in teacher.parameters()):
        raise ValueError('The teacher must be the model as it was before its conversion, and share no parameters with '
                         'the student. Make it with copy.deepcopy(model) before convert_.')


def check_loss(student: Any, teacher: nn.Module | None, config: LossConfig) -> None:
    """Refuse a loss that needs what the models do not have."""
    if why := next(_lacks(student, teacher, config), ''):
        raise ValueError(why)


def _lacks(student: Any, teacher: nn.Module | None, config: LossConfig) -> Iterator[str]:
    name, odes = f'a {type(student).__name__}', find_ode_blocks(student)
    for part in ('trajectory', 'kd'):
        if teacher is None and config.weights[part] > 0:
            yield f'{part}_weight needs a teacher. Give one, or set {part}_weight=0.'
    if config.task_weight > 0 and (config.embedding or student.num_classes == 0):
        yield 'task_weight compares classes, but the outputs are embeddings. Set it to 0.'
    if config.patch_drop and (teacher is None or not all(
            isinstance(getattr(model, 'patch_drop', None), nn.Identity) and not getattr(model, 'rope', None)
            for model in (student, teacher))):
        yield f'patch_drop needs a teacher, and models that run on some of their patches, unlike {name}. Set it to 0.'
    for ode in odes:
        least = len(ode.shared.borders) + 1
        if any(min(of) < least for of in config.counts(ode.steps) or ()):
            yield f'steps={config.steps}: each of the {least} shared blocks needs a step. Give numbers from {least} on.'
    if is_one_sequence(student):
        norm = getattr(student, 'norm', None)
        if config.exits and (class_token_comes_later(student) or not isinstance(norm, nn.Module)):
            yield f'exits apply the final norm and the head to earlier states, which does not work for {name}.'
        if config.jasmin_weight and not all(ode.shared.has_attention_maps for ode in odes):
            yield ("jasmin_weight needs timm's plain attention (no windows, RoPE or position bias), which the blocks "
                   f'of {name} do not use.')
        return
    for setting in ('jasmin_weight', 'exit_weight', 'patch_drop'):
        if getattr(config, setting):
            yield f'{setting} needs one sequence of tokens, prefix tokens first, but {name} has none.'
    if len(odes) > 1 and config.checkpoints != 'uniform':
        yield f'checkpoints={config.checkpoints!r} needs one sequence of blocks, but {name} has {len(odes)} stages.'
    if len(odes) > 1 and any(isinstance(k, int) for of in config.of_updates for k in of):
        yield (f'steps={config.steps}: {name} has {len(odes)} stages with step counts of their own. Give shares of '
               "them, such as ['50%', '100%', '200%'].")
    if any(ode.config.adaptive for ode in odes):
        yield (f"'{odes[0].method}' gives no states to follow in {name}. Set a fixed-step method first, such as "
               "model.blocks.method = 'rk4'.")


class TeacherStage(NamedTuple):
    """One sequence of the teacher's blocks, of which the student converted those from `first` on."""
    blocks: list[nn.Module]
    first: int
    times: list[float]  # of the states after the converted blocks, in (0, 1]

    def pairs(self, ode: OdeBlocks) -> list[tuple[float, int]]:
        """Relative times at which the student is compared, and the indices in its blocks of the steps ending there."""
        ends = [(step.t + step.h - ode.t) / (ode.end - ode.t) for step in ode.solver]
        return [(ends[step], self.first + step) for _, step in match(self.times, ends)]

    def target(self, states: Sequence[Tensor], t: float) -> Tensor:
        """The teacher's state at a relative time, from its states before the first and after each block."""
        return state_at(states[self.first:], [0., *self.times], t)


def teacher_stages(student: Any, teacher: Any, config: LossConfig, calibration: Iterable[Tensor]) -> list[TeacherStage]:
    """A teacher's stages, with the times that the settings give or, for 'distance', images on the teacher's device."""
    stages = []
    for ode, site in zip(find_ode_blocks(student), find_stages(teacher), strict=True):
        times = uniform_times(len(site.blocks)) if config.checkpoints == 'uniform' else distance_times(
            teacher, calibration, config.checkpoint_temperature)
        first, last = ode.config.converted_layers(len(times))
        start = times[first - 1] if first else 0.
        stages.append(TeacherStage(
            site.blocks, first, [(time - start) / (times[last] - start) for time in times[first:last + 1]]))
    return stages


def uniform_times(layers: int) -> list[float]:
    """Relative times 1/L, 2/L, ..., 1 of a teacher's L layers."""
    return [(i + 1) / layers for i in range(layers)]


def softmax_times(distances: Sequence[float], temperature: float = 1.) -> list[float]:
    """Relative times in (0, 1] that give a layer more time the further it moves the state (arXiv 2511.16501).

    The temperature is in units of the mean distance; large values give uniform times.
    """
    d = torch.tensor(distances, dtype=torch.float64)
    w = (d / (d.mean().clamp_min(1e-12) * temperature)).softmax(0)
    w = 0.999 * w + 0.001 / len(w)  # a low temperature underflows to 0, but times must still increase
    times = w.cumsum(0)
    return (times / times[-1]).tolist()


@torch.no_grad()
def distance_times(teacher: Any, batches: Iterable[Tensor], temperature: float = 1.) -> list[float]:
    """The `softmax_times` of a teacher's layers, by batches of images [B, C, H, W] on its device."""
    moved, images = [], 0
    for batch in batches:
        with evaluating(teacher), watch_blocks([list(teacher.blocks)]) as seen:
            teacher(batch)
        path = [state.flatten(1) for state in seen[0][0]]
        moved.append(torch.stack([(b - a).float().norm(dim=1).double().sum() for a, b in pairwise(path)]).cpu())
        images += len(batch)
    if not moved:
        raise ValueError("checkpoints='distance' needs calibration images; pass calibration=[images, ...].")
    return softmax_times((sum(moved[1:], moved[0]) / images).tolist(), temperature)


def hidden_states(model: Any, images: Tensor, indices: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Features [B, N, D] for `forward_head`, and the states [B, N, D] after blocks."""
    if not indices:
        return model.forward_features(images), []
    if not isinstance(model, VisionTransformer):  # for others, timm does not always return prefix tokens
        with watch_blocks([list(model.blocks)]) as seen:
            features = model.forward_features(images)
        return features, [seen[0][0][i + 1] for i in indices]
    both: Any = model.forward_intermediates(
        images, indices=indices, norm=False, output_fmt='NLC', return_prefix_tokens=True)
    return both[0], [torch.cat([s[1], s[0]], dim=1) if isinstance(s, tuple) else s for s in both[1]]


def match(times: Sequence[float], ends: Sequence[float]) -> list[tuple[int, int]]:
    """Pair a teacher's L layers, at increasing times in (0, 1], with the ends of K steps.

    Returns min(L, K) pairs (layer, step), both counted from 0 and strictly increasing, the last (L - 1, K - 1): every
    member of the smaller side with a nearby member of the other side.
    """
    if len(times) <= len(ends):
        return list(enumerate(_nearest(times, ends)))
    return [(layer, step) for step, layer in enumerate(_nearest(ends, times))]


def _nearest(few: Sequence[float], many: Sequence[float]) -> list[int]:
    """Strictly increasing indices into `many`, near the values of `few`, ending at the last one."""
    chosen: list[int] = []
    for i, value in enumerate(few):
        low, high = chosen[-1] + 1 if chosen else 0, len(many) - len(few) + i  # which leaves room for the remaining
        index = min(range(len(many)), key=lambda j: abs(many[j] - value))
        chosen.append(high if i == len(few) - 1 else min(max(index, low), high))
    return chosen
