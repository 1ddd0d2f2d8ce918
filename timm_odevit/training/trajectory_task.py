"""TrajectoryDistillationTask: the student's states follow the teacher's hidden states."""
import math
import random
from itertools import pairwise
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from timm.task import DistillationTeacher
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..convert.block_kinds import field_class
from ..hooks import hooked
from ..ode.blocks import OdeBlocks
from ..recording import state_at, watch_blocks
from ..settings import takes
from .config import LossConfig
from .layer_times import distance_times, hidden_states, match, uniform_times
from .losses import attention_loss, embedding_loss, jasmin_loss, logit_loss, relation_loss, trajectory_loss
from .student_teacher import Renormalised, StudentTask, TrainingPass, check_same_tokens, check_student

__all__ = ['TrajectoryDistillationTask', 'has_whole_sequence']


class TrajectoryDistillationTask(StudentTask):
    """Teach an ODE-ViT to follow the hidden states of a pretrained ViT; a `timm.task.TrainingTask`.

    The teacher is frozen and stays in eval mode. Its layers lie at checkpoints in time. The student is compared with it
    at the ends of min(steps, layers) solver steps; between two layers, the teacher's state is interpolated
    linearly in t. The loss is the weighted sum of its parts: trajectory, JaSMin, KL divergence of the logits or
    distance of the embeddings, relations between images, cross-entropy, attention, and exits.

    Args:
        student: ODE-ViT, from `convert_` or `timm.create_model('odevit_...')`.
        teacher: timm model of the same width and tokens, or the name of one; None to train without one, with
            trajectory_weight, kd_weight and attention_weight 0.
        calibration: Batches of images [B, C, H, W], normalised for the teacher, for checkpoints 'distance'.
        criterion: Loss on the labels, (logits, target) to a scalar; cross-entropy by default.
        device: Device of the task; by default the student's.
        dtype: Dtype of the task's buffers.
        verbose: Log timm's messages.
        config: Settings of the loss; or pass any of them as keywords, see LossConfig.

    Raises:
        TypeError: The student is not an ODE-ViT, or a keyword is unknown.
        ValueError: Student and teacher do not match or share parameters, or a setting is out of range.

    Source: ODE-ViT, arXiv 2511.16501; token shares and teacher forcing: Raptor, arXiv 2512.19941.
    """

    title = 'trajectory'

    @takes(LossConfig)
    def __init__(
            self,
            student: nn.Module,
            teacher: Union[str, nn.Module, None],
            *,
            calibration: Optional[Iterable[Tensor]] = None,
            criterion: Optional[nn.Module] = None,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
            verbose: bool = True,
            config: LossConfig,
    ) -> None:
        check_student(student)
        device = device or next(student.parameters()).device
        host: Any = student
        if not has_whole_sequence(student):
            raise TypeError(
                f'A {type(student).__name__} has no sequence of tokens whose states could be followed as a whole. '
                'Train it step by step only: task: stepwise in a recipe, epochs=(8, 0) in calibrate_, or odevit '
                'calibrate --epochs 8,0.')
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        self.config = config
        self.weights = config.weights
        self.steps = config.counts(host.blocks.steps)
        self._check(host)
        self._check_hooks(host)
        if isinstance(teacher, str):
            teacher = DistillationTeacher(
                teacher, num_classes=host.num_classes, in_chans=host.in_chans, device=device, dtype=dtype).model
        if teacher is None:
            self._check_alone()
        else:
            check_same_tokens(student, teacher)
        tokens = host.patch_embed.num_patches + host.num_prefix_tokens
        if config.jasmin_k > tokens:
            raise ValueError(f'jasmin_k must be at most the number of tokens, {tokens}; got {config.jasmin_k}.')
        self.embedding = config.embedding or host.num_classes == 0
        if host.num_classes == 0 and config.task_weight > 0:
            raise ValueError('task_weight compares classes, but these models have none (num_classes=0). Set it to 0.')
        self.teacher: Any = None
        if teacher is not None:
            self.times = _times(teacher, config, calibration, device)
            last = host.blocks.config.span(len(self.times))[1]
            block: Any = teacher.get_submodule(f'blocks.{last}')
            fields = [field_class(block)(block), host.blocks.shared]
            self._last = (last, fields[:1])  # a list keeps the block from becoming a submodule
            if config.attention_weight > 0 and not all(field.has_attention_maps for field in fields):
                raise ValueError(
                    f'attention_weight={config.attention_weight} compares attention maps, but a '
                    f'{type(block).__name__} does not provide them. Set it to 0.')
            # everything fits: only now change the teacher
            self.teacher = DistillationTeacher(teacher, device=device, dtype=dtype)
            self.teacher.requires_grad_(False).eval()
        self.trainable_module: Any = _Unrolled(student, config.jasmin_k, config.jasmin_evaluations)
        self.criterion = criterion if criterion is not None else nn.CrossEntropyLoss()
        self.update, self.updates, self.seed, self.drawn = 0, 0, 0, host.blocks.steps
        self.for_teacher: Any = None if teacher is None else Renormalised(student, teacher, device, dtype)

    def _check(self, host: Any) -> None:
        if self.config.exits and not isinstance(getattr(host, 'norm', None), nn.Module):
            raise ValueError(
                f'exits need a final norm, but a {type(host).__name__} has none called norm. Leave exits out.')
        if self.config.attention_weight > 0 and min(self.steps or (host.blocks.steps,)) < 2:
            raise ValueError('attention_weight uses the state before the last step, so it needs at least 2 steps.')

    def _check_hooks(self, student: Any) -> None:
        if self.config.segments and getattr(student, 'grad_checkpointing', False):
            raise ValueError('segments rely on hooks, which gradient checkpointing skips when it reruns the steps. '
                             'Leave one of the two out.')

    def _check_alone(self) -> None:
        for name in ('trajectory', 'kd', 'relation', 'attention'):
            if self.weights[name] > 0:
                raise ValueError(f'{name}_weight needs a teacher. Give one, or set {name}_weight=0.')
        if self.config.segments:
            raise ValueError('segments start from the states of a teacher. Give one, or leave segments out.')

    def begin_update(self, update: int, updates: int, seed: int = 0) -> None:
        """Set the next update, counted from 0, and how many there will be: they determine steps and segments.

        Without this call, each training forward pass draws one of `steps`, and there are no segments. The seed, from
        which numbers of steps are drawn, must be the same in all processes.
        """
        self.update, self.updates, self.seed = update, updates, seed

    def forward(self, input: Tensor, target: Any) -> Dict[str, Tensor]:
        """Compute the loss of one batch.

        Args:
            input: Images [B, C, H, W], normalised for the student.
            target: Labels [B], or class probabilities [B, classes]; may be None with task_weight 0. Or a Recorded batch
                with the teacher's states; then the teacher is not run.

        Returns:
            'loss', 'output' (the student's logits [B, classes] or embeddings [B, E]), and the parts before weighting:
            'trajectory_loss', 'jasmin_loss', 'kd_loss', 'task_loss', and, if they have a weight, 'relation_loss',
            'attention_loss' and 'exit_loss'. Parts of weight 0 are computed for the record only, without a gradient.
        """
        student = unwrap_model(self.trainable_module).student
        count = student.blocks.steps
        if self.training and self.steps is not None:  # from the update, so that all processes draw the same
            count = random.Random(f'{self.seed} {self.update}').choice(self.steps)
            self.update += 0 if self.updates else 1
        self.drawn = count
        output_t, states_t, last_map = self._teach(input, target)
        labels = getattr(target, 'labels', target)
        with student.blocks.at(count):
            first = len(student.blocks.before)
            pairs = self._pairs(student) if states_t is not None else []
            forced = self._forced(student, states_t) if states_t is not None else {}
            self._check_hooks(student)
            places = [min(max(round(t * count), 1), count - 1) for t in self.config.exits] if count > 1 else []
            exits = [first + place - 1 for place in places]
            with _starting_from(student, forced):
                output, states, jasmin, attention, early = self.trainable_module(
                    input, [step for _, step in pairs], self.weights['jasmin'] > 0, self.weights['attention'] > 0,
                    exits)
        prefix, targets = 0, []
        if states:
            start, run = self._run(student)
            targets = [state_at(states_t[start:], [0., *run], t) for t, _ in pairs]
            bare = states[0].shape[1] == student.patch_embed.num_patches  # the class token comes later, as in CaiT
            prefix = 0 if bare else student.num_prefix_tokens
        has_cls = prefix > 0 and getattr(student, 'cls_token', None) is not None
        nothing = output.new_tensor(math.nan)

        def logits(of: Tensor) -> Dict[str, Any]:
            def followed() -> Tensor:
                if output_t is None:
                    return nothing
                if self.embedding:
                    return embedding_loss(of, output_t)
                return logit_loss(of, output_t, self.config.kd_temperature)
            classes = labels is not None and not self.embedding
            return {'kd': followed, 'task': lambda: self.criterion(of, labels) if classes else nothing}

        def exit_loss() -> Tensor:
            parts = [self.weights[k] * part() for of in early for k, part in logits(of).items() if self.weights[k] > 0]
            return sum(parts, output.new_zeros(())) / max(len(early), 1)
        parts = {
            'trajectory': lambda: torch.stack([
                trajectory_loss(s, t, prefix, has_cls, self.config.token_weights)
                for s, t in zip(states, targets, strict=True)]).mean() if states else nothing,
            **logits(output),
        }
        if self.weights['relation'] > 0:
            parts['relation'] = lambda: relation_loss(output, output_t) if output_t is not None else nothing
        if self.weights['attention'] > 0:
            parts['attention'] = lambda: attention_loss(attention, last_map)
        if self.config.exits:
            parts['exit'] = exit_loss
        found = {'jasmin': jasmin}
        for name, part in parts.items():
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.weights[name] > 0):
                found[name] = part()
        loss = sum((self.weights[name] * value for name, value in found.items() if self.weights[name] > 0),
                   output.new_zeros(()))
        return {'loss': loss, 'output': output,
                **{f'{name}_loss': found[name] for name in self.weights if name in found}}

    @torch.no_grad()
    def _teach(self, input: Tensor, target: Any) -> Tuple[Optional[Tensor], Any, Any]:
        """The teacher's logits, its states from the embedded tokens to the last layer's, and its last attention map."""
        if self.teacher is None:
            return None, None, None
        if hasattr(target, 'states'):
            output, states = target.output, target.states
        else:
            teacher: Any = self.teacher.model
            with watch_blocks([list(teacher.blocks)]) as seen:
                output = teacher(self.for_teacher(input))
            states = seen[0][0]
        last, fields = self._last
        wanted = self.weights['attention'] > 0
        return output, states, fields[0].attention_map(float(last), states[last]) if wanted else None

    def _run(self, student: Any) -> Tuple[int, List[float]]:
        """The first converted layer, and the times of the converted layers, relative to their run."""
        first, last = student.blocks.config.span(len(self.times))
        start = self.times[first - 1] if first else 0.
        return first, [(time - start) / (self.times[last] - start) for time in self.times[first:last + 1]]

    def _pairs(self, student: Any) -> List[Tuple[float, int]]:
        """Relative times at which the student is compared, and the indices in its blocks of the steps ending there."""
        first, run = self._run(student)
        count = student.blocks.steps
        return [((step + 1) / count, first + step) for _, step in match(run, count)]

    def _forced(self, student: Any, states: Sequence[Tensor]) -> Dict[int, Tensor]:
        """The teacher's states from which steps start in this update, by the index of the step in the blocks."""
        share = self.update / self.updates if self.updates and self.training else 1.
        if not self.config.segments or share >= self.config.forced:
            return {}
        count = student.blocks.steps
        segments = min(self.config.segments[int(share / self.config.forced * len(self.config.segments))], count)
        first, run = self._run(student)
        places = [round(i * count / segments) for i in range(1, segments)]
        return {first + place: state_at(states[first:], [0., *run], place / count) for place in places}

    def _leaves_parameters_unused(self) -> bool:
        shared = unwrap_model(self.trainable_module).student.blocks.shared
        # few steps leave layers unused; no loss on the logits leaves the final norm and the head unused
        return bool(shared.depends_on_time or shared.jumps or not any(
            self.weights[name] for name in ('kd', 'relation', 'task')))

    def compile(self, backend: str = 'inductor', mode: Optional[str] = None, **compile_kwargs: Any) -> Any:
        """Compile the student's training pass and its evaluation; returns the eval model. The teacher is not compiled.

        Raises:
            ValueError: The task has segments, whose hooks a compiled model would skip.
        """
        if self.config.segments:
            raise ValueError(
                "segments insert the teacher's states by hooks, which a compiled model skips. Use one of the two.")
        options = dict(backend=backend, mode=mode, **compile_kwargs)
        self.eval_model = torch.compile(unwrap_model(self.trainable_module).student, **options)
        self.trainable_module = torch.compile(self.trainable_module, **options)
        return self.eval_model


