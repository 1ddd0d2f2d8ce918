import copy
import json
import math
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from conftest import TINY, pair, snapshot
from filelock import FileLock
from safetensors.torch import load_file

from timm_odevit import Recipe, convert_, save_pretrained, train
from timm_odevit.cli import main
from timm_odevit.data import read
from timm_odevit.data.sources import taken
from timm_odevit.ode.fields import NativeField
from timm_odevit.training.loop import Trainer
from timm_odevit.training.recipe import PARTS, Stage, builtin_recipes
from timm_odevit.training.stages import _names_of

HUB = Path(__file__).parent.parent / 'hub'
QUICK = {'ode': {}, 'data': {'batch_size': 8}, 'fit': {'epochs': 2, 'lr': 3e-3}}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 5
    x = (40 * y[:, None, None, None] + rng.integers(0, 60, (60, 12, 12, 3))).astype(np.uint8)
    np.savez(tmp_path / 'data.npz', x_train=x[:50], y_train=y[:50], x_test=x[50:], y_test=y[50:])
    return tmp_path / 'data.npz'


def recipe(*changes, **more):
    return Recipe.from_dict({**json.loads(json.dumps(QUICK)), 'stages': [{}], **more}, changes)


def run(made, data, out, teacher=None, **kwargs):
    return train(made, data, out, teacher=teacher, progress=False, **kwargs)


# --- recipes

@pytest.mark.parametrize('name', builtin_recipes())
def test_recipes_of_the_package_load_and_survive_yaml(name):
    made = Recipe.load(name)
    assert Recipe.from_dict(yaml.safe_load(made.to_yaml())) == made
    changed = Recipe.load(name, ['stages.0.fit.lr=1e-3', 'seed=3', 'stages.0.fit.opt=lamb'])
    assert changed.fit_of(changed.stages[0]) == replace(made.fit_of(made.stages[0]), lr=1e-3, opt='lamb') and changed.seed == 3


def test_a_stage_has_epochs_or_minutes():
    assert recipe(fit={'minutes': 3}).fit_of(Stage(fit={'minutes': 2})).minutes == 2
    with pytest.raises(ValueError, match='stages.0: fit needs epochs.*but not both'):
        recipe('fit.minutes=1')


def test_a_change_that_no_stage_would_use_is_an_error():
    stages = [{'fit': {'epochs': 1}}, {'task': 'labels', 'fit': {'epochs': 1}}]
    with pytest.raises(ValueError, match="'fit.epochs=3' has no effect.*Change stages.0.fit.epochs, stages.1.fit.epochs"):
        recipe('fit.epochs=3', stages=stages)
    stages[0]['loss'] = {'steps': [2]}
    with pytest.raises(ValueError, match=r'Change stages.0.loss.steps\.'):
        recipe('loss.steps=[3]', stages=stages)
    assert recipe('fit.lr=1e-4', 'fit.epochs=null', stages=stages).fit == {'lr': 1e-4}
    with pytest.raises(ValueError, match=r'Change stages.1.fit.lr, stages.2.fit.lr\.'):
        recipe('fit.lr=1e-4', stages=[{'fit': {'epochs': 0}}, {'fit': {'epochs': 1, 'lr': 1.}}, {'fit': {'epochs': 1, 'lr': 2.}}])
    with pytest.raises(ValueError, match='has no effect'):
        Recipe.load('three_blocks', ['stages.1.fit.epochs=0', 'loss.kd_weight=1'])
    with pytest.raises(ValueError, match="loss is for the task 'trajectory'"):
        Recipe.load('finetune', ['stages.0.loss.kd_weight=1'])
    assert not recipe(loss={'embedding': True}, stages=stages[1:]).embeds  # a stage needs the labels
    changed = Recipe.load('three_blocks', ['fit.clip_grad=None', 'fit.lr=null'])
    assert changed.fit['clip_grad'] is None and changed.fit_of(changed.stages[0]).clip_grad is None and 'lr' not in changed.fit


@pytest.mark.parametrize('section', ['loss', 'fit', 'data'])
def test_every_unknown_key_is_an_error(section):
    for where in ({section: {'nothing': 1}}, {'stages': [{section: {'nothing': 1}}]}, {'nothing': 1}, {'ode': {'nothing': 1}}):
        with pytest.raises(ValueError, match=f"unknown key '{section if section == 'data' and 'stages' in where else 'nothing'}'"):
            recipe(**where)


