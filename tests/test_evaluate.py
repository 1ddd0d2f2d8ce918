import copy
import json
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

from timm_odevit import OdeConfig, calibrate_halting, convert_, evaluate, evaluate_embeddings, shrink


@pytest.fixture
def data():
    return torch.randn(23, 3, 16, 16), torch.randint(0, 5, (23,))


def batches(data, size):
    return list(zip(data[0].split(size), data[1].split(size)))


@pytest.mark.parametrize('size', [23, 7, 1])
def test_figures_are_per_image_whatever_the_batches(vit, data, size):
    model, teacher = convert_(vit()).model, vit(depth=2)
    data = data[0], torch.cat([teacher(data[0]).argmax(1)[:9], data[1][9:]])  # so that it is right now and then
    seen, dtypes = [], []
    handle = model.register_forward_hook(lambda _, args, out: seen.append(len(out)) or dtypes.append(out.dtype))
    evaluate(model, [data], amp_dtype='bfloat16')
    assert dtypes == [torch.bfloat16] and evaluate(copy.deepcopy(teacher).bfloat16(), data).results[0].images == 23
    seen.clear()
    found = evaluate(model, batches(data, size), teacher=teacher)
    handle.remove()
    assert seen == [len(labels) for _, labels in batches(data, size)]  # each batch runs once
    logits, target = model(data[0]), teacher(data[0])
    t, s = found.results
    assert (t.model, s.model, s.images, s.steps, s.nfe) == ('teacher', 'student', 23, 3, 3)
    right = (logits.argmax(1) == data[1]).double().mean().item()
    assert s.top1 == pytest.approx(100 * right) and s.top5 == 100
    assert s.loss == pytest.approx(F.cross_entropy(logits, data[1]).item(), rel=1e-5)
    assert s.agreement == pytest.approx(100 * (logits.argmax(1) == target.argmax(1)).double().mean().item())
    assert s.kept == pytest.approx(100 * s.top1 / t.top1)
    same = evaluate(model, data, teacher=model).results[1]  # a pair of tensors is a data set, too
    assert (same.agreement, same.kept, same.images, same.top1) == (100, pytest.approx(100), 23, pytest.approx(s.top1))
    assert s.parameters == sum(p.numel() for p in model.parameters())
    assert evaluate(model, (data[0], teacher(data[0]).argmin(1)), teacher=teacher).results[1].kept is None


def test_steps_are_those_of_views_and_the_model_does_not_change(vit, data):
    model = convert_(vit().train(), OdeConfig(field='lipschitz', method='rk4', init='spectral')).model
    model.blocks.eval()
    calls, step = [], model.blocks[1]
    step.register_forward_hook(lambda *_: calls.append(1))
    found = evaluate(model, batches(data, 8), steps=(1, 2, 6))
    assert [(r.steps, r.nfe) for r in found.results] == [(1, 4), (2, 8), (6, 24)]
    assert len(found.table().splitlines()) == 5 and len({len(line) for line in found.table().splitlines()}) == 1
    assert model.blocks.steps == 3 and model.training and not model.blocks.training
    assert model.blocks[1] is step and len(model.feature_info) == 3 and not calls
    assert [r.steps for r in evaluate(model, batches(data, 8), steps=np.int64(2)).results] == [2]
    model.blocks.steps = 6
    assert evaluate(model, batches(data, 8)).results[0].loss == found.results[-1].loss

    def stops():
        yield batches(data, 8)[0]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, stops(), steps=1)
    assert model.blocks.steps == 6 and model.training


def test_the_steps_of_all_stages_are_counted():
    model = timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=32, patch_size=2, embed_dim=8, depths=(2, 4), num_heads=(2, 4),
        window_size=4, num_classes=5)
    convert_(model)
    loader = [(torch.randn(4, 3, 32, 32), torch.arange(4))]
    result = evaluate(model, loader).results[-1]
    assert result.steps == result.nfe == 6
    assert [r.steps for r in evaluate(model, loader, steps=[1, (1, 2), (2, 3)]).results] == [2, 3, 5]  # in each stage


def test_adaptive_evaluations_are_a_mean_over_images(vit, data):
    model = convert_(vit(), OdeConfig(field='lipschitz', method='bosh3', init='spectral', steps=1)).model
    parts = batches(data, 8)
    each = []
    with torch.no_grad():
        for images, _ in parts:
            model(images)
            each.append(model.blocks.nfe)
    expected = sum(n * len(images) for n, (images, _) in zip(each, parts)) / 23
    assert evaluate(model, parts).results[0].nfe == pytest.approx(expected)
    convert_(one_by_one := vit('beit_base_patch16_224'), method='dopri5')  # calls its blocks
    one_by_one.blocks(torch.randn(1, 17, 32))  # what an earlier pass took does not count
    assert evaluate(one_by_one, parts).results[0].nfe is None


@pytest.mark.parametrize('channels', [1, 3, 4])
def test_images_are_normalised_for_the_teacher(vit, channels):
    data = torch.randn(23, channels, 16, 16), torch.randint(0, 5, (23,))
    model, teacher = (vit(in_chans=channels) for _ in range(2))  # mean and std of the model: 0.5
    mean, std = ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1)) if channels == 3 else ((0.2,) * channels, (0.2,) * channels)
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, 'mean': mean, 'std': std}
    found = evaluate(model, batches(data, 8), teacher=teacher).results[0].loss
    mean, std = (torch.tensor(values).view(1, channels, 1, 1) for values in (mean, std))
    wrapped = evaluate(torch.compile(model, backend='eager'), batches(data, 8), teacher=teacher, amp_dtype='bfloat16')
    assert wrapped.results[0].loss == pytest.approx(found, rel=0.05)
    assert found == pytest.approx(F.cross_entropy(teacher((data[0] * 0.5 + 0.5 - mean) / std), data[1]).item(), rel=1e-5)
    with pytest.raises(ValueError, match=f'The teacher takes images with {channels % 4 + 1} channels, the model with {channels}'):
        evaluate(model, batches(data, 8), teacher=vit(in_chans=channels % 4 + 1))


