"""TrajectoryDistillationTask: the student's states follow the teacher's hidden states."""
import math
from itertools import pairwise
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import group_parameters
from timm.task import DistillationTeacher, TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..blocks import OdeBlocks, find_ode_blocks
from .checkpoints import distance_times, hidden_states, match, uniform_times
from .losses import jasmin_loss, logit_loss, trajectory_loss

__all__ = ['TrajectoryDistillationTask', 'check_apart', 'check_student']


class TrajectoryDistillationTask(TrainingTask):
    """Teach an ODE-ViT to follow the hidden states of a pretrained ViT; a `timm.task.TrainingTask`.

    The teacher is frozen and stays in eval mode. Teacher layers are matched to solver steps at checkpoints in time.
    loss = trajectory_weight * trajectory + jasmin_weight * JaSMin + kd_weight * KL + task_weight * cross-entropy.

    Args:
        student: ODE-ViT, from `convert_` or `timm.create_model('odevit_...')`.
        teacher: timm model of the same width and tokens, or the name of one.
        checkpoints: Where the teacher's layers lie in time: 'uniform'; 'distance', measured on `calibration`; or
            strictly increasing relative times in (0, 1], one per layer.
        calibration: Batches of images [B, C, H, W], normalised for the teacher, for 'distance'.
        checkpoint_temperature: Of the softmax over distances, in units of their mean.
        trajectory_weight: Weight of the mean over checkpoints of the squared error relative to the teacher's variance.
        cls_weight: Share of the class token in it.
        register_weight: Share of the register tokens in it.
        patch_weight: Share of the patch tokens in it.
        jasmin_weight: Weight of the JaSMin loss of the shared block's attention.
        jasmin_k: k of JaSMin, 0 or at least 2.
        jasmin_evaluations: Number of states, evenly spread over the trajectory, at which attention is computed again.
        kd_weight: Weight of the KL divergence between the logits.
        kd_temperature: Temperature of both logits in it.
        task_weight: Weight of the loss on the labels.
        criterion: Loss on the labels, (logits, target) to a scalar; cross-entropy by default.
        device: Device of the task, that of the student by default.
        dtype: Dtype of the task's buffers.
        verbose: Log what timm logs.

    Raises:
        TypeError: The student is not an ODE-ViT.
        ValueError: Student and teacher do not fit, or share parameters.

    Source: ODE-ViT, arXiv 2511.16501; token shares: Raptor, arXiv 2512.19941.
    """

    def __init__(
            self,
            student: nn.Module,
            teacher: Union[str, nn.Module],
            *,
            checkpoints: Union[str, Sequence[float]] = 'uniform',
            calibration: Optional[Iterable[Tensor]] = None,
            checkpoint_temperature: float = 1.,
            trajectory_weight: float = 1.,
            cls_weight: float = 0.45,
            register_weight: float = 0.10,
            patch_weight: float = 0.45,
            jasmin_weight: float = 0.,
            jasmin_k: int = 0,
            jasmin_evaluations: int = 2,
            kd_weight: float = 1.,
            kd_temperature: float = 1.,
            task_weight: float = 0.,
            criterion: Optional[nn.Module] = None,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
            verbose: bool = True,
    ) -> None:
        check_student(student)
        device = device or next(student.parameters()).device
        host: Any = student
        tokens = all(hasattr(host, name) for name in ('patch_embed', 'num_prefix_tokens'))
        if not isinstance(getattr(host, 'blocks', None), OdeBlocks) or not tokens:
            raise TypeError(
                f'A {type(student).__name__} has no sequence of tokens whose states could be followed as a whole. '
                'Calibrate it step by step only: epochs=(8, 0), or odevit calibrate --epochs 8,0.')
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        for name, value in (
                ('trajectory_weight', trajectory_weight), ('jasmin_weight', jasmin_weight), ('kd_weight', kd_weight),
                ('task_weight', task_weight), ('cls_weight', cls_weight), ('register_weight', register_weight),
                ('patch_weight', patch_weight)):
            if not value >= 0:
                raise ValueError(f'{name} must be at least 0; got {value!r}.')
        if jasmin_k == 1 or jasmin_k < 0:
            raise ValueError(
                f'jasmin_k must be 0, or at least 2 (k = 1 makes the loss 0 for any attention); got {jasmin_k!r}.')
        if jasmin_evaluations < 1:
            raise ValueError(f'jasmin_evaluations must be at least 1; got {jasmin_evaluations!r}.')

        if isinstance(teacher, str):
            teacher = DistillationTeacher(
                teacher, num_classes=host.num_classes, in_chans=host.in_chans, device=device, dtype=dtype).model
        _check_pair(student, teacher)
        tokens = host.patch_embed.num_patches + host.num_prefix_tokens
        if jasmin_k > tokens:
            raise ValueError(f'jasmin_k must be at most the number of tokens, {tokens}; got {jasmin_k!r}.')
        if host.num_classes == 0 and (kd_weight > 0 or task_weight > 0):
            raise ValueError(
                'kd_weight and task_weight compare classes, and these models have none (num_classes=0). Set both to 0.')
        self.times = _times(teacher, checkpoints, calibration, checkpoint_temperature, device)
        # everything fits: only now is the teacher touched
        self.teacher = DistillationTeacher(teacher, device=device, dtype=dtype)
        self.teacher.requires_grad_(False).eval()
        self.trainable_module: Any = _Trainable(student, jasmin_k, jasmin_evaluations)
        self.weights = dict(
            trajectory=trajectory_weight, jasmin=jasmin_weight, kd=kd_weight, task=task_weight)
        self.token_weights = (cls_weight, register_weight, patch_weight)
        self.kd_temperature = kd_temperature
        self.criterion = criterion if criterion is not None else nn.CrossEntropyLoss()
        cfg = getattr(student, 'pretrained_cfg', None) or {}
        for name, default in (('mean', IMAGENET_DEFAULT_MEAN), ('std', IMAGENET_DEFAULT_STD)):  # timm's teacher's too
            buffer = torch.tensor(cfg.get(name, default), device=self.device, dtype=self.dtype)
            self.register_buffer(f'student_{name}', buffer.view(1, -1, 1, 1), persistent=False)

    def forward(self, input: Tensor, target: Optional[Tensor]) -> Dict[str, Tensor]:
        """Compute the loss of one batch.

        Args:
            input: Images [B, C, H, W], normalised for the student.
            target: Labels [B], or class probabilities [B, classes]; may be None with task_weight 0.

        Returns:
            'loss', 'output' (the student's logits [B, classes]), and the parts before weighting: 'trajectory_loss',
            'jasmin_loss', 'kd_loss', 'task_loss'. Parts of weight 0 are there for the record, without a gradient.
        """
        student = unwrap_model(self.trainable_module).student
        layers, steps = zip(*self._pairs(student), strict=True)
        output, states, jasmin = self.trainable_module(input, steps, self.weights['jasmin'] > 0)
        with torch.no_grad():
            mean, std = self.get_buffer('student_mean'), self.get_buffer('student_std')
            images = self.teacher.normalize_input(input, mean, std)
            teacher: Any = self.teacher.model
            features, target_states = hidden_states(teacher, images, layers)
            target_output = teacher.forward_head(features)
        bare = states[0].shape[1] == student.patch_embed.num_patches  # a class token that comes later, as in CaiT
        prefix = 0 if bare else student.num_prefix_tokens
        has_cls = prefix > 0 and getattr(student, 'cls_token', None) is not None
        parts = {
            'trajectory': lambda: torch.stack([
                trajectory_loss(s, t, prefix, has_cls, self.token_weights)
                for s, t in zip(states, target_states, strict=True)]).mean(),
            'kd': lambda: logit_loss(output, target_output, self.kd_temperature),
            'task': lambda: self.criterion(output, target) if target is not None else output.new_tensor(math.nan),
        }
        found = {'jasmin': jasmin}
        for name, part in parts.items():
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.weights[name] > 0):
                found[name] = part()
        loss = sum((self.weights[name] * value for name, value in found.items() if self.weights[name] > 0),
                   output.new_zeros(()))
        return {'loss': loss, 'output': output, **{f'{name}_loss': found[name] for name in self.weights}}

    def _pairs(self, student: Any) -> List[Tuple[int, int]]:
        """The teacher's layers and the places in the student's blocks that answer for them."""
        first, last = student.blocks.config.blocks or (0, len(self.times) - 1)
        start = self.times[first - 1] if first else 0.
        run = [(time - start) / (self.times[last] - start) for time in self.times[first:last + 1]]
        return [(first + layer, first + step) for layer, step in match(run, student.blocks.steps)]

    def train(self, mode: bool = True) -> 'TrajectoryDistillationTask':
        """Set the mode of the student; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def prepare_distributed(self, device_ids: Optional[list] = None, **ddp_kwargs: Any) -> 'TrajectoryDistillationTask':
        """Wrap the student, and not the frozen teacher, in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel
        if not (self.weights['kd'] or self.weights['task']):  # then the final norm and the head have no gradient
            ddp_kwargs.setdefault('find_unused_parameters', True)
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = 'inductor', mode: Optional[str] = None, **compile_kwargs: Any) -> Any:
        """Compile the student's training pass and its evaluation; returns the eval model. The teacher runs as it is."""
        options = dict(backend=backend, mode=mode, **compile_kwargs)
        self.eval_model = torch.compile(unwrap_model(self.trainable_module).student, **options)
        self.trainable_module = torch.compile(self.trainable_module, **options)
        return self.eval_model

    def get_eval_model(self, module: Optional[nn.Module] = None, ema: bool = False) -> Optional[nn.Module]:
        """The student itself, without the wrapper of the training pass."""
        found = super().get_eval_model(module=module, ema=ema)
        inner = found
        while inner is not None and not isinstance(inner, _Trainable):
            inner = getattr(inner, 'module', None)
        return inner.student if inner is not None else found


