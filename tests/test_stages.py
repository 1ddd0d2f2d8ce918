"""Trajectory distillation of models whose tokens are not one sequence: stages, windows, mixers, native sizes."""
import copy

import pytest
import timm
import torch
from test_families import MODELS, SWIN

from timm_odevit import TrajectoryDistillationTask, convert_, fit
from timm_odevit.hooks import watch_blocks

NAMES = ['swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256', 'samvit_base_patch16', 'naflexvit_base_patch16_gap', 'mixer_s32_224']


def build(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**MODELS[name], 'num_classes': 5}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, torch.randn(8, 3, *[MODELS[name].get('img_size', 16)] * 2)


def converted(teacher, **settings):
    method = 'euler' if 'Mixer' in type(teacher).__name__ else 'lie_trotter'
    return convert_(copy.deepcopy(teacher), **{'method': method, **settings}).model


@pytest.fixture(params=NAMES)
def pair(request):
    return build(request.param)


def task_of(student, teacher, **settings):
    return TrajectoryDistillationTask(student, teacher, verbose=False, **settings)


def test_the_model_itself_follows_its_teacher_exactly(pair):
    teacher, images = pair
    phases = len(teacher.blocks) if hasattr(teacher, 'blocks') else 4
    found = task_of(converted(teacher, phases=phases), teacher)(images, None)
    assert found['trajectory_loss'] < 1e-6 and found['kd_loss'] < 1e-6
    found = task_of(converted(teacher), teacher)(images, None)
    assert found['trajectory_loss'] > 0.01 and 'jasmin_loss' not in found


@pytest.mark.parametrize('steps, met', [((2, 4), [0, 1, 2, 3, 4, 5]), ((1, 2), [1, 3, 5])])
def test_the_trajectory_loss_is_the_mean_over_the_states_of_all_stages_where_steps_end(steps, met):
    teacher, images = build('swin_tiny_patch4_window7_224')
    student = converted(teacher, steps=steps)
    task = task_of(student, teacher, kd_weight=0.)

    def states(model):
        with torch.no_grad(), watch_blocks([list(stage.blocks) for stage in model.layers]) as seen:
            model(images)
        return [state for after, _ in seen for state in after[1:]]
    ours, theirs = states(student), [states(teacher)[i] for i in met]
    expected = torch.stack([(a - b).square().mean() / b.var(correction=0) for a, b in zip(ours, theirs, strict=True)]).mean()
    torch.testing.assert_close(task(images, None)['trajectory_loss'].detach(), expected)


def test_it_learns_in_every_stage(pair):
    teacher, images = pair
    student = converted(teacher)
    task = task_of(student, teacher, kd_weight=0.)
    first = task(images, None)
    first['loss'].backward()
    assert all(p.grad.abs().max() > 0 for name, p in student.named_parameters() if '.shared.' in name and 'bias' not in name)
    assert all(p.grad is None for p in teacher.parameters())
    student.zero_grad()
    fit(task, [(images, torch.zeros(8, dtype=torch.long))], epochs=30, opt='adamw', lr=1e-3, weight_decay=0., progress=False)
    assert task(images, None)['trajectory_loss'] < 0.8 * first['trajectory_loss']


def test_shares_of_the_steps_are_drawn_for_every_stage():
    teacher, images = build('swin_tiny_patch4_window7_224')
    student = converted(teacher)
    task = task_of(student, teacher, steps=('50%', '100%', '200%')).train()
    drawn = set()
    for update in range(12):
        task.begin_update(update)
        task(images, None)
        drawn |= {*task.drawn}
    assert drawn == {(1, 2), (2, 4), (4, 8)} and [stage.blocks.steps for stage in student.layers] == [2, 4]


@pytest.mark.parametrize('settings, message', [
    (dict(jasmin_weight=1.), 'jasmin_weight and exits need one sequence of tokens, prefix tokens first, but a Swin'),
    (dict(exits=(0.5,), exit_weight=1.), 'jasmin_weight and exits need one sequence'),
    (dict(steps=(3,)), r'SwinTransformer has 2 stages with step counts of their own. Give shares of them, such as'),
    (dict(checkpoints='distance'), "checkpoints='distance' needs one sequence of blocks"),
])
def test_what_needs_one_sequence_is_refused(settings, message):
    teacher, _ = build('swin_tiny_patch4_window7_224')
    flags = [p.requires_grad for p in teacher.parameters()]
    with pytest.raises(ValueError, match=message):
        task_of(converted(teacher), teacher, **settings)
    assert [p.requires_grad for p in teacher.parameters()] == flags


def test_other_teachers_are_refused():
    teacher, _ = build('swin_tiny_patch4_window7_224')
    other = timm.create_model('swin_tiny_patch4_window7_224', **{**SWIN, 'embed_dim': 16})
    with pytest.raises(ValueError, match='Student and teacher differ in'):
        task_of(converted(teacher), other)


def test_an_adaptive_student_of_any_family_follows_its_teacher():
    mixer, images = build('mixer_s32_224')
    student = converted(mixer, method='dopri5', rtol=0.1, atol=0.1)
    task_of(student, mixer)(images, torch.tensor([0, 1]))['trajectory_loss'].backward()
    assert student.blocks.shared.block.mlp_tokens.fc1.weight.grad.abs().sum() > 0