@pytest.mark.parametrize('bad, message', [
    (dict(stages=[]), 'stages must be a list of at least one stage'),
    (dict(fit={'epochs': 0}), 'All stages have 0 epochs, so there is nothing to train.'),
    (dict(grad_checkpointing=1), 'grad_checkpointing must be True or False'),
    (dict(data={'prob': 0.5}), 'data.prob is the share of the batches that are mixed'),
    (dict(stages=[{'train': 3}]), 'stages.0: train must be a list of at least one part'),
    (dict(fit={'epochs': 1, 'amp': ['a']}), "Unknown amp '['a']'"),
    ('loss={exits: [0.5], exit_weight: 1, kd_weight: 0}', 'need kd_weight or task_weight'),
    ('loss={kd_weight: 0, trajectory_weight: 0}', 'All weights of the loss are 0'),
    ('loss.steps=[true]', 'steps must be a list of whole numbers'), ('loss.steps=[0.5]', "of shares such as '50%'"), ('loss.steps=[2, 3', "'loss.steps=[2, 3' is not valid YAML"),
    ('fit={minutes: 1e308}', 'minutes must be a number above 0'), ('ode={steps: 1000000000}', 'steps must be'),
    ('data.flip=7', 'data.flip must be a number from 0 to 1'), ('fit.compile=maybe', 'compile must be True or False'),
    ('model_args={cache_dir: /x}', "'cache_dir' '/x': only the caller"), ('seed=5000000000', 'seed must be a whole number'),
    ('fit.epochs=true', 'epochs must be a whole number of at least 1, or None for minutes; got True.'),
])
def test_refuses(bad, message):
    with pytest.raises(ValueError) as e:
        recipe(bad) if isinstance(bad, str) else recipe(**bad)
    assert message in str(e.value)


BOMB = 'a: &a [1, 1]\n' + '\n'.join(f'b{i}: &b{i} [{", ".join(9 * [f"*b{i - 1}" if i else "*a"])}]' for i in range(30))
YAML = {  # what no recipe needs, and what the message holds after the name
    'a billion laughs': (BOMB, ' not valid YAML: it has the alias *a, which no recipe needs'),
    'deep lists': ('[' * 40000, ' not valid YAML: maximum recursion depth exceeded'),
    'much text': ('#' * 50001, ' has more than 50,000 characters, so it is not a recipe.'),
    'a long number': ('seed: ' + '9' * 40000, ' not valid YAML: '),
    'a tag': ('!!python/object/apply:os.system [ls]', ' not valid YAML: could not determine a constructor for the tag'),
    'a character that is none': ('a\0b', ' not valid YAML: unacceptable character'),
}


@pytest.mark.parametrize('name', YAML)
def test_yaml_of_strangers_is_refused_at_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, message = YAML[name]
    (tmp_path / 'a.yaml').write_text(text)
    start = time.process_time()
    for refused, shown in ((lambda: Recipe.load('a.yaml'), "'a.yaml'"), (lambda: recipe(f'model_args={text}'), f"'model_args={text[:20]}")):
        with pytest.raises(ValueError) as e:
            refused()
        found = str(e.value)
        assert found.startswith(shown) and message in found and len(found) < 500
    assert time.process_time() - start < 10
    assert main(['distill', 'a.yaml', 'nowhere', 'out']) == 2 and capsys.readouterr().err.count('\n') == 1


def test_changes_of_what_is_not_there_and_files_that_are_no_text(tmp_path):
    for change in ('stages.1.fit.lr=1', 'stages.a=1', 'fit.lr.a=1', 'fit'):
        with pytest.raises(ValueError, match='Expected a change to a recipe, such as fit.lr=1e-3; got'):
            recipe(change)
    assert recipe('model=1e5foo').model == '1e5foo'
    (tmp_path / 'a.yaml').write_bytes(b'a: \xff')
    with pytest.raises(ValueError, match="a.yaml' is not valid YAML: .*invalid start byte"):
        Recipe.load(tmp_path / 'a.yaml')


