"""Student and teacher: checks that they match, and modules that tasks share."""
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

from timm.models import group_parameters
from timm.task import TrainingTask
from torch import Tensor, nn

from ..convert.merge import check_not_merged
from ..data.preprocessing import renormalisation
from ..ode.blocks import OdeBlocks, find_ode_blocks

__all__ = [
    'Renormalised', 'StudentTask', 'TrainingPass', 'check_keeps_patches', 'check_same_tokens', 'check_student',
    'check_teacher', 'has_whole_sequence',
]

Task = TypeVar('Task', bound='StudentTask')


class Renormalised(nn.Module):
    """Convert images [B, C, H, W] from the student's normalisation to the teacher's."""

    def __init__(self, student: nn.Module, teacher: nn.Module, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        for name, tensor in zip(('scale', 'shift'), renormalisation(student, teacher), strict=True):
            self.register_buffer(name, None if tensor is None else tensor.to(device, dtype), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return images if self.scale is None else images * self.scale + self.shift  # type: ignore[operator]


class TrainingPass(nn.Module):
    """A student's training pass in one `forward`, so that DistributedDataParallel can wrap it."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student: Any = student

    def no_weight_decay(self) -> set:
        """The student's, for prefixed names."""
        return {f'student.{name}' for name in getattr(self.student, 'no_weight_decay', set)()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The student's, for prefixed names."""
        groups = group_parameters(self.student, self.student.group_matcher(coarse=coarse), reverse=True)
        return lambda name: groups[name[len('student.'):]]


class StudentTask(TrainingTask):
    """A task that trains a student inside a TrainingPass, with a frozen teacher that stays in eval mode."""
    if TYPE_CHECKING:
        teacher: Any
        trainable_module: Any

    def train(self: Task, mode: bool = True) -> Task:
        """Set the mode of the student; the teacher stays in eval mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def prepare_distributed(self: Task, device_ids: Optional[list] = None, **ddp_kwargs: Any) -> Task:
        """Wrap the student, but not the frozen teacher, in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel
        ddp_kwargs.setdefault('find_unused_parameters', self._leaves_parameters_unused())
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def _leaves_parameters_unused(self) -> bool:
        """Whether a training pass may leave parameters of the student without a gradient."""
        raise NotImplementedError

    def get_eval_model(self, module: Optional[nn.Module] = None, ema: bool = False) -> Optional[nn.Module]:
        """The student itself, without the wrapper of the training pass."""
        found = super().get_eval_model(module=module, ema=ema)
        inner = found
        while inner is not None and not isinstance(inner, TrainingPass):
            inner = getattr(inner, 'module', None)
        return inner.student if inner is not None else found


def has_whole_sequence(student: Any) -> bool:
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


def check_teacher(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ValueError for a teacher that shares parameters with the student, TypeError for one that is converted."""
    if {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}:
        raise ValueError('Student and teacher share parameters, so training would change the teacher. '
                         'Make the teacher with copy.deepcopy(model) before convert_.')
    if find_ode_blocks(teacher):
        raise TypeError('The teacher is itself converted. Give an ordinary model, such as the one that the student was '
                        'converted from.')


def check_keeps_patches(student: Any) -> None:
    """Raise ValueError for a student that drops patches in training."""
    if not isinstance(getattr(student, 'patch_drop', None) or nn.Identity(), nn.Identity):
        raise ValueError(
            "The student drops patches, so its tokens do not match the teacher's. Create it with patch_drop_rate=0.")


def check_same_tokens(student: Any, teacher: Any) -> None:
    check_teacher(student, teacher)
    check_keeps_patches(student)
    for name in ('embed_dim', 'in_chans', 'num_prefix_tokens', 'num_classes'):
        ours, theirs = getattr(student, name, None), getattr(teacher, name, None)
        if ours != theirs:
            raise ValueError(f'Student and teacher differ in {name}: {ours} and {theirs}.')
    patches = [m.patch_embed for m in (student, teacher)]
    sizes = [tuple(getattr(patch, 'grid_size', None) or (patch.num_patches,)) for patch in patches]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f'Student and teacher have different patch grids: {sizes[0]} and {sizes[1]}. Give both the same img_size.')
