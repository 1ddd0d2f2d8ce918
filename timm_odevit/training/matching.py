"""Whether a student, its teacher and a loss fit together; checked before a task changes anything."""
from typing import Any

from torch import nn

from ..convert.block_kinds import class_token_comes_later
from ..convert.merge import check_not_merged
from ..ode.blocks import OdeBlocks, find_ode_blocks
from .config import LossConfig

__all__ = ['check_converted_from', 'check_loss', 'check_models', 'check_same_time', 'check_student', 'is_one_sequence']


def is_one_sequence(student: Any) -> bool:
    """Whether an ODE-ViT's tokens are one sequence, prefix tokens first, from the embedding to the last step."""
    tokens = all(hasattr(student, name) for name in ('patch_embed', 'num_prefix_tokens'))
    return isinstance(getattr(student, 'blocks', None), OdeBlocks) and tokens


def check_student(student: Any) -> None:
    """Raise TypeError for a student that is not an ODE-ViT, ValueError for one that is merged."""
    if isinstance(student, nn.Module):
        check_not_merged(student)
    if not isinstance(student, nn.Module) or not find_ode_blocks(student):
        raise TypeError(
            f'The student must be an ODE-ViT; this {type(student).__name__} is not one. Call convert_ first.')


def check_converted_from(student: Any, teacher: Any) -> None:
    """Raise TypeError or ValueError unless the student was converted from this teacher, or from a model like it."""
    check_student(student)
    if not isinstance(teacher, nn.Module):
        raise TypeError(f'The teacher must be a model; got {type(teacher).__name__}. Build it with timm.create_model.')
    _check_teacher(student, teacher)
    outside = [{name: tuple(p.shape) for name, p in m.named_parameters() if '.blocks.' not in f'.{name}'}
               for m in (student, teacher)]
    if type(student) is not type(teacher) or outside[0] != outside[1]:
        names = [name for name in {**outside[0], **outside[1]} if outside[0].get(name) != outside[1].get(name)]
        found = f': {names[0]} is {outside[0].get(names[0])} and {outside[1].get(names[0])}' if names else (
            f': a {type(student).__name__} and a {type(teacher).__name__}')
        raise ValueError(f'The student was not converted from this teacher{found}. Give the original model.')


def check_same_time(student: nn.Module, stages: list[list[nn.Module]]) -> None:
    """Raise ValueError unless the student's steps end at the states after the blocks of the teacher's stages."""
    for ode, blocks in zip(find_ode_blocks(student), stages, strict=True):
        kept, T = len(ode.before) + len(ode.after), ode.config.grid[1]
        if kept + T != len(blocks):
            raise ValueError(f'The student runs over {T:g} units of time plus {kept} kept layers, but the teacher has '
                             f'{len(blocks)} layers, so the steps do not end at its states. Convert with T=None.')


def check_models(student: Any, teacher: Any) -> None:
    """Raise TypeError or ValueError unless the student's states can follow the teacher's."""
    if is_one_sequence(student):
        _check_teacher(student, teacher)
        _check_same_tokens(student, teacher)
    else:
        check_converted_from(student, teacher)
    if not isinstance(getattr(student, 'patch_drop', None) or nn.Identity(), nn.Identity):
        raise ValueError(
            "The student drops patches, so its tokens do not match the teacher's. Create it with patch_drop_rate=0.")


def check_loss(student: Any, teacher: nn.Module | None, config: LossConfig) -> None:
    """Raise ValueError if a loss needs what the models do not have."""
    name, odes = type(student).__name__, find_ode_blocks(student)
    for part in ('trajectory', 'kd'):
        if teacher is None and config.weights[part] > 0:
            raise ValueError(f'{part}_weight needs a teacher. Give one, or set {part}_weight=0.')
    if student.num_classes == 0 and config.task_weight > 0:
        raise ValueError('task_weight compares classes, but these models have none (num_classes=0). Set it to 0.')
    if config.patch_drop and (teacher is None or not all(
            isinstance(getattr(model, 'patch_drop', None), nn.Identity) and not getattr(model, 'rope', None)
            for model in (student, teacher))):
        raise ValueError(f'patch_drop needs a teacher, and models that take part of their patches; a {name} that has '
                         'RoPE, or has no patch_drop of its own, does not. Set patch_drop=0.')
    if is_one_sequence(student):
        tokens = student.patch_embed.num_patches + student.num_prefix_tokens
        if config.jasmin_k > tokens:
            raise ValueError(f'jasmin_k must be at most the number of tokens, {tokens}; got {config.jasmin_k}.')
        if config.exits and (
                class_token_comes_later(student) or not isinstance(getattr(student, 'norm', None), nn.Module)):
            raise ValueError(f"exits apply the last norm and the head to states along the way, which a {name}'s do "
                             'not fit. Leave exits out.')
        return
    for setting in ('jasmin_weight', 'exit_weight'):
        if getattr(config, setting):
            raise ValueError(f'{setting} needs one sequence of tokens with the prefix tokens first, but a {name} has '
                             'none. Leave it out.')
    if len(odes) > 1 and any(isinstance(k, int) for k in config.steps or ()):
        raise ValueError(f'steps={config.steps}: a {name} has {len(odes)} stages with step counts of their own. Give '
                         'shares of them, such as [0.5, 1.0, 2.0].')
    if any(ode.config.adaptive for ode in odes):
        raise ValueError(
            f"'{odes[0].method}' gives no states to follow in a {name}. Set a fixed-step method first.")


def _check_teacher(student: nn.Module, teacher: nn.Module) -> None:
    if {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}:
        raise ValueError('Student and teacher share parameters, so training would change the teacher. '
                         'Make the teacher with copy.deepcopy(model) before convert_.')
    if find_ode_blocks(teacher):
        raise TypeError('The teacher is itself converted. Give an ordinary model, such as the one that the student was '
                        'converted from.')


def _check_same_tokens(student: Any, teacher: Any) -> None:
    for name in ('embed_dim', 'in_chans', 'num_prefix_tokens', 'num_classes'):
        ours, theirs = getattr(student, name, None), getattr(teacher, name, None)
        if ours != theirs:
            raise ValueError(f'Student and teacher differ in {name}: {ours} and {theirs}.')
    patches = [m.patch_embed for m in (student, teacher)]
    sizes = [tuple(getattr(patch, 'grid_size', None) or (patch.num_patches,)) for patch in patches]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f'Student and teacher have different patch grids: {sizes[0]} and {sizes[1]}. Give both the same img_size.')