@pytest.mark.parametrize('path', sorted(HUB.glob('*/*.yaml')), ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_recipes_of_published_models_load(path):
    made = Recipe.load(path)
    assert all('kd_weight' in {**(made.loss or {}), **(stage.loss or {})} for stage in made.stages if stage.task == 'trajectory')


def test_a_stage_with_no_epochs_is_left_out():
    made = Recipe.load('three_blocks', ['stages.0.fit.epochs=0'])
    assert 'steps: 6' in replace(made, ode={'steps': np.int64(6)}).to_yaml()
    assert made.stages == Recipe.load('three_blocks').stages[1:] and Recipe.from_dict(yaml.safe_load(made.to_yaml())) == made


# --- training

def test_stages_train_the_parts_that_they_name(vit, data, tmp_path):
    teacher = vit()
    made = recipe(ode={'phases': 2}, stages=[
        {'train': 'shared'}, {'train': ['tokens', 'pos_embed']},
        {'train': ['norm', 'head'], 'loss': {'task_weight': 1.}, 'fit': {'epochs': 1}}])
    history = run(made, data, tmp_path / 'run', teacher)
    assert [r['stage'] for r in history] == [0, 0, 1, 1, 2]
    states = [torch.load(tmp_path / 'run' / f'stage{i}' / 'last.pt', weights_only=True)['model'] for i in range(3)]
    first, second = ({name for name in states[0] if not torch.equal(a[name], b[name])} for a, b in zip(states, states[1:]))
    assert first == {'cls_token', 'pos_embed'} and {name.split('.')[0] for name in second} == {'norm', 'head'}
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    assert best.blocks.config.phases == 2 and not any(p.grad is not None for p in teacher.parameters())
    assert Recipe.load(tmp_path / 'run' / 'recipe.yaml') == made


def test_a_stage_is_validated_and_saved_with_steps_it_was_trained_with(vit, data, tmp_path):
    made = recipe(ode={'steps': 4}, loss={'steps': [['50%', '100%']]}, stages=[{'loss': {'steps': [2, '500%']}}, {}, {'task': 'labels'}])
    run(made, data, tmp_path / 'run', vit())
    config = [json.loads((tmp_path / 'run' / f'stage{i}' / 'best' / 'config.json').read_text()) for i in range(3)]
    assert [c['model_args']['ode_steps'] for c in config] == [2, 4, 4]


@pytest.mark.parametrize('given', [False, True], ids=['made by the recipe', 'given'])
def test_a_saved_student_was_trained_at_shares_of_the_steps_that_it_had_before(vit, data, tmp_path, given):
    made = recipe(ode={'steps': 8}, stages=[{'loss': {'steps': ['25%', '50%']}}, {'loss': {'steps': ['50%']}}])
    teacher = vit()
    student = convert_(copy.deepcopy(teacher), steps=8).model if given else None
    run(made, data, tmp_path / 'run', teacher, student=student)
    saved = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    trained = Recipe.load(tmp_path / 'run' / 'best' / 'recipe.yaml')
    assert saved.blocks.steps == 4 and trained.trained_at(4) == (4,) and trained.stages[0].loss == {'steps': [2, 4]}


def test_a_student_that_training_worsens_stays_as_it_was(vit, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(read, 'divided', lambda part, share: (taken(part, torch.arange(45)), taken(part, torch.arange(45, 50))))
    teacher = vit()
    with torch.no_grad():
        teacher.head.weight.zero_(), teacher.head.bias.copy_(torch.eye(5)[4])  # as all that are held out
    with np.load(data) as arrays:
        np.savez(data, **{**arrays, 'y_train': np.where(np.arange(50) < 45, arrays['y_train'] % 4, 4)})
    student = convert_(copy.deepcopy(teacher), steps=8).model
    start = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    made = recipe('fit.lr=0.1', stages=[{'loss': {'steps': [4], 'task_weight': 1., 'kd_weight': 0.}}])
    with pytest.warns(UserWarning, match=r"Training ended worse than it started: top-1 .* at best, top-1 100.0 %, loss .* before. '.*best' is as it was before"):
        train(made, data, tmp_path / 'run', teacher=teacher, student=copy.deepcopy(student))
    assert 'start: top-1 100.0 %, loss ' in capsys.readouterr().out
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    assert best.blocks.steps == 4 and all(torch.equal(tensor, start[name]) for name, tensor in best.state_dict().items())
    with pytest.warns(UserWarning, match='top-1 100.0 %, .* before'):
        run(made, data, tmp_path / 'run', teacher, student=copy.deepcopy(student), resume=True)


def test_a_stage_on_labels_does_not_compete_with_a_later_one_under_the_teacher(vit, data, tmp_path):
    run(recipe(stages=[{'task': 'labels'}, {}]), data, tmp_path / 'run', vit())
    best, first = (load_file(tmp_path / 'run' / of / 'model.safetensors') for of in ('best', 'stage0/best'))
    assert any(not torch.equal(best[name], tensor) for name, tensor in first.items())


def test_the_blocks_of_a_model_with_stages_are_a_part():
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=32, window_size=2, depths=(1, 1, 2, 1), embed_dim=24)
    found = _names_of(convert_(swin, method='euler').model, ['blocks'])
    assert found == {name for name, _ in swin.named_parameters() if '.blocks.' in name} and found


@pytest.mark.parametrize('part', PARTS)
def test_every_part_is_somewhere(vit, part):
    assert _names_of(convert_(vit(reg_tokens=1)).model, [part])


def test_from_scratch_without_a_teacher(data, tmp_path):
    made = Recipe.load('scratch', ['fit.epochs=8', 'fit.warmup_epochs=1', 'data={batch_size: 8, mixup: 0.2, smoothing: 0.1}',
                                   'fit.ema_decay=0.5', 'fit.lr=3e-3',
                                   f'model_args={json.dumps({**TINY, "ode_steps": 3})}', 'model_args.num_classes=null'])
    history = run(made, data, tmp_path / 'run')
    assert history[-1]['task_loss'] < history[0]['task_loss'] and math.isfinite(history[-1]['jasmin_loss'])
    assert timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True).num_classes == 5  # as the data
    assert 'kd_loss' not in history[0] and 'NaN' not in (tmp_path / 'run' / 'history.json').read_text()
    with pytest.raises(ValueError, match='trajectory_weight needs a teacher'):
        run(Recipe.load('scratch', ['loss.trajectory_weight=1', f'model_args={json.dumps(TINY)}']), data, tmp_path / 'new')
    assert not (tmp_path / 'new').exists()


