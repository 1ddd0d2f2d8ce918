import copy
import itertools
import json
import math
import multiprocessing
import random
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from conftest import pair
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2, muon
from timm.task import ClassificationTask, FeatureDistillationTask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import FitConfig, Recipe, TrajectoryDistillationTask, calibrate_, fit, train
from timm_odevit.files import locked
from timm_odevit.training.fit import _seconds_per_update, updates_in
from timm_odevit.training.loop import Trainer, create_optimizer, score_of, validate

X, Y = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
GOOD = [(X[:8], Y[:8])] * 2


def loaders():
    return DataLoader(TensorDataset(X[:32], Y[:32]), 8, shuffle=True), DataLoader(TensorDataset(X[32:], Y[32:]), 8)


def build(vit):
    torch.manual_seed(0)
    return TrajectoryDistillationTask(*pair(vit, drop_path_rate=0.1), task_weight=1.)


def run(task, out=None, epochs=3, **kwargs):
    return fit(task, *loaders(), epochs=epochs, out=out, progress=False, lr=3e-3, **kwargs)


def strip(history):
    return [{k: v for k, v in r.items() if k != 'seconds'} for r in history]


def test_trains_and_keeps_last_best_and_history(vit, tmp_path):
    history = run(build(vit), tmp_path / 'run', epochs=6, ema_decay=0.5, warmup_epochs=1)
    assert [r['epoch'] for r in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1]['loss'] < history[0]['loss'] and history[-1]['lr'] < history[1]['lr']
    assert {'trajectory_loss', 'kd_loss', 'task_loss', 'val_top1', 'val_loss', 'seconds'} <= set(history[0])
    assert (history[0]['updates'], history[0]['amp']) == (len(loaders()[0]), None)
    without = TrajectoryDistillationTask(*pair(vit))  # labels that no part needs may be those of other classes
    assert 'task_loss' not in fit(without, [(images, labels + 500) for images, labels in loaders()[0]], epochs=1, progress=False)[0]
    assert not any(module.training for module in without.get_eval_model().modules())  # as before
    assert json.loads((tmp_path / 'run' / 'history.json').read_text()) == history
    assert {p.name for p in (tmp_path / 'run').iterdir()} == {'best', 'history.json', 'last.pt'}
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True).eval()
    loss = torch.nn.functional.cross_entropy(best(X[32:]), Y[32:]).item()
    assert loss == pytest.approx(min(r['val_loss'] for r in history))


def test_the_loss_chooses_under_a_teacher_and_top1_without(vit):
    for task, best in ((build(vit), 1), (ClassificationTask(vit(), None), 0)):
        found = validate(task, vit(), loaders()[1], None)
        scores = [score_of({**found, 'val_top1': top1, 'val_loss': loss}) for top1, loss in ((90., 0.3), (80., 0.2))]
        assert scores.index(max(scores)) == best
    assert {score_of({'val_loss': loss, 'val_top1': 1.}) for loss in (math.nan, None)} == {-math.inf}


def test_the_last_of_equal_epochs_is_the_best(vit, tmp_path):
    fit(task := build(vit), *loaders(), epochs=3, out=tmp_path, progress=False, lr=1e-6)
    best = timm.create_model(f"local-dir:{tmp_path / 'best'}", pretrained=True)
    assert all(map(torch.equal, best.parameters(), task.get_eval_model().parameters()))


def test_step_is_a_constant_rate(vit):
    history = fit(build(vit), GOOD[:1], epochs=92, sched='step', progress=False)  # timm's own falls after 90
    assert {record['lr'] for record in history} == {history[0]['lr']}


def test_a_part_of_the_loss_is_averaged_over_the_updates_that_have_it(vit):
    class Sometimes(ClassificationTask):
        calls = 0
        def forward(self, input, target):
            self.calls += 1
            part = {'part_loss': torch.tensor(3.)} if self.calls % 2 else {}
            return {**super().forward(input, target), **part}
    history = run(Sometimes(vit(), verbose=False), epochs=1)
    assert history[0]['part_loss'] == 3.


@pytest.mark.parametrize('amp', ['bfloat16', None])
def test_attention_is_not_fused_while_it_trains_in_bfloat16_on_a_cpu(vit, amp):
    task, seen = build(vit), []
    layers = [module for module in task.modules() if hasattr(module, 'fused_attn')]
    layers[0].fused_attn = False  # a block of the teacher, as someone has set it
    before = [module.fused_attn for module in layers]
    shared = task.trainable_module.student.blocks.shared.block.attn
    shared.register_forward_hook(lambda module, args, out: out.requires_grad and seen.append(module.fused_attn))
    run(task, epochs=1, amp=amp)
    assert any(before) and seen and set(seen) == {amp is None}
    assert [module.fused_attn for module in layers] == before


