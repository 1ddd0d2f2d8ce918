"""TrajectoryDistillationTask: the student's states follow the teacher's hidden states."""
import math
import random
from contextlib import ExitStack
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from timm.task import DistillationTeacher
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..convert.block_kinds import class_token_comes_later, field_class, prefix_tokens
from ..hooks import hooked
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..recording import watch_blocks
from ..settings import takes
from .config import LossConfig
from .layer_times import hidden_states
from .losses import attention_loss, embedding_loss, jasmin_loss, logit_loss, relation_loss, trajectory_loss
from .runs import Run, runs_of
from .stepwise_task import check_converted_from
from .student_teacher import (
    Renormalised,
    StudentTask,
    TrainingPass,
    check_keeps_patches,
    check_same_tokens,
    check_student,
    has_whole_sequence,
)

__all__ = ['TrajectoryDistillationTask']


class TrajectoryDistillationTask(StudentTask):
    """Teach an ODE-ViT to follow the hidden states of a pretrained ViT; a `timm.task.TrainingTask`.

    The teacher is frozen and stays in eval mode. Its layers lie at checkpoints in time. The student is compared with it
    at the ends of min(steps, layers) solver steps; between two layers, the teacher's state is interpolated
    linearly in t. The loss is the weighted sum of its parts: trajectory, JaSMin, KL divergence of the logits or
    distance of the embeddings, relations between images, cross-entropy, attention, and exits.

    A model with stages (Swin) follows its teacher in each of them. Where the tokens are not one sequence, prefix tokens
    first (Swin, SAM, NaFlexViT, MLP-Mixer), all tokens count alike, the teacher must be the model that the student was
    converted from, and attention, JaSMin, exits and segments are not available.

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
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        self.whole = has_whole_sequence(student)
        self.config = config
        self.weights = config.weights
        odes = find_ode_blocks(student)
        self.steps = config.counts(odes[-1].steps)
        if self.whole:
            self._check(host)
        else:
            self._check_parts(host, odes)
        self._check_segments(host)
        if isinstance(teacher, str):
            teacher = DistillationTeacher(
                teacher, num_classes=host.num_classes, in_chans=host.in_chans, device=device, dtype=dtype).model
        if teacher is None:
            self._check_alone()
        elif self.whole:
            check_same_tokens(student, teacher)
        else:
            check_converted_from(student, teacher)
            check_keeps_patches(student)
        if self.whole:
            tokens = host.patch_embed.num_patches + host.num_prefix_tokens
            if config.jasmin_k > tokens:
                raise ValueError(f'jasmin_k must be at most the number of tokens, {tokens}; got {config.jasmin_k}.')
        self.embedding = config.embedding or host.num_classes == 0
        if host.num_classes == 0 and config.task_weight > 0:
            raise ValueError('task_weight compares classes, but these models have none (num_classes=0). Set it to 0.')
        self.teacher: Any = None
        if teacher is not None:
            self.runs: List[Run] = runs_of(teacher, config, calibration, device)
            if self.whole:
                self._last = self._last_attention(host, teacher)
            # everything fits: only now change the teacher
            self.teacher = DistillationTeacher(teacher, device=device, dtype=dtype)
            self.teacher.requires_grad_(False).eval()
        self.trainable_module: Any = _Unrolled(student, self.whole, config.jasmin_k, config.jasmin_evaluations)
        self.criterion = criterion if criterion is not None else nn.CrossEntropyLoss()
        self.update, self.updates, self.seed, self.drawn = 0, 0, 0, odes[-1].steps
        self.for_teacher: Any = None if teacher is None else Renormalised(student, teacher, device, dtype)

    def _check(self, host: Any) -> None:
        if self.config.exits and (
                class_token_comes_later(host) or not isinstance(getattr(host, 'norm', None), nn.Module)):
            raise ValueError(
                f"exits apply the last norm and the head to states along the way, which a {type(host).__name__}'s do "
                'not fit. Leave exits out.')
        if self.config.attention_weight > 0 and min(self.steps or (host.blocks.steps,)) < 2:
            raise ValueError('attention_weight uses the state before the last step, so it needs at least 2 steps.')

    def _check_parts(self, host: Any, odes: Sequence[OdeBlocks]) -> None:
        name = type(host).__name__
        for setting in ('jasmin_weight', 'attention_weight', 'exit_weight', 'segments'):
            if getattr(self.config, setting):
                raise ValueError(
                    f'{setting} needs one sequence of tokens with the prefix tokens first, but a {name} has none. '
                    'Leave it out.')
        if len(odes) > 1 and any(isinstance(k, int) for k in self.config.steps or ()):
            raise ValueError(
                f'steps={self.config.steps}: a {name} has {len(odes)} stages with step counts of their own. Give '
                'shares of them, such as [0.5, 1.0, 2.0].')
        if any(ode.config.adaptive for ode in odes):
            raise ValueError(
                f"'{odes[0].method}' gives no states to follow in a {name}. Set a fixed-step method first.")

    def _last_attention(self, host: Any, teacher: Any) -> Tuple[int, List[Any]]:
        """The last converted layer, and a field with its attention map."""
        last = host.blocks.config.span(len(teacher.blocks))[1]
        block: Any = teacher.get_submodule(f'blocks.{last}')
        fields = [field_class(block)(block), host.blocks.shared]
        if self.config.attention_weight > 0 and not all(field.has_attention_maps for field in fields):
            raise ValueError(
                f'attention_weight={self.config.attention_weight} compares attention maps, but a '
                f'{type(block).__name__} does not provide them. Set it to 0.')
        return last, fields[:1]  # a list keeps the block from becoming a submodule

    def _check_segments(self, student: Any) -> None:
        if self.config.segments and (getattr(student, 'grad_checkpointing', False) or any(
                step.merging is not None for step in student.blocks.solver)):
            raise ValueError('segments rely on hooks, which gradient checkpointing skips when it reruns the steps, and '
                             "on steps that depend on their state alone, unlike those of merged tokens and 'reversible'"
                             '. Leave one of the two out.')

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
        odes = find_ode_blocks(student)
        counts = self._draw(odes)
        output_t, states_t, last_map = self._teach(input, target)
        labels = getattr(target, 'labels', target)
        with ExitStack() as stack:
            for ode, count in zip(odes, counts, strict=True):
                stack.enter_context(ode.at(count))
            followed = list(zip(self.runs, odes, states_t, strict=True)) if states_t is not None else []
            pairs = [run.pairs(ode) for run, ode, _ in followed]
            targets = [run.target(ode, states, t) for (run, ode, states), times in zip(followed, pairs, strict=True)
                       for t, _ in times]
            stack.enter_context(self._starting_from_teacher(followed))
            self._check_segments(student)
            exits = [len(odes[-1].before) + min(max(round(t * counts[-1]), 1), counts[-1] - 1) - 1
                     for t in self.config.exits] if counts[-1] > 1 else []
            output, states, jasmin, attention, early = self.trainable_module(
                input, [[step for _, step in times] for times in pairs], self.weights['jasmin'] > 0,
                self.weights['attention'] > 0, exits)
        prefix = prefix_tokens(student) if self.whole else 0
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

    def _draw(self, odes: Sequence[OdeBlocks]) -> List[int]:
        """The number of steps of each OdeBlocks in this update; the same in all processes."""
        counts = [ode.steps for ode in odes]
        if self.training and self.config.steps is not None:  # from the update, so that all processes draw the same
            chosen = random.Random(f'{self.seed} {self.update}').randrange(len(self.config.steps))
            self.update += 0 if self.updates else 1
            counts = [(self.config.counts(own) or ())[chosen] for own in counts]
        self.drawn = counts[-1]
        return counts

    @torch.no_grad()
    def _teach(self, input: Tensor, target: Any) -> Tuple[Optional[Tensor], Any, Any]:
        """The teacher's outputs, its states before the first and after each block of each run, its last attention."""
        if self.teacher is None:
            return None, None, None
        if hasattr(target, 'states'):
            output, states = target.output, [target.states]
        else:
            with watch_blocks([run.blocks for run in self.runs]) as seen:
                output = self.teacher.model(self.for_teacher(input))
            states = [each for each, _ in seen]
        if not self.weights['attention'] > 0:
            return output, states, None
        last, fields = self._last
        return output, states, fields[0].attention_map(float(last), states[0][last])

    def _starting_from_teacher(self, followed: Sequence[Any]) -> Any:
        """Make the steps at which segments start in this update start from the teacher's states."""
        share = self.update / self.updates if self.updates and self.training else 1.
        if not self.config.segments or share >= self.config.forced or not followed:
            return hooked()
        segments = self.config.segments[int(share / self.config.forced * len(self.config.segments))]
        run, ode, states = followed[0]

        def start(state: Tensor):
            return lambda _, args: (state.to(args[0].dtype), *args[1:])
        forced = run.forced(ode, states, segments)
        return hooked(*((ode[place], 'before', start(state)) for place, state in forced.items()))

    def _leaves_parameters_unused(self) -> bool:
        odes = find_ode_blocks(unwrap_model(self.trainable_module).student)
        # few steps leave layers unused; no loss on the logits leaves the final norm and the head unused
        return bool(any(ode.shared.depends_on_time or ode.shared.jumps for ode in odes) or not any(
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


class _Unrolled(TrainingPass):
    def __init__(self, student: nn.Module, whole: bool, jasmin_k: int, jasmin_evaluations: int) -> None:
        super().__init__(student)
        self.whole = whole
        self.jasmin_k = jasmin_k
        self.jasmin_evaluations = jasmin_evaluations

    def forward(
            self, images: Tensor, steps: Sequence[Sequence[int]], train_jasmin: bool, want_attention: bool,
            exits: Sequence[int],
    ) -> Tuple[Tensor, List[Tensor], Tensor, Optional[Tensor], List[Tensor]]:
        """Outputs, states after `steps` of each run, JaSMin, the last step's attention map, outputs after `exits`."""
        if self.whole:
            return self._whole(images, steps[0] if steps else (), train_jasmin, want_attention, exits)
        with watch_blocks([list(ode) for ode in find_ode_blocks(self.student)]) as seen:
            output = self.student(images)
        states = [after[step + 1] for (after, _), wanted in zip(seen, steps, strict=False) for step in wanted]
        return output, states, output.new_tensor(math.nan), None, []

    def _whole(
            self, images: Tensor, steps: Sequence[int], train_jasmin: bool, want_attention: bool, exits: Sequence[int],
    ) -> Tuple[Tensor, List[Tensor], Tensor, Optional[Tensor], List[Tensor]]:
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