def named(data, path, names):
    with np.load(data) as arrays:
        np.savez(path, **arrays, classes=np.asarray(names))
    return path


def test_the_names_of_the_classes_stay_with_the_model(vit, data, tmp_path):
    names = ['ant', 'bee', 'cat', 'dog', 'eel']
    known = named(data, tmp_path / 'named.npz', names)
    tuned = Recipe.load('finetune', ['fit.epochs=1', 'fit.warmup_epochs=0', 'data.batch_size=8', 'model=vit_tiny_patch16_224',
                                     f'model_args={json.dumps(TINY)}'])
    run(tuned, known, tmp_path / 'tuned')
    model = timm.create_model(f"local-dir:{tmp_path / 'tuned' / 'best'}", pretrained=True)
    assert model.pretrained_cfg['label_names'] == names and not model.pretrained_cfg.get('tag')  # it was of other classes
    run(recipe('fit.epochs=1'), data, tmp_path / 'distilled', model)  # this data has no names
    student = timm.create_model(f"local-dir:{tmp_path / 'distilled' / 'best'}", pretrained=True)
    assert student.pretrained_cfg['label_names'] == names and student.blocks.steps == 3
    run(tuned, data, tmp_path / 'unnamed', student=model)  # these may be other classes
    assert not timm.create_model(f"local-dir:{tmp_path / 'unnamed' / 'best'}").pretrained_cfg.get('label_names')
    with pytest.raises(ValueError, match=r'must hold classes, a name for each label from 0 to 4; got <U3 \[2\]'):
        run(tuned, named(data, tmp_path / 'two.npz', names[:2]), tmp_path / 'other')


