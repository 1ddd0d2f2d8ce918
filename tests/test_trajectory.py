import copy
import math
from functools import partial

import pytest
import timm
import torch
from conftest import TINY, pair
from timm.optim import create_optimizer_v2
from timm.task import TrainingTask

from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_, with_steps
from timm_odevit.training import tasks
from timm_odevit.training.config import LossConfig
from timm_odevit.training.losses import jasmin_loss, logit_loss, trajectory_loss
from timm_odevit.training.matching import can_drop_patches, distance_times, match, softmax_times

PARTS = ('trajectory', 'jasmin', 'kd', 'task')


@pytest.fixture
def batch():
    return torch.randn(4, 3, 16, 16), torch.arange(4)


# --- checkpoints

@pytest.mark.parametrize('layers', [1, 2, 3, 12, 64])
@pytest.mark.parametrize('steps', [1, 2, 5, 12, 35, 100])
def test_match_is_strictly_increasing(layers, steps):
    for distances in ([1.] * layers, [100.] + [1e-9] * (layers - 1), list(range(layers))):
        times = softmax_times(distances)
        found = match(times, [(i + 1) / steps for i in range(steps)])
        assert all(a < b for a, b in zip([0., *times], times)) and times[-1] == 1
        assert len(found) == min(layers, steps) and found[0] >= 0 and found[-1] == steps - 1
        assert all(a < b for a, b in zip(found, found[1:]))


def test_distance_times_follow_the_distances(vit, images):
    teacher = vit(init_values=1.)
    with torch.no_grad():
        teacher.blocks[2].ls1.gamma.mul_(50)
        teacher.blocks[2].ls2.gamma.mul_(50)
    times = distance_times(teacher, [images, images])
    assert times[2] - times[1] > times[1] - times[0]
    x = teacher._pos_embed(teacher.patch_embed(images))
    moved = []
    for block in teacher.blocks:
        moved.append((block(x) - x).flatten(1).norm(dim=1).mean().item())
        x = block(x)
    assert times == pytest.approx(softmax_times(moved), rel=1e-4)
    assert not teacher.blocks[0]._forward_pre_hooks
    assert distance_times(vit(depth=1), [images]) == [1.]
    assert softmax_times([3., 3., 3.]) == pytest.approx([1 / 3, 2 / 3, 1.]) and softmax_times([4., 8.]) == softmax_times([1., 2.])
    assert match([1 / 3, 2 / 3, 1.], [(i + 1) / 6 for i in range(6)]) == [1, 3, 5]  # those near the layers
    with pytest.raises(ValueError, match='needs calibration images'):
        distance_times(teacher, [])


# --- losses

def test_jasmin_is_its_formula():
    rows = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2]]])
    largest = 0.5 * (1 - 0.5 + 0.3)  # p_1 (1 - p_1 + p_2) of the first row; 0.24 and 0.4 of the others
    assert jasmin_loss(rows).item() == pytest.approx(math.log(largest), abs=1e-6)
    assert torch.isfinite(jasmin_loss(torch.eye(3)[None]))


def test_trajectory_loss_is_relative_and_weighted():
    t = torch.randn(8, 7, 16) * 5 + 2
    assert trajectory_loss(t, t, 3, True, (1, 1, 1)) == 0
    flat = t.mean().expand_as(t)
    assert trajectory_loss(flat, t, 0, False, (1, 1, 1)).item() == pytest.approx(1, rel=1e-5)
    assert trajectory_loss(10 * flat, 10 * t, 0, False, (1, 1, 1)).item() == pytest.approx(1, rel=1e-5)
    only_cls = t.clone()
    only_cls[:, 0] += 1
    whole = trajectory_loss(only_cls, t, 3, True, (0.45, 0.1, 0.45))
    assert whole == pytest.approx(0.45 * (1 / t[:, :1].var(correction=0)).item(), rel=1e-4)
    assert trajectory_loss(only_cls, t, 3, True, (0, 0.1, 0.45)) == 0
    no_register = trajectory_loss(only_cls, t, 1, True, (0.45, 0.1, 0.45))
    assert no_register == pytest.approx(0.5 * (1 / t[:, :1].var(correction=0)).item(), rel=1e-4)
    with pytest.raises(ValueError, match='Build both with patch_drop_rate=0'):
        trajectory_loss(t[:, :4], t, 0, False, (1, 1, 1))


