"""The benchmark: what is timed, what it is compared with, and how memory and size are counted."""
import copy
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from timm_odevit import convert_, merge_, save_pretrained
from timm_odevit.benchmark.candidates import evaluations_of, forward_passes, noise
from timm_odevit.benchmark.files import weight_bytes
from timm_odevit.benchmark.measure import benchmark, benchmark_training
from timm_odevit.benchmark.products import products_of
from timm_odevit.benchmark.timing import free_memory, in_turns, peak_of
from timm_odevit.cli import main
from timm_odevit.ode.halting import Scores

QUICK = dict(rounds=2, batch_sizes=(2,))


def names(found, size=2):
    return [timing.name for timing in found.timings if timing.batch_size == size]


@pytest.fixture(scope='module')
def tiny():
    return timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=4, depth=4, embed_dim=32, num_heads=2, num_classes=5).eval()


@pytest.fixture(scope='module')
def found(tiny):
    return benchmark({'base': tiny}, rounds=2, batch_sizes=(1, 2))


def test_a_model_alone_is_compared_with_its_conversions(tiny, found):
    assert names(found) == names(found, 1) == [
        'base', 'base, products alone', 'ODE-ViT', 'ODE-ViT, products alone', 'ODE-ViT, K = 1', 'ODE-ViT, K = 2',
        'ODE-ViT, K = 8', 'ODE-ViT, rank 8', 'ODE-ViT, rank 8, merged', 'ODE-ViT, lipschitz',
        'ODE-ViT, lipschitz, K = 1', 'ODE-ViT, lipschitz, K = 2', 'ODE-ViT, lipschitz, K = 8']
    rows = {timing.name: timing for timing in found.timings if timing.batch_size == 2}
    assert rows['base'].ratio == 1 and all(row.against == 'base' for row in rows.values())
    assert [rows[name].evaluations for name in ('base', 'ODE-ViT', 'ODE-ViT, K = 8', 'ODE-ViT, rank 8, merged')] == [4, 4, 8, 4]
    assert rows['ODE-ViT'].images_per_second == 2 / rows['ODE-ViT'].seconds
    assert all(row.low <= row.seconds <= row.high and row.peak > 0 for row in rows.values())
    assert [weights.name for weights in found.weights] == ['base', 'ODE-ViT', 'ODE-ViT, rank 8', 'ODE-ViT, lipschitz']
    assert found.weights[1].parameters < found.weights[2].parameters < found.weights[0].parameters
    assert all(weights.load > 0 for weights in found.weights)
    assert len(tiny.blocks) == 4 and not tiny.training


def test_tables_and_json_hold_the_same_figures(found):
    text, record = str(found), json.loads(json.dumps(found.to_dict()))
    assert len(record['timings']) == 26 and record['machine']['torch'] == torch.__version__
    for timing in record['timings']:
        line = next(line for line in text.split(f"| batch {timing['batch_size']} |")[1].splitlines()
                    if line.startswith(f"| {timing['name']} |"))
        assert f"| {timing['ratio']:.3f} |" in line and f"{1000 * timing['seconds']:.1f} ±" in line
    assert f'{found.weights[0].parameters:,}' in text


def test_the_dial_of_a_block_that_depends_on_time_is_timed_only_if_asked(tiny):
    ranked = copy.deepcopy(tiny)
    convert_(ranked, time='low_rank', rank=2)
    assert names(benchmark({'r': ranked}, **QUICK)) == ['r', 'r, products alone', 'r, merged']
    assert names(benchmark({'r': ranked}, steps=(2, 4), **QUICK)) == ['r', 'r, products alone', 'r, K = 2', 'r, merged']
    assert ranked.blocks.steps == 4


def test_compiled_models_stay_compiled(tiny):
    own = copy.deepcopy(tiny)
    convert_(own)
    candidates = forward_passes({'base': tiny, 'ode': own}, noise, None, 'default')
    compiled = {c.name: c.prepare(2)[0].func for c in candidates if c.name.endswith('compiled')}
    assert list(compiled) == ['base, compiled', 'ode, compiled']
    assert all(hasattr(call, '_orig_mod') for call in compiled.values())