def test_logits_that_are_nan_are_named_and_never_right(vit, data, tmp_path):
    model = vit()
    images, labels = data[0], model(data[0]).argmax(1)
    labels[:9] = 2
    assert evaluate(model, [(images[9:], labels[9:])]).results[0].top1 == 100
    spoiled, bad = copy.deepcopy(model), images[:9].flatten(1)
    spoiled.register_forward_hook(lambda _, args, out: out.index_put_(((args[0].flatten(1)[:, None] == bad).all(2).any(1), torch.tensor(2)), torch.tensor(math.nan)))
    with pytest.warns(RuntimeWarning, match='model: the logits of 9 of 23 images are NaN. They count as wrong'):
        found = evaluate(spoiled, batches((images, labels), 8))
    result = found.results[0]
    assert result.top1 == result.top5 == pytest.approx(100 * 14 / 23) and result.images == 23 and math.isnan(result.loss)

    def refuse(name):
        raise AssertionError(f'{name} is no JSON')
    rows = json.loads(found.to_json(), parse_constant=refuse)
    assert rows[0]['loss'] is None and rows[0]['top1'] == result.top1 and 'nan' in found.table()
    with pytest.warns(RuntimeWarning, match='(teacher|model): the logits of 9 of 23') as warned:
        same = evaluate(spoiled, batches((images, labels), 8), teacher=spoiled).results[1]
    assert same.agreement == pytest.approx(100 * 14 / 23)
    assert [str(w.message).split(':')[0] for w in warned] == ['teacher', 'model']
    with torch.no_grad():
        model.head.bias[1] = -math.inf
    found = evaluate(model, [(images, torch.ones(23, dtype=torch.long))])
    assert found.results[0].loss == math.inf and json.loads(found.to_json())[0]['loss'] is None


@pytest.mark.parametrize('made', [dict(), dict(field='lipschitz', method='bosh3', init='spectral', steps=1)], ids=['fixed', 'adaptive'])
@pytest.mark.parametrize('place', [0, 1, 3])
def test_batches_of_no_images_are_left_out(vit, data, made, place):
    model = convert_(vit(), OdeConfig(**made)).model
    plain = batches(data, 8)
    empty = [*plain[:place], (data[0][:0], data[1][:0]), *plain[place:]]
    a, b = (evaluate(model, loader, teacher=vit()).results[1] for loader in (plain, empty))
    assert (a.nfe, a.images, a.top1, a.loss) == (b.nfe, b.images, b.top1, b.loss) and b.nfe > 0


def test_one_output_is_no_class(vit, data, tmp_path):
    model, teacher = convert_(vit(num_classes=1)).model, vit(num_classes=1)
    images, labels = data[0], torch.zeros(23, dtype=torch.long)
    for options in ({}, dict(teacher=teacher)):  # all have the same class, and would agree
        with pytest.raises(ValueError, match='one output .*, so there is no class'):
            evaluate(model, (images, labels), **options)
    with pytest.raises(ValueError, match='two classes or more'):
        calibrate_halting(model, (images, labels))
    with pytest.raises(ValueError, match='one output .* every student would agree'):
        shrink(teacher, images, tmp_path / 'out', minutes=1.)
    error = evaluate_embeddings(model, images, teacher=teacher).results[1].error
    a, b = (m(images) for m in (model, teacher))
    assert error == pytest.approx((F.mse_loss(a, b) / (b - b.mean()).square().mean()).item(), rel=1e-4)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_labels_of_any_integer_type(vit, dtype):
    model, images, labels = vit(num_classes=2), torch.randn(6, 3, 16, 16), torch.arange(6) % 2
    assert evaluate(model, (images, labels.to(dtype))).results[0].loss == evaluate(model, (images, labels)).results[0].loss


@pytest.mark.parametrize(('given', 'options', 'message'), [
    (lambda x, y: [(x, y.float())], {}, 'whole numbers from 0 to 4, .*; got torch.float32'), (lambda x, y: [(x, y + 3)], {}, 'from 3 to 7'),
    (lambda x, y: [x], {}, r'labels \[B\]; got torch.float32'), (lambda x, y: [], {}, 'gave no images'),
    (lambda x, y: [(x.byte(), y)], {}, 'got torch.uint8'),
    (lambda x, y: [(x, y)], dict(teacher=dict(num_classes=7)), 'The teacher has 7 classes, the model 5')])
def test_what_cannot_be_measured_is_said(vit, given, options, message):
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
    model = convert_(vit()).model
    if 'teacher' in options:
        options = dict(teacher=vit(**options['teacher']))
    with pytest.raises(ValueError, match=message):
        evaluate(model, given(x, y), **options)
    assert [r.images for r in evaluate(model, iter([(x, y)]), steps=(1, 2)).results] == [8, 8]  # reads it once
    with pytest.raises(TypeError, match='is not an ODE-ViT'):
        evaluate(vit(), [(x, y)], steps=(1, 2))
    with pytest.raises(TypeError, match="Expected a timm model; got 'odevit_tiny'"):
        evaluate('odevit_tiny', [(x, y)])