def test_logit_loss():
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    assert logit_loss(a, a).item() == pytest.approx(0, abs=1e-7)
    expected = (b.softmax(1) * (b.log_softmax(1) - a.log_softmax(1))).sum(1).mean()
    assert logit_loss(a, b).item() == pytest.approx(expected.item(), rel=1e-5)


# --- the task

def test_returns_every_part_and_their_weighted_sum(vit, batch):
    weights = dict(trajectory_weight=0.7, jasmin_weight=0.2, kd_weight=0.5, task_weight=0.3)
    task = TrajectoryDistillationTask(*pair(vit, reg_tokens=2), **weights)
    parts = task(*batch)
    assert isinstance(task, TrainingTask)
    assert set(parts) == {'loss', 'output', *(f'{name}_loss' for name in PARTS)}
    expected = sum(weights[f'{name}_weight'] * parts[f'{name}_loss'] for name in PARTS)
    torch.testing.assert_close(parts['loss'], expected)
    torch.testing.assert_close(parts['output'], task.get_eval_model()(batch[0]))


@pytest.mark.parametrize('only', PARTS)
def test_each_part_alone_trains_and_a_part_of_weight_0_does_not(vit, batch, only):
    weights = {f'{name}_weight': float(name == only) for name in PARTS}
    task = TrajectoryDistillationTask(*pair(vit), **weights)
    parts = task(*batch)
    torch.testing.assert_close(parts['loss'], parts[f'{only}_loss'])
    assert ('jasmin_loss' in parts) == (only == 'jasmin')  # it takes time, and is computed only if it counts
    for name in PARTS:
        assert f'{name}_loss' not in parts or parts[f'{name}_loss'].requires_grad == (name == only)
    parts['loss'].backward()
    assert task.get_eval_model().blocks.shared.block.attn.qkv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize('config', [OdeConfig(), OdeConfig(field='lipschitz', init='spectral')], ids=lambda c: c.field)
def test_jasmin_reaches_q_and_k_and_pulls_itself_down(vit, batch, config):
    student, teacher = pair(vit, config)
    task = TrajectoryDistillationTask(student, teacher, jasmin_weight=1., trajectory_weight=0., kd_weight=0.)
    optimizer = torch.optim.SGD(student.blocks.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        loss = task(*batch)['loss']
        optimizer.zero_grad()
        loss.backward()
        shared = student.blocks.shared
        weight = (shared.block.attn if config.field == 'native' else shared).qkv.weight
        q, key, _ = weight.grad.chunk(3)
        assert q.abs().sum() > 0 and key.abs().sum() > 0
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_teacher_stays_as_it_is(vit, batch):
    student, teacher = pair(vit, drop_path_rate=0.1, drop_rate=0.1)
    before = copy.deepcopy(teacher.state_dict())
    task = TrajectoryDistillationTask(student, teacher, task_weight=1.)
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        task.train()
        assert not any(m.training for m in task.teacher.modules()) and student.training
        optimizer.zero_grad()
        task(*batch)['loss'].backward()
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in teacher.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())


@pytest.mark.parametrize('channels', [1, 3, 4])
def test_the_teacher_sees_images_in_its_own_normalisation(vit, channels):
    student, teacher = pair(vit, in_chans=channels)
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, 'mean': (0.5,) * 3, 'std': (0.25,) * 3}
    mean, std = (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)
    student.pretrained_cfg = {**teacher.pretrained_cfg, 'mean': mean, 'std': std}
    seen, images = [], torch.randn(2, channels, 16, 16)
    teacher.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    TrajectoryDistillationTask(student, teacher, verbose=False)(images, torch.tensor([0, 1]))['loss'].backward()
    assert seen[0].shape == images.shape and not torch.allclose(seen[0], images)
    if channels == 3:
        pixels = images * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
        torch.testing.assert_close(seen[0], (pixels - 0.5) / 0.25)
    TrajectoryDistillationTask(student, teacher, checkpoints='distance', calibration=[images], verbose=False)
    assert torch.equal(seen[1], seen[0])