@pytest.mark.parametrize('settings', [dict(), dict(ema_decay=0.9, opt='muon'), dict(amp='bfloat16', opt='sgd')])
def test_resume_gives_the_weights_of_an_undisturbed_run(vit, tmp_path, monkeypatch, settings):
    expected, save = run(whole := build(vit), **settings), torch.save
    def save_twice_then_stop(state, file):
        if len(state['history']) == 3:
            raise KeyboardInterrupt
        save(state, file)
    monkeypatch.setattr(torch, 'save', save_twice_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run(build(vit), tmp_path / 'run', **settings)
    monkeypatch.undo()
    history = run(resumed := build(vit), tmp_path / 'run', resume=True, **settings)
    for ema in (False, True):
        if whole.has_ema() >= ema:
            ours, theirs = resumed.get_eval_model(ema=ema).state_dict(), whole.get_eval_model(ema=ema).state_dict()
            assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert strip(history) == strip(expected)


def test_muon_multiplies_in_float32_on_a_cpu_and_timms_own_stays_as_it_is(monkeypatch):
    models, before = [nn.Linear(8, 8)], muon.zeropower_via_newtonschulz
    models.append(copy.deepcopy(models[0]))
    ours = create_optimizer(models[0], FitConfig(epochs=1, opt='muon', lr=0.1, weight_decay=0.))
    theirs = create_optimizer_v2(models[1], opt='muon', lr=0.1, weight_decay=0.)
    for model in models:
        model.weight.grad = torch.arange(64.).reshape(8, 8).sin()
    ours.step()
    assert muon.zeropower_via_newtonschulz is before
    monkeypatch.setattr(muon, 'zeropower_via_newtonschulz', partial(before, dtype=torch.float32))
    theirs.step()
    assert torch.equal(models[0].weight, models[1].weight)


# --- minutes

@pytest.mark.parametrize('seconds, update, validation, most, epochs', [
    (60., 2., 0., 9, (10, 3)), (60., 2., 1., 9, (10, 2)), (60., 2., 2., 9, (6, 4)), (60., 1., 30., 99, (1, 30)), (60., 7., 0., 9, (8, 1)), (-1., 1., 0., 9, (1, 1)),
    (600., 1., 0., 4, (150, 4)), (600., 1., 1., 4, (120, 4)), (3600., 1., 100., 20, (7, 400)), (172800., 1., 0., 10008, (48, 3600))])
def test_minutes_are_ten_epochs_or_more_of_a_pass_or_an_hour_or_fewer_where_validation_would_take_more_than_a_fifth(seconds, update, validation, most, epochs):
    assert updates_in(seconds, update, validation, most) == epochs


def test_what_a_task_learns_beside_its_model_is_resumed(vit, tmp_path):
    def task():
        torch.manual_seed(0)
        return FeatureDistillationTask(vit(), vit(embed_dim=64), verbose=False)  # with a projection
    whole = run(task(), epochs=2, sched='step')
    run(task(), tmp_path / 'run', epochs=1, sched='step')
    torch.nn.init.zeros_((again := task()).trainable_module.projection.weight)
    assert strip(run(again, tmp_path / 'run', epochs=2, sched='step', resume=True)) == strip(whole)


def test_a_run_of_some_minutes_is_resumed_as_it_was_planned(vit, tmp_path, monkeypatch):
    """Bit for bit, with the epochs and the precision that were measured first, whatever the machine does then."""
    settings = dict(minutes=0.05, amp='auto', lr=3e-3, progress=False)
    clock = SimpleNamespace(perf_counter=partial(next, itertools.count(0., 0.125)))  # an eighth of a second between two looks
    monkeypatch.setattr('timm_odevit.training.fit.time', clock)
    monkeypatch.setattr('timm_odevit.training.fit.LONG', 0.)
    monkeypatch.setattr('timm_odevit.training.fit.try_one_batch', lambda *args: 0.)  # seconds of validation, long on a busy machine
    task = build(vit)
    expected = fit(task, *loaders(), out=tmp_path / 'whole', **settings)
    plan = torch.load(tmp_path / 'whole' / 'last.pt', weights_only=True)['plan']
    assert len(expected) == plan['epochs'] >= 10 and 1 <= plan['updates'] <= 4
    again, epoch, seen = build(vit), Trainer.epoch, []
    def stop(trainer, *args):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return epoch(trainer, *args)
    monkeypatch.setattr(Trainer, 'epoch', stop)
    with pytest.raises(KeyboardInterrupt):
        fit(again, *loaders(), out=tmp_path / 'run', **settings)
    monkeypatch.undo()  # and so is the clock
    history = fit(resumed := build(vit), *loaders(), out=tmp_path / 'run', resume=True, **settings)
    assert strip(history) == strip(expected)
    ours, theirs = (of.get_eval_model().state_dict() for of in (resumed, task))
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    with pytest.raises(ValueError, match='made with minutes 0.05, but this run has 0.06'):
        fit(build(vit), *loaders(), out=tmp_path / 'run', resume=True, **{**settings, 'minutes': 0.06})


def test_the_measurement_changes_nothing(vit):
    student, teacher = pair(vit)
    task = TrajectoryDistillationTask(student, teacher, steps=(1, 2, 3), verbose=False)
    before = copy.deepcopy(task.state_dict())
    seconds = _seconds_per_update(task, loaders()[0], FitConfig(minutes=1.))
    assert seconds > 0 and all(torch.equal(value, before[key]) for key, value in task.state_dict().items())
    assert task.teacher is teacher and not any(module._forward_hooks for module in teacher.modules())


def test_images_that_are_not_finite_are_named_and_a_model_is_no_task(vit):
    task = ClassificationTask(model := vit(), nn.CrossEntropyLoss(), verbose=False)
    with pytest.raises(FloatingPointError, match='epoch 1, batch 2 .*images of the batch are not finite'):
        fit(task, [(X[:4], Y[:4]), (X[:4] / 0, Y[:4])], epochs=1, progress=False)
    with pytest.raises(TypeError, match='fit trains a task; got a VisionTransformer'):
        fit(model, [(X[:4], Y[:4])], epochs=1)


def test_a_loss_that_is_not_finite_or_a_full_disk_stops_the_run_and_keeps_the_last_good_state(vit, tmp_path, monkeypatch):
    task, load = build(vit), torch.load
    run(task, tmp_path / 'run', epochs=1)
    before = (tmp_path / 'run' / 'last.pt').read_bytes()
    bad = {name: value / 0 for name, value in task.get_eval_model().state_dict().items()}
    monkeypatch.setattr(torch, 'load', lambda *args, **kwargs: {**load(*args, **kwargs), 'model': bad})
    with pytest.raises(FloatingPointError, match=r'not finite in epoch 2, batch 1 \(loss nan'):
        run(task, tmp_path / 'run', epochs=2, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr('timm_odevit.training.fit.open', lambda *args: open('/dev/full', 'wb'), raising=False)
    with pytest.raises(OSError, match="last.pt' could not be written: .*No space left on device"):
        run(build(vit), tmp_path / 'run', epochs=2, resume=True)
    assert (tmp_path / 'run' / 'last.pt').read_bytes() == before


def test_refuses(vit, tmp_path):
    task = build(vit)
    with pytest.raises(ValueError, match='train_loader is empty'):
        fit(task, [], epochs=1)
    nameless = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=1, num_classes=5)
    with pytest.raises(ValueError, match='was not made by timm.create_model'):
        run(ClassificationTask(nameless, nn.CrossEntropyLoss()), tmp_path / 'nameless')
    assert not (tmp_path / 'nameless').exists()
    run(task, tmp_path / 'run', epochs=1)
    with pytest.raises(ValueError, match='made with opt muon, but this run has sgd'):
        run(task, tmp_path / 'run', epochs=2, resume=True, opt='sgd')
    other = vit(mlp_ratio=2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match='made with tensor blocks.shared.block.norm1.weight'):
        run(ClassificationTask(other, nn.CrossEntropyLoss()), tmp_path / 'run', epochs=2, resume=True)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    part = build(vit).get_eval_model()
    part.patch_embed.requires_grad_(False)
    before = copy.deepcopy(part.state_dict())
    with pytest.raises(ValueError, match='parameter group'):
        run(TrajectoryDistillationTask(part, vit(), task_weight=1.), tmp_path / 'run', epochs=2, resume=True)
    assert all(torch.equal(value, before[key]) for key, value in part.state_dict().items())
    with pytest.raises(ValueError, match='already holds a run. Pass resume=True'):
        run(task, tmp_path / 'run', epochs=1)
    (tmp_path / 'run' / 'recipe.yaml').touch()  # of `odevit distill`, whose stages have last.pt
    with pytest.raises(ValueError, match='holds the run of a recipe. Resume it with train'):
        run(task, tmp_path / 'run', epochs=2, resume=True)
    (tmp_path / 'run' / 'recipe.yaml').unlink()
    (tmp_path / 'run' / 'last.pt').write_bytes(b'cut off')
    with pytest.raises(ValueError, match='or truncated. Delete it to start again'):
        run(build(vit), tmp_path / 'run', epochs=2, resume=True)


# --- what is tried before anything is trained

class Counting(torch.utils.data.Dataset):
    """Images that are different each time they are read."""

    def __init__(self, start, stop):
        self.range, self.reads = range(start, stop), 0

    def __len__(self):
        return len(self.range)

    def __getitem__(self, i):
        self.reads += 1
        return X[self.range[i]] + 0.1 * torch.randn(1) + 0.1 * float(np.random.randn()) + 0.1 * random.random(), Y[self.range[i]]


def seeded(start, stop):
    return DataLoader(Counting(start, stop), 8, shuffle=True)


def test_trying_a_batch_changes_no_result(vit, monkeypatch):
    found = []
    for look in (True, False):
        with monkeypatch.context() as patch:
            if not look:
                patch.setattr('timm_odevit.training.fit.try_one_batch', lambda *args: 0.)
            task, val = build(vit), seeded(32, 40)
            history = fit(task, seeded(0, 32), val, epochs=2, lr=3e-3, progress=False)
            found.append((strip(history), task.get_eval_model().state_dict()))
            assert val.dataset.reads == 16 + 8 * look
    assert found[0][0] == found[1][0] and all(torch.equal(a, b) for a, b in zip(found[0][1].values(), found[1][1].values()))


@pytest.mark.parametrize('which', ['train_loader', 'val_loader'])
@pytest.mark.parametrize('batch, message', [
    ((X[:8], Y[:8] + 1), r'Labels must be whole numbers from 0 to 4'),
    ((X[:8], Y[:8] - 1), r'got torch.int64 from -1'),
    ((X[:8, :, :12], Y[:8]), r'torch.float32 \[8, 3, 12, 16\], torch.int64 \[8\], is not .* that fit the model: AssertionError'),
    ((X[:8, :1], Y[:8]), r'\[8, 1, 16, 16\].*: RuntimeError'),
    ((X[:8].byte(), Y[:8]), r': images must be a floating-point tensor .*got torch.uint8 \[8, 3, 16, 16\]'),
    ((X[:8] / 0, Y[:8]), r': images must be finite'),
    ((X[:8], Y[:4]), r'torch.int64 \[4\], is not'),
    (X[:8], r'is not \(images, labels\)'), ((X[:8], Y[:8], Y[:8]), r'is not \(images, labels\)'),
])
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(vit, tmp_path, which, batch, message):
    task = build(vit)
    model = task.get_eval_model()
    model.norm = nn.Sequential(model.norm, nn.BatchNorm1d(17))  # changes its buffers in training mode
    task.eval()
    before = copy.deepcopy(task.state_dict())
    bad = {'train_loader': GOOD, 'val_loader': GOOD, which: [batch] * 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('timm_odevit.training.fit.describe', lambda model: None)
        with pytest.raises(ValueError, match=f'{which}.*{message}'):
            fit(task, **bad, epochs=2, out=tmp_path / 'run', progress=False)
    after = task.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before) and not any(m.training for m in task.modules())
    assert not (tmp_path / 'run').exists()


def test_loaders_that_are_empty_short_or_read_once_are_refused(vit):
    class Short(list):
        __len__ = staticmethod(lambda: 3)
    with pytest.raises(ValueError, match='val_loader is empty'):
        fit(build(vit), GOOD, [], epochs=1, progress=False)
    with pytest.raises(ValueError, match='val_loader is a generator, which gives its batches only once'):
        fit(build(vit), GOOD, (batch for batch in GOOD), epochs=1, progress=False)
    with pytest.raises(ValueError, match='train_loader is a generator'):
        fit(build(vit), (batch for batch in GOOD), epochs=1, progress=False)
    with pytest.raises(ValueError, match='No parameter may learn'):
        fit(build(vit).requires_grad_(False), GOOD, epochs=1, progress=False)
    with pytest.raises(ValueError, match='train_loader gave 2 batches in epoch 1, but its length is 3'):
        fit(build(vit), Short(GOOD), epochs=1, progress=False)


# --- a second fit, and other sizes

def test_each_fit_has_the_moving_average_that_it_asks_for(vit, tmp_path):
    task = build(vit)
    run(task, epochs=1, ema_decay=0.5)
    first = task.get_eval_model(ema=True)
    run(task, tmp_path / 'a', epochs=1, ema_decay=0.9)
    assert task.trainable_module_ema.decay == 0.9 and task.get_eval_model(ema=True) is not first
    run(task, tmp_path / 'b', epochs=1)
    assert not task.has_ema()
    best = timm.create_model(f"local-dir:{tmp_path / 'b' / 'best'}", pretrained=True)
    assert all(torch.equal(v, best.state_dict()[k]) for k, v in task.get_eval_model().state_dict().items())
    assert 'ema' not in torch.load(tmp_path / 'b' / 'last.pt', weights_only=True)


def test_another_size_of_the_batches_is_not_a_resumption(vit, tmp_path):
    run(build(vit), tmp_path / 'run', epochs=1)
    for images, size, message in ((32, 4, 'batch_size 8, but this run has 4'), (24, 8, 'updates_per_epoch 4, but this run has 3')):
        with pytest.raises(ValueError, match=f'made with {message}'):
            fit(build(vit), DataLoader(TensorDataset(X[:images], Y[:images]), size), loaders()[1], epochs=2, lr=3e-3,
                out=tmp_path / 'run', resume=True, progress=False)


# --- one run at a time

def test_a_folder_in_use_is_refused_at_once_and_a_killed_run_does_not_block(vit, tmp_path):
    fork = multiprocessing.get_context('fork')
    holding = fork.Event()
    def hold():
        with locked(tmp_path / 'run'):
            holding.set()
            time.sleep(1000)
    other = fork.Process(target=hold)
    other.start()
    try:
        assert holding.wait(60)
        for resume in (False, True):
            started = time.perf_counter()
            with pytest.raises(OSError, match=r"run' is in use by another process. Wait until it is done, or give another folder\.$"):
                run(build(vit), tmp_path / 'run', resume=resume)
            assert time.perf_counter() - started < 2
    finally:
        other.kill()
        other.join()
    run(build(vit), tmp_path / 'run', epochs=1)
    assert {p.name for p in (tmp_path / 'run').iterdir()} == {'best', 'history.json', 'last.pt'}


def test_the_random_state_of_the_process_is_left_alone(vit, tmp_path):
    def random_states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    student, teacher = pair(vit)
    states = random_states()
    run(TrajectoryDistillationTask(student, teacher), epochs=1, seed=7)
    calibrate_(student, teacher, X[:4], epochs=1, progress=False)
    recipe = Recipe.load('autonomous', ['stages=[{fit: {epochs: 1}}]', 'data.batch_size=4', 'fit.opt=adamw'])
    assert random_states() == states
    data = tmp_path / 'data.npz'
    images, labels = np.zeros((16, 16, 16, 3), np.uint8), np.arange(16) % 5
    np.savez(data, x_train=images, y_train=labels, x_test=images, y_test=labels)
    train(recipe, data, tmp_path / 'run', teacher=teacher, progress=False)
    assert random_states() == states


def test_a_seed_gives_the_same_losses_and_another_others(vit):
    first, same, other = (run(build(vit), epochs=1, seed=seed)[0]['loss'] for seed in (0, 0, 1))
    assert first == same != other


def test_gradients_are_clipped(vit):
    task = build(vit)
    before = copy.deepcopy(task.get_eval_model().state_dict())
    fit(task, GOOD, epochs=1, opt='sgd', lr=1., weight_decay=0., clip_grad=1e-9, progress=False)
    assert all((tensor - before[name]).abs().max() < 1e-6 for name, tensor in task.get_eval_model().state_dict().items())


def test_the_rate_warms_up(vit):
    a, b, c, d = (r['lr'] for r in fit(build(vit), GOOD, epochs=4, warmup_epochs=2, sched='step', lr=1e-3, min_lr=1e-4, progress=False))
    assert a < b < c == d == pytest.approx(1e-3)


def test_positions_do_not_decay(vit):
    model = TrajectoryDistillationTask(*pair(vit)).get_trainable_module()
    groups = create_optimizer(model, FitConfig(epochs=1, opt='adamw')).param_groups
    decay = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    assert decay[id(model.student.pos_embed)] == 0 < decay[id(model.student.head.weight)]