def test_halting_is_timed_on_images(tiny):
    own = copy.deepcopy(tiny)
    convert_(own, halting='residual', halting_threshold=1e4)
    with pytest.raises(ValueError, match='--data'):
        benchmark({'base': tiny, 'ode': own}, **QUICK)
    images = torch.randn(2, 3, 32, 32)
    found = benchmark({'base': tiny, 'ode': own}, images=lambda model, size: images[:size], **QUICK)
    rows = {timing.name: timing.evaluations for timing in found.timings}
    assert rows['ode'] == 1 and rows['ode, without halting'] == 4  # every image halts after the first step
    assert own.blocks.config.halting == 'residual'


def test_the_products_are_those_of_the_same_images(tiny):
    model = copy.deepcopy(tiny)
    convert_(model)
    x = torch.randn(32, 3, 32, 32)
    with torch.no_grad():
        scores = [Scores('residual', None)(a, b, 1.) for a, b in pairwise(model.blocks.trajectory(model._pos_embed(model.patch_embed(x))))]
    model.blocks.config = replace(model.blocks.config, halting='residual', halting_threshold=scores[0].median().item())
    with torch.no_grad():
        model(x)
    order = model.blocks.steps_taken.argsort()
    for images in (x[order], x[order.flip(0)]):
        found = benchmark({'model': model}, images=lambda model, n, images=images: images[:n], rounds=1, batch_sizes=(1,))
        rows = {timing.name: timing for timing in found.timings}
        assert 1 < rows['model'].evaluations < 4
        assert rows['model, products alone'].evaluations == rows['model'].evaluations


def test_evaluations_count_kept_blocks_and_stages_of_a_method(tiny):
    own = copy.deepcopy(tiny)
    convert_(own, method='rk4', steps=2, blocks=(1, 2), time='low_rank', rank=1)
    assert evaluations_of(own) == 2 + 2 * 4
    merge_(own)
    assert evaluations_of(own) == 2 + 2 * 4
    assert evaluations_of(nn.Linear(2, 2)) is None


def test_products_are_those_of_the_forward_pass(tiny):
    with torch.inference_mode():
        images = torch.randn(2, 3, 32, 32)
        calls = products_of(tiny, images).__closure__[0].cell_contents
    functions = [function for function, *_ in calls]
    assert functions.count(F.linear) == 4 * 4 + 1  # qkv, proj, fc1, fc2 of each block, and the head
    assert functions.count(F.scaled_dot_product_attention) == 4 and functions.count(F.conv2d) == 1
    weights = {id(p) for p in tiny.parameters()}
    assert all(id(args[1]) in weights for function, args, _ in calls if function is F.linear)


def test_bytes_are_those_of_the_saved_file(tiny, tmp_path):
    own = copy.deepcopy(tiny)
    convert_(own)
    save_pretrained(own, tmp_path)
    stored = load_file(tmp_path / 'model.safetensors')
    assert weight_bytes(own)['as it is'] == sum(t.numel() * t.element_size() for t in stored.values())
    assert weight_bytes(own)['float16'] == sum(t.half().numel() * 2 for t in stored.values())
    layer = nn.Linear(10, 3)  # 30 int8 weights, 3 scales and 3 biases of 4 bytes
    assert weight_bytes(layer) == {'as it is': 132, 'float16': 66, 'int8': 54}


def test_calls_take_turns_and_settings_do_not_count():
    order = []

    @contextmanager
    def slow():
        time.sleep(0.05)
        order.append('setting')
        yield
    calls = {'a': (partial(order.append, 'a'), slow), 'b': (partial(order.append, 'b'), slow)}
    times = in_turns(calls, rounds=2, warm_up=1, device='cpu')
    assert order == ['setting', 'a', 'setting', 'b'] * 3
    assert all(len(seconds) == 2 and max(seconds) < 0.05 for seconds in times.values())


def test_peak_of_a_call():
    assert 8e6 <= peak_of(lambda: (torch.zeros(10 ** 6) + 1).sum(), 'cpu') < 8.1e6


