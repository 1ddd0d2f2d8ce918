"""The benchmark: what is timed, what it is compared with, and how memory and size are counted."""
import copy
import json
import math
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

from timm_odevit import convert_, save_pretrained
from timm_odevit.benchmark import benchmark, half_intervals, peak_of, times_in_turns
from timm_odevit.cli import main

QUICK = dict(rounds=1, batch_sizes=(2,))


@pytest.fixture(scope='module')
def tiny():
    return timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=4, depth=4, embed_dim=32, num_heads=2, num_classes=5).eval()


def converted(model, **settings):
    return convert_(copy.deepcopy(model), **settings).model


def test_models_and_their_step_counts_are_compared_with_the_first(tiny, tmp_path):
    models = {'base': tiny, 'ode': converted(tiny), 'two': converted(tiny, phases=2)}
    found = benchmark(models, steps=(4, 8), rounds=2, batch_sizes=(1, 2))
    names = ['base', 'ode', 'ode, K = 8', 'two', 'two, K = 8']
    assert [(t.name, t.batch_size) for t in found.timings] == [(name, size) for size in (1, 2) for name in names]
    rows = {t.name: t for t in found.timings if t.batch_size == 2}
    assert [rows[name].evaluations for name in names] == [None, 4, 8, 4, 8]
    assert rows['base'].ratio == 1 and all(row.seconds > 0 and row.iqr >= 0 and row.peak > 0 for row in rows.values())
    assert rows['ode'].parameters == rows['ode, K = 8'].parameters < rows['two'].parameters < rows['base'].parameters
    assert [ode.steps for ode in (models['ode'].blocks, models['two'].blocks)] == [4, 4]
    save_pretrained(models['ode'], tmp_path)
    stored = load_file(tmp_path / 'model.safetensors')
    assert rows['ode'].size == sum(t.numel() * t.element_size() for t in stored.values())
    record, text = json.loads(json.dumps(asdict(found))), str(found)
    assert record['machine']['torch'] == torch.__version__ and len(record['timings']) == 10
    for t in found.timings:
        line = next(line for line in text.split(f'| batch {t.batch_size} ')[1].splitlines() if line.startswith(f'| {t.name} '))
        assert f'| {t.ratio:.3f} ' in line and f'| {t.batch_size / t.seconds:.1f} ' in line and f'{t.parameters:,}' in line


def test_compiled_models_are_timed_too(tiny, monkeypatch):
    wrap = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda model, mode: wrap(model, backend='eager'))  # the default takes a minute
    assert [t.name for t in benchmark({'a': tiny}, compiled='default', **QUICK).timings] == ['a', 'a, compiled']
    with pytest.raises(ValueError, match="Unknown compiled 'fast'"):
        benchmark({'a': tiny}, compiled='fast', **QUICK)


def test_halting_is_timed_on_images(tiny):
    models = {'base': tiny, 'ode': converted(tiny, halting='entropy', halting_threshold=1e4)}
    with pytest.raises(ValueError, match='--data'):
        benchmark(models, **QUICK)
    found = benchmark(models, images=lambda model, count: torch.randn(count, 3, 32, 32), **QUICK)
    assert [t.evaluations for t in found.timings] == [None, 1]  # every image halts after the first step


def test_all_take_turns_in_every_round():
    calls = []
    times = times_in_turns([lambda: calls.append('a'), lambda: calls.append('b')], 3)
    assert calls == 3 * (4 * ['a'] + 4 * ['b'])  # two calls that are not timed, two that are
    assert [len(seconds) for seconds in times] == [3, 3] and min(map(min, times)) > 0


def test_the_gpu_of_the_models_is_the_one_that_is_waited_for(tiny, monkeypatch):
    found = []
    monkeypatch.setattr(torch.accelerator, 'device_index', lambda index: nullcontext(found.append(index)))
    times_in_turns([int], 1, index=1)
    benchmark({'a': tiny}, **QUICK)
    assert found == [1, None]


def test_turns_end_once_the_ratios_are_known():
    runs = [lambda: sum(range(1000)), lambda: sum(range(2000))]
    assert times_in_turns(runs, 100, within=math.inf).shape == (2, 5) and times_in_turns(runs, 7).shape == (2, 7)


def test_the_interval_is_that_of_the_ratio_to_the_first():
    assert half_intervals(np.array([[1., 3., 5.], [2., 6., 10.]])).tolist() == [0., 0.]  # a busy machine slows both
    assert half_intervals(np.array([[1., 1.], [2., 2. * math.exp(0.2)]]))[1] == pytest.approx(4.96 * 0.1)


def test_peak_of_a_call():
    assert 8e6 <= peak_of(lambda: (torch.zeros(10 ** 6) + 1).sum(), 'cpu') < 8.1e6


def test_the_command(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(tiny, 't')
    save_pretrained(converted(tiny, halting='entropy', halting_threshold=0.9), 'm')
    np.savez('d.npz', x_train=np.random.default_rng(0).integers(0, 256, (10, 64, 64, 3), dtype=np.uint8))
    args = ['benchmark', 'local-dir:t', 'local-dir:m', '--batch-size', '2', '--rounds', '1', '--quiet', '--device', 'cpu']
    assert main(args) == 2 and '--data' in capsys.readouterr().err
    assert main([*args, '--json', '.']) == 2 and 'is no file' in capsys.readouterr().err
    assert main([*args, '--data', 'd.npz', '--json', 'a.json', '--dtype', 'bfloat16']) == 0
    out, record = capsys.readouterr(), json.loads((tmp_path / 'a.json').read_text())
    assert '| local-dir:m ' in out.out and 'dtype bfloat16' in out.out and not out.err
    assert record['timings'][0]['name'] == 'local-dir:t' and 1 <= record['timings'][1]['evaluations'] <= 4
