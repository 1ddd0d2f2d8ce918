"""Other people's programs with our models: timm's own tools, and each example of examples/ecosystem.

An example of a library that is not installed is skipped: pip install -e '.[ecosystem]' for all.
"""
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.optim import create_optimizer_v2
from timm.task import FeatureDistillationTask, LogitDistillationTask
from timm.utils import AttentionExtract

from timm_odevit.hooks import watch_blocks

EXAMPLES = Path(__file__).parent.parent / 'examples' / 'ecosystem'
AUTONOMOUS = 'odevit_tiny_native_patch16_128.deit_tiny_cifar100'
THREE = 'odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100'
both = pytest.mark.parametrize('name', [AUTONOMOUS, THREE])


def build(name, **kwargs):
    return timm.create_model(name, pretrained=True, **kwargs).eval()


@pytest.fixture
def x():
    return torch.randn(4, 3, 128, 128)


def example(name):
    return runpy.run_path(str(EXAMPLES / f'{name}.py'))['main']


@both
@pytest.mark.parametrize('task', [LogitDistillationTask, FeatureDistillationTask])
def test_timms_distillation_takes_them_as_students_and_as_teachers(name, task, x):
    vit = timm.create_model('deit_tiny_patch16_224', num_classes=100, img_size=128)
    for student, teacher in ((build(name), vit), (vit, build(name))):
        made = task(student_model=student, teacher_model=teacher, criterion=torch.nn.CrossEntropyLoss(), verbose=False)
        parts = made(x, torch.arange(4))
        parts['loss'].backward()
        learnt = [p for p in made.get_trainable_module().parameters() if p.grad is not None and p.grad.any()]
        assert torch.isfinite(parts['loss']) and len(learnt) > 10


@both
def test_layer_decay_gives_the_shared_block_one_rate(name):
    model = build(name)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=1., layer_decay=0.5)
    scales = {id(p): group['lr_scale'] for group in optimizer.param_groups for p in group['params']}
    found = {part: {scales[id(p)] for n, p in model.named_parameters() if n.startswith(part)} for part in ('patch_embed', 'blocks', 'head')}
    assert len(found['blocks']) == 1 and max(found['patch_embed']) < max(found['blocks']) < max(found['head']) == 1
    compiled = create_optimizer_v2(torch.compile(model), opt='adamw', lr=1., layer_decay=0.5).param_groups
    assert [group['lr_scale'] for group in compiled] == [group['lr_scale'] for group in optimizer.param_groups]


def test_attention_extract_by_hooks_sees_the_last_evaluation(x):
    set_fused_attn(False)
    try:
        model = build(THREE)
        maps = AttentionExtract(model, method='hook')(x)
    finally:
        set_fused_attn(True)
    assert [tuple(m.shape) for m in maps.values()] == [(4, 3, 65, 65)] * 3  # of each shared block
    with torch.no_grad(), watch_blocks([list(model.blocks)]) as seen:
        model(x)
        expected = model.blocks.shared.attention_map(11., seen[0][0][11])
    torch.testing.assert_close(list(maps.values())[-1], expected)


def test_attention():
    maps, over_time = example('attention')()
    assert len(maps) == 6 and len(over_time) == 12
    for found in (*maps.values(), *over_time):
        torch.testing.assert_close(found.sum(-1), torch.ones(1, 3, 65))


def test_torchvision_features(x):
    assert {name: tuple(f.shape) for name, f in example('torchvision_features')().items()} == {'half': (1, 65, 192), 'end': (1, 65, 192)}
    assert set(example('torchvision_features')(AUTONOMOUS)) == {'half', 'end'}


def in_two_processes(name):
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2',
                           str(EXAMPLES / f'{name}.py')], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_fully_sharded_and_distributed_training_are_what_one_process_does():
    out = in_two_processes('shard')
    assert out.count('FSDP2') == 3 and 'parameters in this process' in out


def test_probe():
    assert min(example('probe')(images=300).values()) > 0.6


def test_transformers():
    pytest.importorskip('transformers')
    answers, same = example('transformers_pipeline')()
    assert same and len(answers) == 3 and {a['label'] for a in answers} < set(build(AUTONOMOUS).pretrained_cfg['label_names'])


@both
def test_peft(name, tmp_path):
    pytest.importorskip('peft')
    losses, difference = example('lora')(name, tmp_path / 'merged')
    assert losses[-1] < losses[0] and difference < 1e-4
    assert timm.create_model(f"local-dir:{tmp_path / 'merged'}", pretrained=True).num_classes == 100


@both
def test_torchao(name):
    pytest.importorskip('torchao')
    before, after, agreement = example('quantise')(name)
    assert after < 0.6 * before and agreement > 0.9


def test_litert(tmp_path):
    pytest.importorskip('litert_torch')
    rng = np.random.default_rng(0)
    images = {f'x_{part}': rng.integers(0, 256, (20, 32, 32, 3), np.uint8) for part in ('train', 'test')}
    np.savez(tmp_path / 'some.npz', **images, y_train=np.arange(20) // 2, y_test=np.arange(20) // 2)
    rows = {name: mb for name, mb, *_ in example('litert')(tmp_path / 'some.npz', limit=2, rounds=1)}
    assert rows['int8.tflite'] < 0.3 * rows['float.tflite'] and rows['float.tflite'] < 1.1 * rows['float.onnx']  # weights are shared


def test_lightning():
    pytest.importorskip('lightning')
    metrics = example('lightning_loop')().callback_metrics
    assert {'loss', 'trajectory_loss', 'kd_loss'} <= set(metrics) and torch.isfinite(metrics['loss'])
    assert '2 processes, 1 updates' in in_two_processes('lightning_loop')


def test_accelerate():
    pytest.importorskip('accelerate')
    losses = example('accelerate_loop')()
    assert losses[-1] < losses[0] and '2 processes' in in_two_processes('accelerate_loop')


def test_captum():
    pytest.importorskip('captum')
    attributions, error = example('attributions')()
    assert attributions.shape == (1, 3, 128, 128) and abs(error) < 0.5


def test_image_text():
    pytest.importorskip('open_clip')
    pytest.importorskip('transformers')
    found = example('image_text')()
    assert set(found) == {'open_clip', 'transformers'}
    assert all(result.cosine > 0.5 and 0 <= result.zero_shot <= 100 for result in found.values())


@pytest.mark.parametrize('launcher', [[], ['torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m']])
def test_a_script_runs_with_the_models_registered(launcher, tmp_path):
    (tmp_path / 'helper.py').write_text('NAME = "odevit_tiny"\n')
    script = tmp_path / 'script.py'
    script.write_text('import sys, timm\nfrom helper import NAME\nif __name__ == "__main__":\n'
                      '    sys.stdout.write(f"{timm.is_model(NAME)} {sys.argv[1:]}\\n")\n'  # in one piece, from each process
                      '    sys.exit(0 if "--device" in sys.argv else 3)\n')
    command = [sys.executable, '-m', *launcher, 'timm_odevit.cli', 'script', str(script), '--help', '--model', 'x']
    done = subprocess.run([*command, '--device', 'gpu'], capture_output=True, text=True)
    assert done.stdout == (2 if launcher else 1) * "True ['--help', '--model', 'x', '--device', 'gpu']\n", done.stderr
    assert launcher or subprocess.run(command, capture_output=True).returncode == 3


def test_every_example_has_a_test():
    assert all(f"'{path.stem}" in Path(__file__).read_text() for path in EXAMPLES.glob('*.py'))