def test_the_largest_batch_that_fits(tiny, monkeypatch):
    """Known answer: with room for 13 times what an image needs, 8 images fit."""
    candidates = forward_passes({'base': tiny}, noise, None, None)
    with torch.inference_mode():
        each = max(peak_of(c.prepare(2)[0], 'cpu') // 2 for c in candidates)
    monkeypatch.setattr('timm_odevit.benchmark.measure.free_memory', lambda device: 13 * each / 0.8)
    found = benchmark({'base': tiny, 'again': copy.deepcopy(tiny)}, batch_sizes=(None,), rounds=1)
    assert {timing.batch_size for timing in found.timings} == {8}
    assert found.timings[0].low == found.timings[0].seconds


def test_what_cannot_be_timed_is_refused_before_anything_is_timed(tiny, monkeypatch):
    monkeypatch.setattr('timm_odevit.benchmark.measure.in_turns', None)
    with pytest.raises(ValueError, match='nothing to time'):
        benchmark({})
    halting = copy.deepcopy(tiny)
    convert_(halting, time='vectors', halting='residual')
    merge_(halting)
    with pytest.raises(ValueError, match='--data'):
        benchmark({'merged': halting})
    with pytest.raises(ValueError, match='merged'):
        benchmark({'merged': halting}, images=noise)


@pytest.mark.parametrize('given, message', [
    (dict(rounds=0), 'rounds must be a whole number of at least 1; got 0'), (dict(batch_sizes=(0,)), 'batch_sizes'),
    (dict(compiled='fast'), "Unknown compiled 'fast'")])
def test_settings_out_of_range_are_refused(tiny, given, message):
    with pytest.raises(ValueError, match=message):
        benchmark({'base': tiny}, **given)
    if 'compiled' not in given:
        with pytest.raises(ValueError, match=message):
            benchmark_training(tiny, 'base', **given)


def test_a_system_that_does_not_say_how_much_memory_is_free(monkeypatch):
    monkeypatch.delattr('os.sysconf')
    with pytest.raises(ValueError, match='--batch-size 1,64'):
        free_memory('cpu')


def test_training_steps(tiny):
    found = benchmark_training(tiny, 'base', **QUICK)
    assert names(found) == [
        'base, cross-entropy', 'ODE-ViT, distillation', 'ODE-ViT, rank 8, distillation',
        'ODE-ViT, lipschitz, distillation', 'ODE-ViT, distillation, gradient checkpointing',
        'ODE-ViT, distillation, cached states', 'ODE-ViT, stepwise', 'ODE-ViT, stepwise, cached states']
    peaks = {timing.name: timing.peak for timing in found.timings}
    assert peaks['ODE-ViT, distillation, gradient checkpointing'] < peaks['ODE-ViT, distillation']
    assert all(p.grad is None for p in tiny.parameters())


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['benchmark', '--json', str(tmp_path)]) == 2 and 'is a folder' in capsys.readouterr().err
    assert main(['benchmark', '--img-size', '32', '--batch-size', '2', '--rounds', '1', '--quiet', '--json', 'a.json']) == 0
    out, record = capsys.readouterr(), json.loads((tmp_path / 'a.json').read_text())
    assert '| ODE-ViT, K = 24 |' in out.out and not out.err
    assert record['timings'][0]['name'] == 'vit_tiny_patch16_224'
    assert main(['benchmark', '--img-size', '32', '--train', '--batch-size', '2', '--rounds', '1', '--dtype', 'bfloat16', '--quiet']) == 0
    assert 'dtype bfloat16' in (out := capsys.readouterr().out) and out.count('distillation') == 5


def test_the_command_times_published_models_on_images(tmp_path, capsys):
    model = timm.create_model('odevit_tiny_native_patch16_64.deit_tiny_cifar10', pretrained=True)
    model.blocks.config = replace(model.blocks.config, halting='entropy', halting_threshold=0.9)
    save_pretrained(model, tmp_path / 'm')
    rng = np.random.default_rng(0)
    np.savez(tmp_path / 'd.npz', x_train=rng.integers(0, 256, (10, 64, 64, 3), dtype=np.uint8))
    args = ['benchmark', 'deit_tiny_patch16_64.cifar10', f'local-dir:{tmp_path}/m', '--batch-size', '2', '--rounds', '1', '--quiet']
    assert main(args) == 2 and '--data' in capsys.readouterr().err
    assert main([*args, '--data', f'{tmp_path}/d.npz']) == 0
    assert '/m, without halting | 12 |' in capsys.readouterr().out