def has_whole_sequence(student: Any) -> bool:
    """Whether the states of an ODE-ViT can be followed as a whole, from the embedded tokens to the last step."""
    tokens = all(hasattr(student, name) for name in ('patch_embed', 'num_prefix_tokens'))
    return isinstance(getattr(student, 'blocks', None), OdeBlocks) and tokens


class _Unrolled(TrainingPass):
    def __init__(self, student: nn.Module, jasmin_k: int, jasmin_evaluations: int) -> None:
        super().__init__(student)
        self.jasmin_k = jasmin_k
        self.jasmin_evaluations = jasmin_evaluations

    def forward(
            self, images: Tensor, steps: Sequence[int], train_jasmin: bool, want_attention: bool, exits: Sequence[int],
    ) -> Tuple[Tensor, List[Tensor], Tensor, Optional[Tensor], List[Tensor]]:
        """Logits, states after `steps`, JaSMin, the last step's attention map, and the logits after `exits`."""
        blocks: Any = self.student.blocks
        first = len(blocks.before)
        before_last = first + max(blocks.steps - 2, 0)  # no step starts from the last state; used if the only one
        count = min(self.jasmin_evaluations, before_last - first + 1)
        spread = torch.linspace(first, before_last, count).round().int().tolist()
        wanted = sorted({*steps, *spread, *exits, *([before_last] if want_attention else [])})
        features, states = hidden_states(self.student, images, wanted)
        by_step = dict(zip(wanted, states, strict=True))
        jasmin, attention = features.new_tensor(math.nan), None
        if train_jasmin or blocks.shared.has_attention_maps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and train_jasmin):
                maps = [blocks.shared.attention_map(blocks[i].t + blocks[i].h, by_step[i]) for i in spread]
                jasmin = torch.stack([jasmin_loss(m, self.jasmin_k) for m in maps]).mean()
        if want_attention:
            last = blocks[before_last + 1]
            attention = blocks.shared.attention_map(last.t, by_step[before_last])
        early = [self.student.forward_head(self.student.norm(by_step[i])) for i in exits]
        return self.student.forward_head(features), [by_step[i] for i in steps], jasmin, attention, early


def _starting_from(student: Any, forced: Dict[int, Tensor]) -> Any:
    """Make steps, by their index in the blocks, start from given states."""
    def start(state: Tensor):
        return lambda _, args: (state.to(args[0].dtype), *args[1:])
    return hooked(*((student.blocks[place], 'before', start(state)) for place, state in forced.items()))


def _times(teacher: Any, config: LossConfig, calibration: Any, device: torch.device) -> List[float]:
    layers = len(teacher.blocks)
    if config.checkpoints == 'uniform':
        return uniform_times(layers)
    if config.checkpoints == 'distance':
        batches = (images.to(device) for images in calibration or ())
        return distance_times(teacher, batches, config.checkpoint_temperature)
    times: List[float] = list(config.checkpoints)  # type: ignore[arg-type]
    increasing = all(a < b for a, b in pairwise([0., *times]))
    if len(times) != layers or not increasing or times[-1] > 1.:
        raise ValueError(
            f'checkpoints must be {layers} strictly increasing times in (0, 1], one for each layer of the teacher; '
            f'got {times}.')
    return times