class _Trainable(nn.Module):
    """The student's training pass in one `forward`, so that DistributedDataParallel can wrap it."""

    def __init__(self, student: nn.Module, jasmin_k: int, jasmin_evaluations: int) -> None:
        super().__init__()
        self.student: Any = student
        self.jasmin_k = jasmin_k
        self.jasmin_evaluations = jasmin_evaluations

    def forward(self, images: Tensor, steps: Sequence[int], train_jasmin: bool) -> Tuple[Tensor, List[Tensor], Tensor]:
        blocks: Any = self.student.blocks
        first = blocks.config.blocks[0] if blocks.config.blocks else 0
        last = max(blocks.steps - 2, 0)  # the last state is nobody's input, unless it is the only one
        spread = torch.linspace(first, first + last, min(self.jasmin_evaluations, last + 1)).round().int().tolist()
        wanted = sorted({*steps, *spread})
        features, states = hidden_states(self.student, images, wanted)
        by_step = dict(zip(wanted, states, strict=True))
        if not train_jasmin and not blocks.shared.has_attention_maps:
            return self.student.forward_head(features), [by_step[i] for i in steps], features.new_tensor(math.nan)
        with torch.set_grad_enabled(torch.is_grad_enabled() and train_jasmin):
            maps = [blocks.shared.attention_map(blocks[i].t + blocks[i].h, by_step[i]) for i in spread]
            jasmin = torch.stack([jasmin_loss(m, self.jasmin_k) for m in maps]).mean()
        return self.student.forward_head(features), [by_step[i] for i in steps], jasmin

    def no_weight_decay(self) -> set:
        return {f'student.{name}' for name in self.student.no_weight_decay()}

    def group_matcher(self, coarse: bool = False):
        groups = group_parameters(self.student, self.student.group_matcher(coarse=coarse), reverse=True)
        return lambda name: groups[name[len('student.'):]]