def test_recipes_that_learn_from_no_labels_take_images_without(vit, data, tmp_path):
    teacher, images = vit(), torch.randn(40, 3, 16, 16)
    for given, why in ((images, 'there are none'), ((images, torch.arange(40)), 'Labels must be whole numbers from 0 to 4')):
        with pytest.warns(RuntimeWarning, match=f'Labels are not used, because {why}'):
            history = run(recipe('fit.epochs=1'), given, tmp_path / why[:5], teacher)
        assert history[0]['val_error'] > 0
    with pytest.raises(ValueError, match='labels'):
        run(recipe('loss.task_weight=1.0'), images, tmp_path / 'c', teacher)


def test_accumulation_is_a_larger_batch(vit, data, tmp_path):
    teacher = vit()
    plain = ['data.padding=0', 'data.flip=0', 'loss.trajectory_weight=0', 'fit.opt=sgd']
    one = run(recipe(*plain, 'data.batch_size=8'), data, tmp_path / 'a', teacher)
    two = run(recipe(*plain, 'data.batch_size=4', 'fit.accumulate=2'), data, tmp_path / 'b', teacher)
    assert [r['loss'] for r in two] == pytest.approx([r['loss'] for r in one], rel=1e-4)


def test_gradient_checkpointing_changes_no_loss_and_runs_the_steps_again(vit, data, tmp_path, monkeypatch):
    teacher, calls = vit(), []
    forward = NativeField.forward
    monkeypatch.setattr(NativeField, 'forward', lambda *args, **kwargs: calls.append(torch.is_grad_enabled()) or forward(*args, **kwargs))
    made = recipe(ode={'method': 'euler'}, stages=[{}])
    one = run(made, data, tmp_path / 'a', teacher)
    plain = sum(calls)
    two = run(replace(made, grad_checkpointing=True), data, tmp_path / 'b', teacher)
    assert [r['loss'] for r in two] == pytest.approx([r['loss'] for r in one], rel=1e-5)
    assert sum(calls) - plain > 1.5 * plain


@pytest.mark.parametrize('change', ['loss.steps=[[2, 3]]', 'loss.patch_drop=0.5'])
def test_compiles_the_blocks_in_one_graph_for_all_layers_and_steps(vit, data, tmp_path, monkeypatch, change):
    teacher, wrap, graphs = vit(), torch.compile, []
    monkeypatch.setattr(torch, 'compile', lambda forward: wrap(forward, backend=lambda graph, _: graphs.append(1) or graph))
    one = run(recipe(change), data, tmp_path / 'a', teacher)
    assert not graphs
    two = run(recipe(change, 'fit.compile=true'), data, tmp_path / 'b', teacher)
    assert len(graphs) <= 7  # attention and MLP in training, in evaluation, and there for a last batch; the teacher's block
    assert [r['loss'] for r in two] == pytest.approx([r['loss'] for r in one], rel=1e-4)
    assert not any('forward' in vars(module) for module in teacher.modules())
    torch._dynamo.reset()


# --- faults

def command(out, *changes):
    return ['distill', 'quick.yaml', 'data.npz', out, '--teacher', 'local-dir:teacher', '--device', 'cpu', '--threads', '1',
            '--quiet', *(word for change in changes for word in ('--set', change))]


@pytest.fixture
def place(vit, data, tmp_path):
    save_pretrained(vit(), tmp_path / 'teacher')
    (tmp_path / 'quick.yaml').write_text(recipe(stages=[{'loss': {'steps': [2, 3]}}, {}]).to_yaml())
    return tmp_path


def weights(folder):
    return torch.load(folder / 'stage1' / 'last.pt', weights_only=True)['model']


def child(folder, args, before, printed):
    os.chdir(folder)
    sys.stdout = sys.stderr = open(printed, 'w')  # also for what an exception says
    if before is not None:
        before()
    sys.exit(main(args))


