"""The task in which a student follows the trajectory of its teacher."""
import math
import random
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur
from typing_extensions import Self

from ..convert.block_kinds import find_stages
from ..data.preprocessing import renormalisation
from ..hooks import watch_blocks
from ..ode.blocks import find_ode_blocks, with_steps
from .config import LossConfig
from .losses import TrajectoryPass
from .matching import check_loss, check_models, layer_times


class TrajectoryDistillationTask(TrainingTask):
    """Teach an ODE-ViT to follow the hidden states of a pretrained ViT; a `timm.task.TrainingTask`.

    The student is compared with the frozen teacher's layers at the ends of min(steps, layers) solver steps; in between,
    the teacher's state is interpolated linearly in t. Where the tokens are not one sequence, prefix tokens first (Swin,
    SAM, NaFlexViT, MLP-Mixer), all count alike, the student must have been converted from the teacher, and has no
    JaSMin or exits.

    Args:
        teacher: timm model of the same width and tokens; None with trajectory_weight and kd_weight 0.
        calibration: Images [N, C, H, W], or batches of them, normalised for the student, for checkpoints 'distance'.
        criterion: Loss on the labels; cross-entropy by default.
        device: By default the student's.
        config: Or give any of LossConfig's settings as keywords.

    Raises TypeError or ValueError if the student is not an ODE-ViT, or does not fit its teacher or the loss.

    Examples:
        >>> task = TrajectoryDistillationTask(student, teacher, kd_weight=0.1)
        >>> for images, labels in loader:    # a loop of your own; or fit(task, loader, epochs=10)
        ...     task(images, labels)['loss'].backward()

    Source: ODE-ViT, arXiv 2511.16501; token shares: Raptor, arXiv 2512.19941.
    """

    title = 'trajectory'
    trainable_module: Any

    def __init__(
            self, student: nn.Module, teacher: nn.Module | None, *,
            calibration: Tensor | Iterable[Tensor] | None = None, criterion: nn.Module | None = None,
            device: torch.device | None = None, verbose: bool = True, config: LossConfig | None = None, **settings: Any,
    ) -> None:
        config = LossConfig.from_keywords(config, settings, 'TrajectoryDistillationTask')
        check_models(student, teacher)
        check_loss(student, teacher, config)
        config = replace(config, embedding=config.embedding or getattr(student, 'num_classes', None) == 0)
        getattr(student, 'set_distilled_training', bool)(False)  # which gives two outputs
        odes = find_ode_blocks(student)
        times: list[list[float]] = [[] for _ in odes]
        super().__init__(device=device or next(student.parameters()).device, verbose=verbose)
        self.teacher: Any = teacher
        self.for_teacher: Any = (teacher is not None and renormalisation(student, teacher)) or nn.Identity()
        if teacher is not None:
            batches = calibration.split(64) if isinstance(calibration, Tensor) else calibration or ()
            times = layer_times(student, teacher, config, (
                self.for_teacher(images.to(self.device)) for images in batches))
            teacher.requires_grad_(False).eval()
        self.trainable_module = TrajectoryPass(student, config, times)
        self.config, self.embedding = config, config.embedding
        self.criterion = criterion or nn.CrossEntropyLoss()
        self.counts = [config.counts(ode.steps) for ode in odes]  # shares are those of the present numbers
        self.begin_update(0)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def prepare_distributed(self, device_ids: list[Any] | None = None, **ddp_kwargs: Any) -> Self:
        ddp_kwargs.setdefault('find_unused_parameters', True)  # such as the head, or layers that few steps leave out
        self.trainable_module = nn.parallel.DistributedDataParallel(
            self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        found = super().get_eval_model(module=module, ema=ema)
        inner = unwrap_model(found)
        return inner.student if isinstance(inner, TrajectoryPass) else found

    def begin_update(self, update: int, seed: int = 0) -> None:
        """Set what all processes draw the numbers of steps from: the number of the next update, and the seed."""
        self.update, self.seed = update, seed

    def forward(self, input: Tensor, target: Any) -> dict[str, Tensor]:
        """The loss of images [B, C, H, W] and labels [B] or [B, classes]; None will do with task_weight 0.

        Returns 'loss', 'output' (logits [B, classes] or embeddings [B, E], of the update's first number of steps), and
        the parts before weighting, such as 'trajectory_loss', averaged over the update's numbers of steps.
        """
        student, config = unwrap_model(self.trainable_module).student, self.config
        own = tuple(ode.steps for ode in find_ode_blocks(student))
        self.drawn = [own]
        if self.training and config.steps is not None:  # from the update, so that all processes draw the same
            n = len(config.steps)
            chosen = random.Random(f'{self.seed} {self.update // n}').sample(range(n), n)[self.update % n]
            self.update += 1
            self.drawn = list(zip(*(counts[chosen] for counts in self.counts), strict=True))
        # views have the student's present mode, checkpointing and image size
        views = [student if steps == own else with_steps(student, steps) for steps in self.drawn]
        wanted: Any = None
        seen: Any = [([], [])] * len(self.counts)
        if self.training and config.corrupt:
            input = corrupted(input, config.corrupt)
        with ExitStack() as hooks:
            if self.training and config.patch_drop:  # teacher and student drop the same patches
                patches = math.prod(student.patch_embed.dynamic_feat_size(input.shape[-2:]))
                left = torch.randperm(patches)[:max(1, round((1. - config.patch_drop) * patches))].sort().values
                prefix = student.num_prefix_tokens
                index = torch.cat([torch.arange(prefix), prefix + left]).to(self.device)
                for model in (self.teacher, views[0]):
                    hooks.enter_context(model.patch_drop.register_forward_hook(lambda module, args, x: x[:, index]))
            if self.teacher is not None:
                with torch.no_grad(), watch_blocks([site.blocks for site in find_stages(self.teacher)]) as seen:
                    wanted = self.teacher(self.for_teacher(input).to(next(self.teacher.parameters())))
            return self.trainable_module(views, input, seen, wanted, target, self.criterion)


def corrupted(images: Tensor, share: float) -> Tensor:
    """A share of the batches with a tenth to all of its contrast, noise of up to a deviation, or blur of 2 pixels."""
    kind, amount = int(3 * torch.rand(()) / share), torch.rand(len(images), 1, 1, 1).to(images)
    if kind == 0:
        mean = images.mean((1, 2, 3), keepdim=True)
        return mean + (1 - 0.9 * amount) * (images - mean)
    if kind == 1:
        return images + amount * torch.randn_like(images)
    return gaussian_blur(images, [9, 9], [0.1 + 1.9 * float(torch.rand(()))]) if kind == 2 else images