def _times(teacher: Any, checkpoints, calibration, temperature: float, device: torch.device) -> List[float]:
    layers = len(teacher.blocks)
    if isinstance(checkpoints, str):
        if checkpoints == 'uniform':
            return uniform_times(layers)
        if checkpoints == 'distance':
            return distance_times(teacher, (images.to(device) for images in calibration or ()), temperature)
        raise ValueError(
            f"Unknown checkpoints '{checkpoints}'. Allowed: uniform, distance, or a list of relative times.")
    times = [float(t) for t in checkpoints]
    increasing = all(a < b for a, b in pairwise([0., *times]))
    if len(times) != layers or not increasing or times[-1] > 1.:
        raise ValueError(
            f'checkpoints must be {layers} strictly increasing times in (0, 1], one for each layer of the teacher; '
            f'got {times}.')
    return times


def check_student(student: Any) -> None:
    """Raise TypeError for a student that is not an ODE-ViT."""
    if not isinstance(student, nn.Module) or not find_ode_blocks(student):
        raise TypeError(
            f'The student must be an ODE-ViT; this {type(student).__name__} is none. Call convert_ first.')


def check_apart(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ValueError for a student and a teacher with parameters in common."""
    if {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}:
        raise ValueError('Student and teacher share parameters, so training would change the teacher. '
                         'Make the teacher by copy.deepcopy(model) before convert_.')


def _check_pair(student: Any, teacher: Any) -> None:
    check_apart(student, teacher)
    if not isinstance(getattr(student, 'patch_drop', None) or nn.Identity(), nn.Identity):
        raise ValueError(
            "The student drops patches, so its tokens are not the teacher's. Create it with patch_drop_rate=0.")
    for name in ('embed_dim', 'in_chans', 'num_prefix_tokens', 'num_classes'):
        ours, theirs = getattr(student, name, None), getattr(teacher, name, None)
        if ours != theirs:
            raise ValueError(f'Student and teacher differ in {name}: {ours} and {theirs}.')
    patches = [m.patch_embed for m in (student, teacher)]
    sizes = [tuple(getattr(patch, 'grid_size', None) or (patch.num_patches,)) for patch in patches]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f'Student and teacher see other patches: {sizes[0]} and {sizes[1]}. Give both the same img_size.')