@pytest.mark.parametrize('change, error, message', [
    (lambda s, t: (t, s), TypeError, 'The student must be an ODE-ViT'),
    (lambda s, t: (torch.compile(s), t), TypeError, 'without OptimizedModule'), (lambda s, t: (s, torch.compile(t)), TypeError, 'without'),
    (lambda s, t: (s, s), ValueError, 'share no parameters'),
    (lambda s, t: (s, setattr(t, 'patch_embed', s.patch_embed) or t), ValueError, 'share no parameters'), (lambda s, t: (s, 'deit_tiny'), TypeError, 'Expected a timm model'),
    (lambda s, t: (s, copy.deepcopy(s)), ValueError, 'as it was before its conversion'),
    *((lambda s, t, other=other: (s, timm.create_model('vit_tiny_patch16_224', **{**TINY, **other})), ValueError, f'differ in {message}')
      for other, message in ((dict(embed_dim=48), 'embed_dim: 32 and 48'), (dict(patch_size=8), 'patch grid'), (dict(reg_tokens=2), 'num_prefix_tokens'), (dict(num_classes=7), 'num_classes'))),
])
def test_refuses_what_does_not_fit(vit, change, error, message):
    with pytest.raises(error) as e:
        TrajectoryDistillationTask(*change(*pair(vit)))
    assert message in str(e.value)


@pytest.mark.parametrize('settings, message', [
    (dict(checkpoints='distance'), 'needs calibration images'),
    (dict(steps=[[]]), 'steps must be a list of whole numbers'), (dict(steps=6), 'steps must be a list of whole numbers'),
    (dict(steps=[10 ** 9]), 'whole numbers from 1 to 10,000'), (dict(steps=['1e308%']), 'steps must be a list'),
    (dict(steps=[6, 3], consistency_weight=0.1), 'needs several numbers of steps in an update'),
    (dict(steps=[[4, 1], [2]], consistency_weight=1, trajectory_weight=0, kd_weight=0), 'All weights of the loss are 0 but'),
])
def test_refuses_settings(vit, settings, message):
    models = pair(vit)
    with pytest.raises(ValueError) as e:
        TrajectoryDistillationTask(*models, **settings)
    assert message in str(e.value) and all(p.requires_grad for p in models[1].parameters())


@pytest.mark.parametrize('build, settings, message', [
    (lambda vit: pair(vit, OdeConfig(phases=2)), dict(steps=['100%', '20%']), 'each of the 2 shared blocks needs a step'),
    (lambda vit: pair(partial(vit, 'vit_relpos_small_patch16_224')), dict(jasmin_weight=0.1), "jasmin_weight needs timm's plain attention"),
    (lambda vit: pair(vit, num_classes=0), dict(task_weight=1.), 'task_weight compares classes'),
    *((lambda vit, of=of: pair(vit, class_token=False, global_pool='avg', reg_tokens=of), dict(patch_weight=0., register_weight=0.), 'patch_weight is 0')
      for of in (0, 4)),
    (lambda vit: pair(vit, OdeConfig(blocks=(0, 1))), dict(exits=(0.5,), exit_weight=1.), 'to earlier states, which does not work'),
    (lambda vit: (pair(vit, OdeConfig(blocks=(1, 2)))[0], vit(depth=2)), {}, 'The teacher has only 2 layers'),
    (pair, dict(task_weight=1., embedding=True), 'task_weight compares classes'), (partial(pair, num_classes=1), {}, 'kd_weight compares classes'),
    (lambda vit: (pair(vit)[0], None), dict(trajectory_weight=0., task_weight=1.), 'kd_weight needs a teacher'),
    (lambda vit: (pair(vit)[0], None), dict(trajectory_weight=0., kd_weight=0., task_weight=1., patch_drop=0.5), 'patch_drop needs a teacher'),
])
def test_refuses_a_loss_that_needs_what_the_models_do_not_have(vit, build, settings, message):
    with pytest.raises(ValueError, match=message):
        TrajectoryDistillationTask(*build(vit), **settings)


def test_the_class_token_is_known_at_any_image_size():
    teacher = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=4,
                                num_classes=5, dynamic_img_size=True).eval()
    student = convert_(copy.deepcopy(teacher), method='euler').model
    weights = 0.45, 0.1, 0.45
    for size in ((16, 16), (12, 20)):  # of both, one has as many tokens as the other has patches
        images = torch.randn(2, 3, *size)
        found = TrajectoryDistillationTask(student, teacher, kd_weight=0., verbose=False)(images, None)['trajectory_loss']
        with torch.no_grad():
            (_, ours), (_, theirs) = (m.forward_intermediates(images, output_fmt='NLC', return_prefix_tokens=True) for m in (student, teacher))
        expected = torch.stack([trajectory_loss(torch.cat([cls, x], 1), torch.cat([cls_t, t], 1), 1, True, weights)
                                for (x, cls), (t, cls_t) in zip(ours, theirs, strict=True)]).mean()
        torch.testing.assert_close(found, expected)


