"""What a user's type checker sees of the public names: `mypy --strict --follow-imports=silent tests/typed_consumer.py`, not run as a program."""
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import timm_odevit
from timm_odevit import Conversion, Evaluation, OdeConfig, Recipe, TrajectoryDistillationTask

Batches = Iterable[tuple[Tensor, Tensor]]


def convert(model: nn.Module) -> Conversion:
    config: OdeConfig = OdeConfig(field='native', method='lie_trotter', steps=6, phases=3)
    done = timm_odevit.convert_(model, config)
    before: int = done.parameters_before
    after: int = done.parameters_after
    assert after < before
    return done


def smaller(model: nn.Module) -> nn.Module:
    config = timm_odevit.choose_size(model, '25%', OdeConfig(steps=6))
    timm_odevit.convert_(model, config)
    return model


def distil(student: nn.Module, teacher: nn.Module, loader: Batches) -> dict[str, Tensor]:
    task = TrajectoryDistillationTask(student, teacher, task_weight=0.1)
    history: list[dict[str, float]] = timm_odevit.fit(task, loader, loader, epochs=1, out='run')
    assert history
    parts: dict[str, Tensor] = task(torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    return parts


def by_recipe(teacher: nn.Module, data: Path) -> str:
    recipe: Recipe = Recipe.load('three_blocks', ['ode.steps=12'])
    timm_odevit.train(recipe, data, 'run', teacher=teacher)
    return recipe.to_yaml()


def measure(model: nn.Module, loader: Batches) -> tuple[float, str]:
    found: Evaluation = timm_odevit.evaluate(model, loader, steps=(6, 12))
    top1: float = found.results[0].top1
    return top1, found.table()


def share(model: nn.Module) -> str:
    folder: Path = timm_odevit.save_pretrained(model, 'student')
    return timm_odevit.push_to_hub(folder, 'org/name')


def version() -> str:
    return timm_odevit.__version__
