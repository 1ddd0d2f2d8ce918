"""calibrate_: minutes of training without labels."""
import copy
import time
from itertools import islice

import numpy as np
import pytest
import timm
import torch
from conftest import pair
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import OdeConfig, TrajectoryDistillationTask, calibrate_
from timm_odevit.data.batches import DataConfig, Mapped
from timm_odevit.data.read import NOTE, read_data
from timm_odevit.training import run
from timm_odevit.training.loop import Stream

GOOD = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def state(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(before, model):
    return all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def test_it_brings_the_student_to_the_teacher(vit):
    student, teacher = pair(vit, OdeConfig(phases=2), depth=4)
    frozen = {n: p.clone() for n, p in student.named_parameters() if 'blocks' not in n}
    data = torch.randn(32, 3, 16, 16)
    student.train()
    student.head.requires_grad_(False)
    def error():
        with torch.no_grad():
            return (student(data) - teacher(data)).square().mean().item()
    before = error()
    history = calibrate_(student, teacher, data, epochs=18, batch_size=8, lr=3e-3, progress=False)
    assert len(history) == 18 and history[-1]['loss'] < 0.8 * history[0]['loss']
    assert error() < 0.5 * before
    assert all(torch.equal(p, frozen[n]) for n, p in student.named_parameters() if n in frozen)
    assert student.training and not student.head.weight.requires_grad and student.patch_embed.proj.weight.requires_grad


def test_an_exact_student_has_no_error_and_takes_no_time(vit):
    student, teacher = pair(vit, OdeConfig(phases=3))
    started = time.perf_counter()
    assert calibrate_(student, teacher, GOOD, minutes=1., batch_size=2, progress=False) == []
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize('when', [2, 12])  # while the learning rate is chosen, and in training
def test_interrupted_it_leaves_both_models_as_they_were(vit, monkeypatch, when):
    student, teacher = pair(vit)
    student.norm.register_buffer('seen', torch.zeros(1))
    student.train()
    student.head.requires_grad_(False)
    before, calls, forward = state(student), [], TrajectoryDistillationTask.forward
    def stop(task, *args):
        calls.append(task.get_eval_model().norm.seen.add_(1))
        if len(calls) == when:
            raise KeyboardInterrupt
        return forward(task, *args)
    monkeypatch.setattr(TrajectoryDistillationTask, 'forward', stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate_(student, teacher, GOOD, epochs=9, batch_size=2, progress=False)
    assert len(calls) == when and same(before, student)
    assert student.training and not teacher.training and not student.head.weight.requires_grad
    assert all(p.requires_grad for p in (*student.blocks.parameters(), *teacher.parameters()))


@pytest.mark.parametrize('images, options, message', [
    (GOOD, dict(minutes=1., epochs=1), 'but not both'), (GOOD, dict(minutes=0), 'minutes must be'), (GOOD, dict(seed=0.5), 'seed must be'),
    (GOOD, dict(batch_size=0), 'batch_size must be'), (GOOD, dict(epochs=0), 'epochs must be'), (GOOD, dict(lr=-1), 'lr must be'),
    (GOOD, dict(amp='int8'), "Unknown amp 'int8'"),
    ([], dict(minutes=0.01), 'train_loader is empty'),
    (torch.randn(3, 16, 16), {}, r'got torch.float32 \[3, 16, 16\]'), ([{'images': GOOD}], {}, 'got dict'),
    (torch.full((4, 3, 16, 16), float('nan')), {}, 'images must be finite'),
    (GOOD.numpy(), {}, 'or a loader with a length; got ndarray'),
    (torch.randn(4, 3, 24, 24), {}, r'The first batch of val_loader, torch.float32 \[4, 3, 24, 24\]'),
])
def test_what_does_not_fit_is_refused_and_changes_neither_model(vit, images, options, message):
    student, teacher = pair(vit)
    student.train(), teacher.train()
    before = state(student)
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate_(student, teacher, images, progress=False, **options)
    assert teacher.training and student.training and same(before, student)
    assert all(p.requires_grad for p in (*teacher.parameters(), *student.parameters()))


def test_another_teacher_is_refused(vit):
    student, teacher = pair(vit)
    with pytest.raises(ValueError, match='differ in embed_dim: 32 and None'):
        calibrate_(student, timm.create_model('resnet18', num_classes=3), GOOD, progress=False)
    with pytest.raises(ValueError, match='or none that may learn'):
        calibrate_(student.requires_grad_(False), teacher, GOOD)


@pytest.mark.parametrize('classes', [1, 2])
def test_folders_are_no_labels(vit, tmp_path, classes):
    student, teacher = pair(vit, num_classes=classes)
    for file in (tmp_path / f'{month}/{name}.webp' for month in range(9) for name in 'ab'):
        file.parent.mkdir(exist_ok=True)
        Image.new('RGB', (16, 16)).save(file)
    assert calibrate_(student, teacher, tmp_path, epochs=1, batch_size=2, progress=False)


def test_minutes_are_spent(vit):
    student, teacher = pair(vit)
    started = time.perf_counter()
    history = calibrate_(student, teacher, torch.randn(20, 3, 16, 16), minutes=0.03, batch_size=8, progress=False)
    assert 0.2 < sum(record['seconds'] for record in history) < 3.6 and time.perf_counter() - started < 10
    assert history[0]['loss'] > history[-1]['loss'] and 'kd_loss' in history[-1]


def test_no_time_is_one_update(vit):
    student, teacher = pair(vit, num_classes=0)
    before = state(student)
    assert len(calibrate_(student, teacher, GOOD, minutes=1e-9, progress=False)) == 1 and not same(before, student)


def close_pair(vit):
    """A student that is its teacher but for noise, and the teacher."""
    student, teacher = pair(vit, OdeConfig(phases=3))
    with torch.no_grad():
        for parameter in student.blocks.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return student, teacher


def test_a_student_that_has_little_to_learn_learns_slowly(vit):
    data = torch.randn(8, 3, 16, 16)
    def rate(made, **chosen):
        student, teacher = made(vit)
        return calibrate_(student, teacher, data, epochs=1, batch_size=4, progress=False, **chosen)[0]['lr']
    assert 0 < rate(close_pair) < 0.5 * rate(pair) and rate(close_pair, lr=1e-3) == rate(pair, lr=1e-3) > rate(pair)
    assert rate(pair, lr=1e-7) == 1e-7  # less than what decays to min_lr


def test_it_leaves_a_student_that_it_makes_worse_as_it_was(vit):
    data = torch.randn(8, 3, 16, 16)
    student, teacher = close_pair(vit)
    before = state(student)
    with pytest.warns(UserWarning, match=r'ended worse than it started: squared error .* at best, squared error .* before. The model is as it was'):
        history = calibrate_(student, teacher, data, epochs=2, batch_size=4, lr=1., progress=False)
    assert len(history) == 2 and same(before, student)


def test_every_epoch_has_orders_of_its_own():
    seen = []
    class Loader(list):
        set_epoch = staticmethod(seen.append)
    stream = Stream(Loader([1, 2]), 3)
    for epoch in range(4):
        stream.set_epoch(epoch)
        assert sorted(islice(stream, 2)) == [1, 2] and len(list(stream)) == 3
    assert len(set(seen)) == 8
    for batches in ([1, 2, 3], (1, 2, 3), Mapped([1, 2, 3], int)):
        stream, seen = Stream(batches, 1), []
        for epoch in range(40):
            stream.set_epoch(epoch)
            seen += stream
        assert set(seen) == {1, 2, 3}


@pytest.mark.parametrize('kind', ['tensor', 'loader', 'augmented'])
def test_a_calibration_in_minutes_can_be_repeated(vit, tmp_path, monkeypatch, kind):
    start, teacher = pair(vit)
    images = torch.randn(28, 3, 16, 16)
    if kind == 'loader':
        images = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
    if kind == 'augmented':
        np.savez(tmp_path / 'd.npz', x_train=np.random.default_rng(0).integers(0, 255, (32, 16, 16, 3), np.uint8))
        images = read_data(tmp_path / 'd.npz', teacher, DataConfig(batch_size=4), labels=False).train
    monkeypatch.setattr('timm_odevit.training.fit.updates_in', lambda *args: (2, 10))  # of 7 batches in each pass
    students = [copy.deepcopy(start), copy.deepcopy(start)]
    for student in students:
        calibrate_(student, teacher, images, minutes=1., batch_size=4, progress=False, lr=1e-3)
        torch.rand(7)  # as any other program would
    assert same(state(students[0]), students[1]) and not same(state(start), students[1])


def test_images_have_the_dtype_of_the_model_and_any_seed_is_taken(vit):
    student, teacher = (model.to(torch.bfloat16) for model in pair(vit))
    settings = dict(epochs=1, batch_size=2, progress=False)
    calibrate_(student, teacher, GOOD, amp='bfloat16', seed=-1, **settings)  # float32 images
    calibrate_(student, teacher, GOOD, amp='bfloat16', seed=2 ** 40, **settings)


def test_it_leaves_out_what_the_models_training_held_out(vit, tmp_path, monkeypatch):
    student, teacher = pair(vit)
    student.pretrained_cfg = {**(student.pretrained_cfg or {}), 'notes': (f'{NOTE}0.5',)}
    x = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    np.savez(tmp_path / 'some.npz', x_train=x, y_train=np.arange(20) % 5)
    monkeypatch.setattr(run, 'read_data', lambda *args, **kw: found.append(read_data(*args, **kw)) or found[-1])
    found = []
    calibrate_(student, teacher, tmp_path / 'some.npz', epochs=1, batch_size=2, progress=False)
    assert found[0].count() < 20 == found[0].count() + found[0].count('val')