def test_teacher_and_student_see_the_same_share_of_the_patches(vit, batch):
    student, teacher = pair(vit, OdeConfig(phases=3), dynamic_img_size=True)
    task = TrajectoryDistillationTask(student, teacher, patch_drop=0.5, verbose=False).train()
    tokens = []
    student.blocks[0].register_forward_hook(lambda module, args, out: tokens.append(out))
    torch.manual_seed(0)
    assert task(*batch)['loss'].item() < 1e-5  # whatever the patches, it is its teacher
    torch.manual_seed(1)
    task(*batch)
    task(torch.randn(2, 3, 8, 32), torch.tensor([0, 1]))  # of another size
    task.eval()(*batch)
    assert [x.shape[1] for x in tokens] == [9, 9, 9, 17] and not torch.allclose(tokens[0], tokens[1])
    assert not student.patch_drop._forward_hooks and not teacher.patch_drop._forward_hooks


def test_models_with_rope_need_all_patches(vit):
    student, teacher = pair(vit)
    assert can_drop_patches(student, teacher)
    teacher.rope = torch.nn.Identity()
    assert not can_drop_patches(student, teacher)


def test_some_batches_lose_contrast_get_noise_or_are_blurred():
    images, seen = torch.rand(4, 3, 16, 16), []
    centred = images - images.mean((1, 2, 3), keepdim=True)
    torch.manual_seed(0)
    for _ in range(60):
        found = tasks.corrupted(images, share=0.5)
        left = found - found.mean((1, 2, 3), keepdim=True)
        factor = (left * centred).sum((1, 2, 3), keepdim=True) / centred.square().sum((1, 2, 3), keepdim=True)
        scaled = torch.allclose(left, factor * centred, atol=1e-5) and factor.unique().numel() == 4  # a little blur is none
        seen.append('none' if found is images else 'contrast' if scaled else 'noise' if left.std() > centred.std() else 'blur')
        assert seen[-1] != 'contrast' or ((factor > 0.09) & (factor <= 1)).all()
    assert 20 <= seen.count('none') <= 40 and all(seen.count(kind) >= 4 for kind in ('contrast', 'noise', 'blur'))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_teacher_and_student_see_the_same_corrupted_images_in_training_alone(vit, batch, dtype):
    student, teacher = pair(vit, OdeConfig(phases=3))
    task = TrajectoryDistillationTask(student.to(dtype), teacher.to(dtype), corrupt=1., verbose=False).train()
    seen, images = [], batch[0].to(dtype)
    for model in (student, teacher):
        model.patch_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.manual_seed(0)
    task(images, batch[1])
    task.eval()(images, batch[1])
    assert torch.equal(seen[0], seen[1]) and seen[0].dtype == dtype and not torch.equal(seen[0], images)
    assert torch.equal(seen[2], images) and torch.equal(seen[3], images)


def test_steps_may_be_shares_and_are_drawn_by_the_seed(vit, images):
    student, teacher = pair(vit)
    assert LossConfig(steps=['50%', '67%', '100%', '133%', '200%', 5]).counts(12) == ((6,), (8,), (12,), (16,), (24,), (5,))
    assert LossConfig(steps=['10%']).counts(3) == ((1,),) and LossConfig().counts(3) == ((3,),)
    task = TrajectoryDistillationTask(student, teacher, steps=('33.3%', '100%', '200%')).train()

    def drawn(seed):
        found = []
        for update in range(12):
            task.begin_update(update, seed)
            task(images, None)
            found += task.drawn
        return found
    first = drawn(0)
    assert all(set(first[i:i + 3]) == {(1,), (3,), (6,)} for i in range(0, 12, 3))  # each has its turn
    assert first == drawn(0) != drawn(1)
    own = [task.drawn[0] for _ in range(6) if task(images, None)]  # a loop of one's own
    assert set(own[:3]) == set(own[3:]) == set(first)


