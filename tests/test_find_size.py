"""The search for the smallest student that keeps enough, and odevit convert --keep."""
import numpy as np
import pytest
import timm
import torch
from conftest import TINY

from timm_odevit import CalibrationConfig, OdeConfig, choose_size, find_size, save_pretrained
from timm_odevit.cli import main
from timm_odevit.ode.blocks import count_parameters, find_ode_blocks
from timm_odevit.training import find_size as module

QUICK = dict(epochs=(1, 1), progress=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', **{**TINY, 'depth': 4, 'num_classes': 3}).eval()


def images(n=32):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize('needed', [0., 0.45, 0.6, 0.75, 1.])
def test_the_smallest_that_keeps_enough(model, monkeypatch, needed):
    total = count_parameters(model)
    monkeypatch.setattr(module, 'calibrate_', lambda *args, **kwargs: None)
    monkeypatch.setattr(module, '_kept', lambda student, *rest: 100. * (count_parameters(student) >= needed * total))
    found = find_size(model, images(), images(8), keep=0.9, trials=6, **QUICK)
    size = count_parameters(found.student)
    assert size >= needed * total
    smallest = count_parameters(model) - 3 * sum(p.numel() for p in model.blocks[0].parameters())
    rank = 4 * (2 * (32 + 32) + (32 + 96) + 2 * (32 + 128))  # at most, of all layers, for one more rank
    assert size <= max(needed * total, smallest) + (total - smallest) / 2 ** 6 + rank or found.config.phases == 4
    assert [row.kept for row in found.tried if row.config == found.config] == [100.]
    assert all(row.calibrated is None for row in found.tried if row.initialised == 100.)
    assert len({row.config for row in found.tried}) == len(found.tried) <= 7


def test_what_is_found_was_measured(model):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    held = images(24)
    found = find_size(model, images(), held, keep='60%', trials=2, lr=1e-2, **QUICK)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items()) and not find_ode_blocks(model)
    with torch.no_grad():
        same = (found.student(held).argmax(1) == model(held).argmax(1)).double().mean().item()
    row = next(row for row in found.tried if row.config == found.config)
    assert row.kept == pytest.approx(100 * same) and row.kept >= 60 and row.parameters == count_parameters(found.student)
    text = str(found)
    assert f'{row.parameters:,}' in text and '60% agreement with the teacher on 24 images held out' in text.replace(' %', '%')
    assert row.calibrated is None or row.calibrated > row.initialised
    smaller = [other for other in found.tried if other.parameters < row.parameters]
    assert all(other.kept < 60 for other in smaller)


def test_only_what_does_not_keep_enough_as_initialised_is_calibrated(model, monkeypatch):
    spoiled = []
    monkeypatch.setattr(module, 'calibrate_', lambda student, *rest, **kwargs: spoiled.append(student))
    answers = iter([50., 40., 100.])
    monkeypatch.setattr(module, '_kept', lambda *args: next(answers))
    found = find_size(model, images(), images(8), keep=0.9, trials=2, **QUICK)
    first, second = found.tried
    assert len(spoiled) == 1 and (first.initialised, first.calibrated, first.kept) == (50., 40., 50.)
    assert second.calibrated is None and found.config == second.config


def test_nothing_smaller_keeps_enough(model, monkeypatch):
    measured = module._kept
    monkeypatch.setattr(module, '_kept', lambda student, *rest: measured(student, *rest) * (count_parameters(student) >= count_parameters(model)))
    found = find_size(model, images(), images(24), keep=0.999, trials=1, **QUICK)
    assert found.config == choose_size(model, 1.) and found.tried[-1].kept == 100.
    assert str(found).endswith('nothing smaller than the teacher')
    x = images(2)
    torch.testing.assert_close(found.student(x), model(x), atol=1e-5, rtol=1e-5)


def test_embeddings_are_compared_by_their_cosine(model):
    model.reset_classifier(0)
    batches = [(x, torch.zeros(len(x))) for x in images().split(16)]
    found = find_size(model, batches, list(images(24).split(10)), keep=0.5, trials=1, **QUICK)
    assert found.measure == 'cosine' and found.images == 24 and found.tried[0].config.phases == 1
    x = images(24)
    cosine = torch.cosine_similarity(found.student(x), model(x)).mean().item()
    assert found.tried[-1].kept == pytest.approx(100 * cosine, abs=0.01)


def test_other_settings_of_the_student_are_kept(model):
    found = find_size(model, images(), images(8), keep=0.01, trials=1, ode=OdeConfig(steps=2), **QUICK)
    assert found.student.blocks.steps == found.config.steps == 2


def test_refused(model):
    for keep in (0, 1., 95, '3M', True, 'much', -0.1, float('nan')):
        with pytest.raises(ValueError, match='keep must be a number between 0 and 1; got|expected a number'):
            find_size(model, images(), images(8), keep=keep)
    with pytest.raises(ValueError, match='trials'):
        find_size(model, images(), images(8), trials=0)
    with pytest.raises(ValueError, match='images must be a floating-point tensor'):
        find_size(model, images(), [])
    with pytest.raises(ValueError, match='images must be a floating-point tensor'):
        find_size(model, [], images(8))
    with pytest.raises(TypeError, match="unknown argument 'trails'"):
        find_size(model, images(), images(8), trails=2)
    with pytest.raises(TypeError, match='Cannot convert ResNet'):
        find_size(timm.create_model('resnet18', num_classes=3), images(), images(8))
    with pytest.raises(TypeError, match='both config and'):
        find_size(model, images(), images(8), config=CalibrationConfig(), minutes=1)


def test_command(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez('images.npz', x_train=torch.randint(256, (40, 16, 16, 3), dtype=torch.uint8).numpy())
    save_pretrained(model, 'teacher')
    convert = ['convert', 'local-dir:teacher', 'new']
    assert main([*convert, '--keep', '50%', '--images', 'images.npz', '--minutes', '0.002']) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert '50% agreement with the teacher' in printed.replace(' %', '%') and 'local-dir:new' in printed
    saved = timm.create_model('local-dir:new', pretrained=True)
    assert f'{count_parameters(saved):,} parameters' in printed or 'nothing smaller' in printed
    for options, message in [
            (['--keep', '50%'], 'Give --images'),
            (['--keep', '50%', '--images', 'images.npz', '--target-params', '50%'], 'leave out --target-params'),
            (['--keep', '50%', '--images', 'images.npz', '--num-classes', '5'], '--num-classes'),
            (['--keep', '50%', '--images', 'images.npz', '--rank', '3'], '--keep chooses time, rank'),
            (['--keep', 'most', '--images', 'images.npz'], "got 'most'"),
            (['--keep', '100%', '--images', 'images.npz'], 'between 0 and 1; got 1.0'),
            (['--minutes', '3'], '--minutes is the time for each size that --keep tries')]:
        assert main(['convert', 'local-dir:teacher', 'other', *options]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / 'other').exists()