def forked(args, before=None, printed='printed'):
    """Run a command in a process of its own, which need not import torch again; what it prints goes to a file.

    It is forked from a process that has computed nothing: after some gradients, PyTorch's threads forbid a fork.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['timm_odevit.cli'])
    process = context.Process(target=child, args=(os.getcwd(), args, before, printed), daemon=True)
    process.start()
    return process


def in_environment(values):
    FileLock.acquire = None if values['RANK'] == '1' else FileLock.acquire  # the first process alone locks
    os.environ.update(values)


def no_more_room(room):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))


def test_killed_at_any_moment_a_run_goes_on_to_the_same_weights(place, monkeypatch):
    monkeypatch.chdir(place)
    changes, kills = ['fit.epochs=4', 'fit.ema_decay=0.9'], 0
    assert main(command('whole', *changes)) == 0
    for wait in ('stage0/last.pt', 'stage0/history.json', 'stage1/last.pt', None):
        process = forked([*command('killed', *changes), *(['--resume'] if kills else [])])
        if wait is None:
            process.join()
            assert process.exitcode == 0
            break
        while not (place / 'killed' / wait).exists() and process.is_alive():
            time.sleep(0.002)
        time.sleep(0.03 * kills)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    ours, theirs = weights(place / 'killed'), weights(place / 'whole')
    assert kills == 3 and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    strip = [[{k: v for k, v in r.items() if k != 'seconds'} for r in json.loads((place / name / 'history.json').read_text())]
             for name in ('killed', 'whole')]
    assert json.dumps(strip[0]) == json.dumps(strip[1])


def test_the_stages_share_the_minutes_and_a_resumed_run_keeps_what_was_planned(place, monkeypatch, capsys):
    """The second stage has a third of the solver steps and twice the epochs of the first: two fifths of the time."""
    monkeypatch.chdir(place)
    monkeypatch.setattr('timm_odevit.training.fit.LONG', 0.)
    words = [*command('run', 'stages.0.loss.steps=[3]', 'stages.1.loss={steps: [1]}', 'stages.1.fit={epochs: 4}'), '--minutes', '0.1']
    assert main(words) == 0
    run = json.loads((place / 'run' / 'run.json').read_text())
    first, second = run['plan']['minutes']
    assert run['minutes'] == 0.1 and 0.03 <= first < 0.06 and 0.02 - 1e-9 <= second <= max(0.1 - first, 0.02) + 1e-9
    state = torch.load('run/stage1/last.pt', weights_only=True)
    history = json.loads((place / 'run' / 'history.json').read_text())
    assert Recipe.load('run/recipe.yaml').fit_of(Recipe.load('run/recipe.yaml').stages[1]).epochs == 4
    assert len([r for r in history if r['stage'] == 1]) == state['plan']['epochs']
    assert main(['distill', '--resume', 'run', '--quiet']) == 0  # from the folder
    assert main([*words, '--resume']) == 0  # the same command
    assert json.loads((place / 'run' / 'run.json').read_text())['plan'] == run['plan']
    assert json.loads((place / 'run' / 'history.json').read_text()) == history
    assert main([*words[:-1], '8', '--resume']) == 2 and 'was made with minutes 0.1, but this run has 8.0' in capsys.readouterr().err
    words[3] = 'busy'
    assert main([*words[:-1], '1e-4']) == 0  # on a machine that is busy, each stage has half of its share
    assert json.loads((place / 'busy' / 'run.json').read_text())['plan']['minutes'] == pytest.approx([3e-5, 2e-5])


@pytest.mark.parametrize('text', ['{"limit": nu', '[1]', '3', '{"plan": 3}', '\xff'])
def test_a_damaged_plan_is_named_with_what_to_do(vit, data, tmp_path, text):
    teacher = vit()
    run(recipe('fit.epochs=1'), data, tmp_path / 'run', teacher)
    (tmp_path / 'run' / 'run.json').write_text(text, encoding='latin-1')
    with pytest.raises(ValueError, match="run.json' is damaged. Start again in another folder"):
        run(recipe('fit.epochs=1'), data, tmp_path / 'run', teacher, resume=True)


def test_each_stage_trains_its_own_steps_also_after_an_interrupt_which_changes_nothing_else(vit, data, tmp_path, monkeypatch):
    student, teacher = pair(vit)
    made = recipe('stages.0.fit.epochs=2', ode=None, stages=[{'train': ['blocks']}, {'loss': {'steps': [2]}}])
    again, epoch, seen = copy.deepcopy(student), Trainer.epoch, []

    def once(trainer, *args):
        seen.append((trainer.task.title, student.blocks.steps))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return epoch(trainer, *args)
    monkeypatch.setattr(Trainer, 'epoch', once)
    with pytest.raises(KeyboardInterrupt):
        run(made, data, tmp_path / 'run', teacher, student=student)
    assert all(p.requires_grad for p in student.parameters())
    student = again
    run(made, data, tmp_path / 'run', teacher, student=again, resume=True)
    assert [steps for _, steps in seen] == [3, 3, 3, 2, 2]


def test_a_disk_that_is_full_stops_with_a_message_and_keeps_the_last_state(place, monkeypatch):
    monkeypatch.chdir(place)
    assert main(command('run', 'fit.epochs=1')) == 0
    before = {p: p.read_bytes() for p in (place / 'run').rglob('*') if p.is_file()}
    room = (place / 'run' / 'stage1' / 'last.pt').stat().st_size // 2
    process = forked([*command('run', 'fit.epochs=1', 'stages.1.fit.epochs=2'), '--resume'], partial(no_more_room, room))
    process.join()
    printed = (place / 'printed').read_text()
    assert process.exitcode == 2, printed
    assert 'odevit: error: ' in printed and printed.count('\n') == 1
    after = {p: p.read_bytes() for p in (place / 'run').rglob('*') if p.is_file()}
    changed = {str(p.relative_to(place)) for p in after if after[p] != before.get(p)}
    assert changed <= {'run/recipe.yaml', 'run/stage1/history.json', *(f'run/stage1/best/{n}' for n in ('config.json', 'model.safetensors'))}


def test_weights_that_are_not_finite_are_not_written(vit, data, tmp_path, monkeypatch):
    teacher = vit()
    run(recipe('fit.epochs=1', 'fit.opt=adamw'), data, tmp_path / 'run', teacher)
    before = (tmp_path / 'run' / 'stage0' / 'last.pt').read_bytes()
    step = torch.optim.AdamW.step
    calls = []

    def spoil(self, *args, **kwargs):
        calls.append(step(self, *args, **kwargs))
        if len(calls) == 5:  # the last update of the epoch
            self.param_groups[0]['params'][0].data.fill_(math.nan)
    monkeypatch.setattr(torch.optim.AdamW, 'step', spoil)
    with pytest.raises(FloatingPointError, match='weights are not finite after epoch 2'):
        run(recipe('fit.epochs=2', 'fit.opt=adamw'), data, tmp_path / 'run', teacher, resume=True)
    assert (tmp_path / 'run' / 'stage0' / 'last.pt').read_bytes() == before


@pytest.mark.parametrize('changes, message', [
    (['model=vit_tiny_patch16_224'], 'The recipe names a model'), (['model_args={drop_rate: 0.5}'], 'The recipe names a model'),
    (['fit.accumulate=99'], 'has fewer than 99 batches'), (['ode=null', 'stages.0.task=labels'], 'would not be made from the teacher'),
    (['stages=[{}, {train: [tokens]}]'], "stages.1: the model has no parameters of the part 'tokens'"),
])
def test_models_that_do_not_fit_a_recipe_are_refused_before_anything_is_written(vit, data, tmp_path, changes, message):
    with pytest.raises(ValueError) as e:
        run(recipe(*changes), data, tmp_path / 'run', teacher := vit(class_token=False, global_pool='avg').train())
    assert message in str(e.value) and not (tmp_path / 'run').exists()
    assert teacher.training and all(p.requires_grad for p in teacher.parameters())


def test_a_rehearsal_is_not_resumed_as_the_run(vit, data, tmp_path):
    teacher = vit()
    run(recipe(), data, tmp_path / 'run', teacher, limit=16)
    with pytest.raises(ValueError, match='was made with limit 16, but this run has None'):
        run(recipe(), data, tmp_path / 'run', teacher, resume=True)
    with pytest.raises(ValueError, match="The teacher of the run in '.*' is not this one's. Resume with"):
        run(recipe(), data, tmp_path / 'run', vit(), resume=True, limit=16)
    arrays = dict(np.load(data))
    for key in ('x_train', 'y_train'):  # other images, other labels
        np.savez(tmp_path / 'other.npz', **{**arrays, key: arrays[key][::-1]})
        with pytest.raises(ValueError, match="The data of the run in '.*' is not this one's. Resume with"):
            run(recipe(), tmp_path / 'other.npz', tmp_path / 'run', teacher, resume=True, limit=16)


def test_tuples_are_lists_and_fewer_epochs_are_refused(vit, data, tmp_path):
    made = Recipe(ode={'blocks': (0, 2)}, data={'batch_size': 8}, loss={'steps': (2, 3)}, fit={'epochs': 2}, stages=(Stage(),))
    teacher = vit()
    run(made, data, tmp_path / 'run', teacher)
    assert len(run(made, data, tmp_path / 'run', teacher, resume=True)) == 2
    fewer = Recipe.load(tmp_path / 'run' / 'recipe.yaml', ['fit.epochs=1'])
    with pytest.raises(ValueError, match='already has 2 epochs'):
        run(fewer, data, tmp_path / 'run', teacher, resume=True)


def test_more_epochs_are_remembered_if_they_are_interrupted(vit, data, tmp_path):
    def interrupted(record):
        raise KeyboardInterrupt
    teacher = vit()
    run(recipe(), data, tmp_path / 'run', teacher)
    with pytest.raises(KeyboardInterrupt):
        run(recipe('fit.epochs=3'), data, tmp_path / 'run', teacher, resume=True, on_epoch=interrupted)
    assert len(run(Recipe.load(tmp_path / 'run' / 'recipe.yaml'), data, tmp_path / 'run', teacher, resume=True)) == 3


# --- several processes

def by_torchrun(args):
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'timm_odevit.cli', *args]
    done = subprocess.run(launch, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def by_fork(args):
    """As torchrun does it, in processes that need not import torch again."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        where = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free.getsockname()[1]), 'WORLD_SIZE': '2'}
    processes = [forked(args, partial(in_environment, {**where, 'RANK': rank, 'LOCAL_RANK': rank}), f'printed {rank}') for rank in '01']
    for process in processes:
        process.join()
    printed = ''.join(Path(f'printed {rank}').read_text() for rank in '01')
    assert [process.exitcode for process in processes] == [0, 0], printed
    return printed