def test_several_numbers_of_steps_in_one_update(vit, batch):
    """The parts are means over both passes, and the second is drawn to the first, which does not move for it."""
    student, teacher = pair(vit)
    both = TrajectoryDistillationTask(student, teacher, steps=((3, 1),), consistency_weight=0.1, task_weight=0.1).train()
    found = both(*batch)
    assert both.drawn == [(3,), (1,)]
    with torch.no_grad():
        each = [TrajectoryDistillationTask(student, teacher, steps=(k,), task_weight=0.1).train()(*batch) for k in (3, 1)]
    for part in ('trajectory_loss', 'kd_loss', 'task_loss'):
        torch.testing.assert_close(found[part], (each[0][part] + each[1][part]) / 2)
    torch.testing.assert_close(found['output'], each[0]['output'])
    torch.testing.assert_close(found['consistency_loss'], logit_loss(each[1]['output'], each[0]['output']))
    torch.testing.assert_close(found['loss'], (each[0]['loss'] + each[1]['loss']) / 2 + 0.1 * found['consistency_loss'])
    gradient = torch.autograd.grad(found['consistency_loss'], found['output'], allow_unused=True)
    assert gradient == (None,)
    assert 'consistency_loss' not in both.eval()(*batch)


@pytest.mark.parametrize('steps', [(3, 1), (1, 3)])
def test_a_pass_of_one_step_has_no_exits(vit, batch, steps):
    student, teacher = pair(vit)
    task = TrajectoryDistillationTask(student, teacher, steps=(steps,), exits=(0.5,), exit_weight=0.5).train()
    alone = TrajectoryDistillationTask(student, teacher, steps=(3,), exits=(0.5,), exit_weight=0.5).train()
    torch.testing.assert_close(task(*batch)['exit_loss'], alone(*batch)['exit_loss'])


def test_views_follow_the_checkpointing_and_the_image_size_of_the_student(vit, images, monkeypatch):
    views = []
    monkeypatch.setattr(tasks, 'with_steps', lambda *args: views.append(with_steps(*args)) or views[-1])
    student, teacher = pair(vit)
    task = TrajectoryDistillationTask(student, teacher, steps=(2,)).train()
    task(images, None)
    student.set_grad_checkpointing()
    for model in (student, teacher):
        model.set_input_size(img_size=24)
    assert torch.isfinite(task(torch.randn(2, 3, 24, 24), None)['loss'])
    assert views[-1].grad_checkpointing and views[-1].pos_embed is student.pos_embed


def test_layer_decay_reaches_the_student(vit):
    student, teacher = pair(vit)
    optimizer = create_optimizer_v2(TrajectoryDistillationTask(student, teacher).get_trainable_module(), opt='adamw', lr=1., layer_decay=0.5)
    assert len({group['lr_scale'] for group in optimizer.param_groups}) == 3  # the stem, the shared block, the head


def test_the_exit_loss_is_that_of_the_state_at_its_time(vit, batch):
    student, teacher = pair(vit, OdeConfig(steps=6))
    path = student.blocks.trajectory(student._pos_embed(student.patch_embed(batch[0])))
    for exits, after in (((0.5,), (3,)), ((0.01, 0.7), (1, 4))):
        task = TrajectoryDistillationTask(student, teacher, exits=exits, exit_weight=1., kd_weight=0.5)
        wanted = torch.stack([logit_loss(student.blocks.readout(path[i]), teacher(batch[0])) for i in after]).mean()
        torch.testing.assert_close(task(*batch)['exit_loss'], 0.5 * wanted)


def test_kept_blocks_and_a_teacher_in_train_mode_or_in_bfloat16(vit, batch):
    student, teacher = pair(vit, OdeConfig(blocks=(1, 2), phases=2), depth=5)
    assert TrajectoryDistillationTask(student, teacher.train())(*batch)['loss'] < 1e-5 and not teacher.training
    assert TrajectoryDistillationTask(student, teacher.bfloat16())(*batch)['loss'].isfinite()


def test_jasmin_is_of_the_maps_of_both_blocks_at_a_border(vit, batch):
    student, teacher = pair(vit, OdeConfig(phases=3))
    path = student.blocks.trajectory(student._pos_embed(student.patch_embed(batch[0])))
    wanted = torch.stack([jasmin_loss(student.blocks.shared.attention_map(t, path[t])) for t in (1, 2)]).mean()
    found = TrajectoryDistillationTask(student, teacher, jasmin_weight=1.)(*batch)['jasmin_loss']
    torch.testing.assert_close(found, wanted)