@pytest.mark.parametrize(('start', 'more'), [
    (by_torchrun, []),
    (by_fork, ['stages=[{task: trajectory, fit: {ema_decay: 0.9}}, {task: trajectory, loss: {steps: [2, 3]}}]', 'ode={phases: 2}'])], ids=['one block', 'two blocks'])
def test_two_processes_give_the_losses_of_one_with_the_doubled_batch(place, monkeypatch, start, more):
    monkeypatch.chdir(place)
    changes = [*more, 'fit.epochs=1', 'data.padding=0', 'data.flip=0', 'loss.jasmin_weight=0.1', 'loss.task_weight=0.5']
    assert main(command('one', *changes, 'data.batch_size=8')) == 0
    assert start(command('two', *changes, 'data.batch_size=4')).count('saved two/best') == 1
    histories = [json.loads((place / name / 'history.json').read_text()) for name in ('one', 'two')]
    for ours, theirs in zip(*histories, strict=True):
        for key in ours:
            if key not in ('seconds', 'amp'):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key
    ours, theirs = weights(place / 'two'), weights(place / 'one')
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-2, atol=1e-3)


def test_the_model_says_what_was_held_out_of_its_training(vit, data, tmp_path):
    run(recipe('data.held_out=0.25', stages=[{'task': 'labels'}], ode=None), data, tmp_path / 'run', student=vit())
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    assert read.held_out_of(best) == 0.25 and read.held_out_of(vit()) is None
    run(recipe('data.held_out=0.5', stages=[{'task': 'labels'}], ode=None), data, tmp_path / 'on', student=best)
    assert read.held_out_of(timm.create_model(f"local-dir:{tmp_path / 'on' / 'best'}", pretrained=True)) == 0.25


def test_a_refused_run_leaves_the_student_as_it_was(vit, data, tmp_path):
    student = vit()
    before = snapshot(student), student.pretrained_cfg, student.grad_checkpointing
    with pytest.raises(ValueError, match='fewer than 99 batches'):
        run(recipe('fit.accumulate=99', 'grad_checkpointing=true', stages=[{'task': 'labels'}], ode=None), data, tmp_path / 'new' / 'run', student=student)
    assert not (tmp_path / 'new').exists() and (snapshot(student), student.pretrained_cfg, student.grad_checkpointing) == before
