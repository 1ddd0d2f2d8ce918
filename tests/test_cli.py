import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import TINY
from PIL import Image

from timm_odevit import Recipe, __version__, convert_, save_pretrained
from timm_odevit.cli import COMMANDS, main
from timm_odevit.training.recipe import builtin_recipes

ROOT = Path(__file__).parent.parent
RECIPE, T = ['--set', 'data.batch_size=8', '--set', 'data.workers=0'], ['--teacher', 'local-dir:teacher']


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with images/, teacher/ and student/, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for label, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        (tmp_path / 'images' / f'c{label}').mkdir(parents=True)
        for i in range(10):
            Image.new('RGB', (18, 18), tuple(max(0, c - i) for c in colour)).save(tmp_path / 'images' / f'c{label}' / f'{i}.png')
    save_pretrained(teacher := timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 3}), tmp_path / 'teacher')
    save_pretrained(convert_(teacher).model, tmp_path / 'student')
    return tmp_path


def run(command, *args):
    quick = {'calibrate': ['--workers', '0', '--quiet'], 'evaluate': ['--workers', '0', '--quiet'], 'distill': ['--quiet']}.get(command, [])
    if command == 'distill' and not any(a.endswith('.npz') for a in args):
        quick = ['--quiet', '--set', 'data.workers=0']
    return main([command, *args, *([] if '--workers' in args else quick), '--device', 'cpu'])


def test_convert_distill_evaluate(folder, capsys, monkeypatch):
    def meanwhile(*args, **settings):
        assert run('convert', 'local-dir:teacher', 'new') == 2 and "'new' is in use by another process" in capsys.readouterr().err
        return convert_(*args, **settings)
    monkeypatch.setattr('timm_odevit.cli.train.convert_', meanwhile)
    assert run('convert', 'local-dir:teacher', 'new', '--steps', '6') == 0
    assert '6 steps on [0, 3], 6 evaluations' in capsys.readouterr().out
    assert timm.create_model('local-dir:new').blocks.steps == 6
    distill = ['distill', 'autonomous', 'images', 'run', '--student', 'local-dir:new', *T, '--set', 'data.batch_size=8', '--set',
               'loss={checkpoints: distance, jasmin_weight: 0.1}', '--set', 'fit.ema_decay=0.9', '--set', 'stages.0.fit.epochs=1']
    assert run(*distill, '--set', 'stages.1.fit.epochs=2') == 0
    assert run(*distill, '--set', 'stages.1.fit.epochs=3', '--set', 'fit.opt=adamw', '--set', 'data.workers=0', '--resume') == 2
    assert "'run/recipe.yaml' is a different recipe: fit.opt was muon and is adamw. Resume with that" in capsys.readouterr().err
    assert run('distill', '--resume', 'run', '--set', 'stages.1.fit.epochs=3') == 0
    assert len(json.loads((folder / 'run' / 'history.json').read_text())) == 4
    capsys.readouterr()
    assert run('evaluate', 'local-dir:run/best', 'images', *T, '--steps', '1-2,6', '--json', 'found.json') == 0
    assert [r['steps'] for r in json.loads((folder / 'found.json').read_text())] == [None, 1, 2, 6]
    assert (out := capsys.readouterr().out).count('student') == 3 and out.startswith('images: 30 images; trained with K = 2, 3, 6, in bold')


@pytest.mark.parametrize('source, options, expected', [
    ('local-dir:teacher', ['--phases', '2', '--tokens', '0.5'], dict(phases=2, tokens=0.5)),
    ('local-dir:teacher', ['--blocks', '1,2'], dict(blocks=(1, 2))),
    ('vit_tiny_patch16_224', ['--random', '--img-size', '32', '--field', 'lipschitz', '--method', 'euler', '--init', 'spectral', '--T', '6'],
     dict(T=6., field='lipschitz', method='euler', init='spectral'))])
def test_convert_takes_every_setting(folder, source, options, expected):
    assert run('convert', source, 'new', *options) == 0
    model = timm.create_model('local-dir:new', pretrained=True)
    assert all(getattr(model.blocks.config, name) == value for name, value in expected.items())
    assert model.num_classes == (1000 if '--random' in options else 3)


def test_a_head_from_a_file_is_kept(folder):
    state = timm.create_model('vit_tiny_patch16_224', num_classes=10).state_dict()
    torch.save({'state_dict': state}, 'weights.pth')
    assert run('convert', 'vit_tiny_patch16_224', 'a', '--checkpoint', 'weights.pth', '--img-size', '32') == 0
    assert torch.equal(timm.create_model('local-dir:a', pretrained=True).head.weight, state['head.weight'])


def test_a_checkpoint_takes_the_place_of_saved_weights_and_may_have_two_heads(folder):
    state = timm.create_model('local-dir:teacher', pretrained=True).state_dict()
    state['head.weight'] = torch.full_like(state['head.weight'], 7.)
    torch.save(state, 'weights.pth')
    assert run('convert', 'local-dir:teacher', 'a', '--checkpoint', 'weights.pth') == 0
    assert (timm.create_model('local-dir:a', pretrained=True).head.weight == 7).all()
    two = timm.create_model('deit_tiny_distilled_patch16_224', num_classes=4)
    torch.save(two.state_dict(), 'two.pth')
    assert run('convert', 'deit_tiny_distilled_patch16_224', 'b', '--checkpoint', 'two.pth') == 0
    assert torch.equal(timm.create_model('local-dir:b', pretrained=True).head_dist.weight, two.head_dist.weight)


def test_image_towers_are_models_like_others(folder, capsys):
    transformers = pytest.importorskip('transformers')
    tower = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.CLIPConfig(text_config={**tower, 'vocab_size': 99}, projection_dim=24,
                                     vision_config={**tower, 'image_size': 16, 'patch_size': 4})
    transformers.CLIPModel(config).half().save_pretrained('clip')
    assert run('benchmark', 'transformers:clip', '--rounds', '1', '--batch-size', '1') == 0
    assert run('finetune', 'transformers:clip', 'images', 'tuned', '--set', 'fit.epochs=1', '--set', 'data.batch_size=8', '--set', 'data.workers=0') == 0


def test_a_teacher_of_another_size_from_a_file_teaches_a_student_of_that_size(folder, capsys):
    teacher = ['vit_tiny_patch16_224', '--checkpoint', 'weights.pth', '--img-size', '32']
    torch.save(timm.create_model('vit_tiny_patch16_224', num_classes=3, depth=12).state_dict(), 'weights.pth')
    assert run('convert', teacher[0], 'new', *teacher[1:]) == 0
    assert run('calibrate', 'local-dir:new', 'images', 'fitted', '--epochs', '1', '--teacher', *teacher) == 0
    new, fitted = (timm.create_model(f'local-dir:{name}', pretrained=True).blocks for name in ('new', 'fitted'))
    assert fitted.config == new.config and not torch.equal(fitted.shared.block.mlp.fc1.weight, new.shared.block.mlp.fc1.weight)
    assert run('distill', 'autonomous', 'images', 'run', '--student', 'local-dir:fitted', '--teacher', *teacher, '--set', 'data.batch_size=8',
               '--set', 'data.workers=0', '--set', 'stages.0.fit.epochs=0', '--set', 'stages.1.fit.epochs=1') == 0
    assert '--teacher' not in capsys.readouterr().out.splitlines()[-1]
    assert run('distill', '--resume', 'run') == 0
    best = timm.create_model('local-dir:run/best', pretrained=True)
    assert best.patch_embed.img_size == (32, 32) and best.num_classes == 3
    assert run('distill', 'scratch', 'images', 'other', '--img-size', '32') == 2
    assert '--img-size and --checkpoint are those of the teacher' in capsys.readouterr().err


CONVERT, DISTILL = ['convert', 'local-dir:teacher', 'new'], ['distill', 'autonomous', 'images', 'new', '--teacher', 'local-dir:teacher']
MISTAKES = [
    *(([*CONVERT, *options], message) for options, message in (
        (['--size', '60%', '--phases', '3'], '--size chooses the phases. Leave out --phases or --size.'),
        (['--size', '100'], 'of 40,419 parameters is too little'), (['--size', '30%'], 'of 3 blocks is too little'),
        (['--phases', '4', '--T', 'none'], 'phases=4: there are 3 layers'))),
    (['convert', 'vit_tiny_patch16_22', 'new'], "Unknown model (vit_tiny_patch16_22). Did you mean 'vit_tiny_patch16_224'?"),
    (['convert', 'deit_tiny_patch16_128.cifar10O', 'new'], "Did you mean 'deit_tiny_patch16_128.cifar100'?"),
    (['convert', 'teacher', 'new'], 'For a saved model, type local-dir:teacher'),
    (['convert', 'local-dir:nowhere', 'new'], 'Config file not found: nowhere/config.json'),
    (['convert', 'local-dir:damaged', 'new'], "Cannot build 'local-dir:damaged'"),
    (['convert', 'local-dir:cut', 'new'], "Cannot build 'local-dir:cut'"),
    (['convert', 'vit_tiny_patch16_224', 'new', '--checkpoint', 'cut.pth'], "Cannot build checkpoint 'cut.pth'"),
    (['convert', 'vit_tiny_patch16_224', 'new', '--checkpoint', 'no.pth'], "Cannot build checkpoint 'no.pth'"),
    (['convert', 'vit_tiny_patch16_224', 'new'], 'Without a network, give --checkpoint FILE or local-dir:FOLDER'),
    (['distill', 'autonomous', 'nowhere', 'new', '--teacher', 'local-dir:teacher'], "There is no 'nowhere'"),
    (['distill', 'autonomous', 'images', 'new', '--student', 'local-dir:student', '--teacher', 'local-dir:other'], 'differ in num_classes: 3 and 7'),
    (['distill', 'autonomous', 'images', 'new'], 'The recipe names no model, and there is no teacher. Give --teacher'),
    (['distill', 'autonomous', 'images', 'new', '--student', 'local-dir:nowhere', '--teacher', 'local-dir:teacher'], 'Config file not found'),
    (['distill', 'autonomos', 'images', 'new', '--teacher', 'local-dir:teacher'], "There is no recipe 'autonomos'. Did you mean 'autonomous'?"),
    (['distill', 'autonomous', 'images', 'new', '--student', 'local-dir:student', '--teacher', 'local-dir:teacher', '--set', 'ode.phases=3'],
     "'ode.phases=3' says how to make a student, but --student gives one"),
    *(([*DISTILL, '--set', change], message) for change, message in (
        ('fit.opt=adamv', "Unknown opt 'adamv'. Did you mean 'adam"),
        ('fit.optt=sgd', "fit has an unknown key 'optt'. Did you mean 'opt'?"),
        ('data.held_out=0', 'held_out must be a number between 0 and 1'))),
    (['evaluate', 'local-dir:teacher', 'images', '--steps', '1,2'], 'is not an ODE-ViT'),
    (['evaluate', 'local-dir:student', 'two'], "'two' has 2 classes"), (['convert', 'local-dir:student', 'again'], 'or give the original model'),
    (['evaluate', 'local-dir:student', 'images', '--teacher', 'local-dir:large'], "Input height (16) doesn't match model (32)"),
    (['evaluate', 'local-dir:student', 'images', '--json', 'images'], "'images': it is no file"),
    (['benchmark', 'local-dir:teacher', '--json', 'nowhere/a.json'], "'nowhere/a.json': it is no file, or its folder does not exist"),
    (['push', 'local-dir:teacher', 'org/name', '--results', 'none.json'], "No such file or directory: 'none.json'"),
    (['distill', '--resume', 'images'], "'images' is not a run of odevit distill"),
    (['distill', 'autonomous', 'images'], 'Expected RECIPE DATA OUT, or only --resume FOLDER; got autonomous images'),
    (['finetune', 'local-dir:teacher', '--recipe', 'autonomous', 'images', 'out'], 'odevit finetune trains on labels'),
    (['finetune', 'local-dir:teacher', 'images', 'out', '--set', 'model=vit_tiny_patch16_224'], "The first argument is the model, 'local-dir:teacher'. Leave"),
    (['shrink', 'open_clip:ViT-Tiny/none', 'images', 'out'], "Cannot build 'open_clip:ViT-Tiny"), (['finetune', 'local-dir:teacher', 'one', 'out'], 'has one class'),
    (['shrink', 'transformers:nowhere', 'images', 'out'], "Cannot build 'transformers:nowhere'"),
    (['shrink', 'open_clip:ViT-B-16/none', 'images', 'out', '--img-size', '96'], 'Leave out --random, --checkpoint, --img-size'),
    (['distill', 'scratch', 'images', 'new', '--set', 'model_args.num_heads=5'], "Cannot build 'odevit_tiny_patch4_32'"),
    (['predict', 'local-dir:teacher', 'images/c0/0.png', '--steps', '6'], 'it is not an ODE-ViT'),
    (['export', 'local-dir:teacher', 'a.onnx', '--images', 'images'], '--images is for 4 bits. Add --bits 4'),
    (['script', 'none.py'], "There is no script 'none.py'"),
    (['predict', 'none.pt2', 'images'], "Cannot run 'none.pt2': "),
]


@pytest.mark.parametrize('args, message', MISTAKES, ids=[' '.join(m[0])[:60] for m in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(folder, capsys, args, message):
    for name in ('damaged', 'two/c0', 'two/c1', 'one/c0'):
        (folder / name).mkdir(parents=True)
    for name in ('two/c0', 'two/c1', 'one/c0'):
        shutil.copy('images/c0/0.png', folder / name)
    (folder / 'damaged' / 'config.json').write_text('[1]')
    shutil.copytree('teacher', 'cut')
    (folder / 'cut' / 'model.safetensors').write_bytes((folder / 'teacher' / 'model.safetensors').read_bytes()[:1000])
    torch.save(torch.zeros(1000), folder / 'cut.pth')
    (folder / 'cut.pth').write_bytes((folder / 'cut.pth').read_bytes()[:1500])
    save_pretrained(timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 7}), folder / 'other')
    save_pretrained(timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 3, 'img_size': 32}), folder / 'large')
    before = sorted(folder.rglob('*'))
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith('odevit: error: ') and err.count('\n') == 1
    assert sorted(folder.rglob('*')) == before


@pytest.mark.parametrize('args, message', [
    (['evaluate', 'a', 'b', '--steps', '1,x'], "expected whole numbers of at least 1, such as 6 or 1-6,12,24; got '1,x'"),
    (['evaluate', 'a', 'b', '--steps', '12-6,24'], "got '12-6,24'"), (['distill', 'a', 'b', 'c', '--limit', '0'], "got '0'"),
    (['benchmark', 'a', '--batch-size', '1,all'], "got '1,all'"),
    ([*CONVERT, '--metod', 'euler'], "unrecognized arguments: --metod euler. Did you mean '--method'? See odevit convert --help"),
    (['calibrate', 'a', 'b', 'c'], 'required: --teacher'), ([], 'required'),
    (['finetune', 'a', 'b', 'c', '--epochs', '3'], 'A setting of the recipe? Type it as in --set data.batch_size=32. See'),
])
def test_arguments(capsys, args, message):
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize('device', ['nowhere', 'cuda:99'])
def test_a_device_that_is_not_there(capsys, device):
    assert main(['benchmark', 'a', '--device', device]) == 2
    err = capsys.readouterr().err
    assert f"--device '{device}' cannot be used here" in err and err.count('\n') == 1


def test_help_names_every_option_with_a_word_on_it(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as e:
            main([command, '--help'])
        assert e.value.code == 0
        assert not re.search(r'^  --\w[\w-]*( [A-Z_]+)?\n  -', capsys.readouterr().out, re.M), f'{command} has an option without help'


@pytest.mark.parametrize('defect', [lambda: 1 + '', lambda: int('x'), lambda: (lambda: None)(1), lambda: torch.nn.Module().add_module('a', 1)])
def test_a_defect_of_the_program_shows_its_traceback(folder, monkeypatch, defect):
    monkeypatch.setattr('timm_odevit.cli.evaluate.evaluate_classes', lambda *args, **options: defect())
    with pytest.raises((TypeError, ValueError)):
        run('evaluate', 'local-dir:student', 'images')


@pytest.mark.parametrize('arguments, output', [
    (['--help'], '    shrink    Make a small student'), (['--version'], f'odevit {__version__}'), (['recipe', 'list'], 'autonomous   One shared block'),
    (['evaluate', '--help'], 'usage: odevit evaluate')])
def test_the_console_script_answers_at_once_because_help_needs_no_torch(arguments, output):
    code = "import sys; sys.modules['torch'] = None; from timm_odevit_cli import main; sys.exit(main())"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, '-c', code, *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    assert output in done.stdout and time.perf_counter() - began < 2  # 0.2 s; a busy machine is slower, and torch takes 3.7 s


def run_chain(page, name, words_for, quick, capsys):
    """What each command of a page prints, with words for others of its own, and settings that make it quick."""
    text, printed = (ROOT / 'examples' / page).read_text(), {}
    block = re.search(rf'<!-- {name} -->\n```bash\n(.*?)```', text, re.S)[1]
    for line in re.sub(r'^#.*\n|\\\n', '', block, flags=re.M).splitlines():
        _, command, *words = shlex.split(line, comments=True)
        words = [words_for.get(word, word) for word in words if words_for.get(word, word)]
        assert main([command, *words, *quick.get(words[0], quick.get(command, [])), '--quiet' if command in quick else '--device=cpu']) == 0, line
        printed[command] = capsys.readouterr().out
    return printed


def test_the_whole_chain_on_ones_own_images(folder, capsys):
    """The commands of examples/your-images.md, on a tiny model."""
    shutil.rmtree('student')
    shutil.copy('images/c1/0.png', 'photo.jpg')
    tiny = {'deit_tiny_patch16_224': 'local-dir:teacher', '25%': '90%', '6': '3',
            'small.onnx': 'small.pt2', '--bits': '', '4': '', '--int8': '', '--images=images': ''}  # which needs no other package
    quick = {'finetune': [*RECIPE, '--set', 'fit.epochs=1'], 'calibrate': ['--epochs', '1', '--workers', '0'],
             'distill': [*RECIPE, *(f'--set=stages.{i}.fit.epochs=1' for i in range(2))], 'evaluate': ['--workers', '0']}
    printed = run_chain('your-images.md', 'chain', tiny, quick, capsys)
    assert list(printed) == ['finetune', 'convert', 'calibrate', 'distill', 'evaluate', 'export', 'predict', 'push']
    hint = 'odevit evaluate local-dir:tuned/best images --held-out 0.1'
    assert hint in printed['finetune'] and timm.create_model('local-dir:tuned/best').pretrained_cfg['label_names'] == ['c0', 'c1', 'c2']
    assert printed['evaluate'].startswith('the share 0.1 held out of training of images: 4 images; trained with K = 3, in bold')
    for option in (['--steps', '6'], ['--any-steps']):
        with pytest.warns(RuntimeWarning, match='was trained with K = 3 alone, not (6|any)'):
            run('export', 'local-dir:run/best', 'any.onnx', '--overwrite', *option)
    first, *classes = printed['predict'].splitlines()
    assert first == 'photo.jpg' and len(classes) == 3 and re.fullmatch(r'  [ \d]{3}\.\d %  c[0-2]', classes[0])
    assert printed['push'] == 'wrote card.md; nothing was sent\n'
    assert 'license: apache-2.0' in (folder / 'card.md').read_text()


def test_the_chain_without_labels(folder, capsys):
    """The commands of examples/embeddings.md, on a tiny model without classes, with all images in one sub-folder."""
    shutil.rmtree('student')
    (folder / 'images').rename(folder / 'some')
    (folder / 'images' / 'all').mkdir(parents=True)
    for i, path in enumerate(sorted((folder / 'some').rglob('*.png'))):
        path.rename(folder / 'images' / 'all' / f'{i}.png')
    save_pretrained(timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 0}), folder / 'teacher')
    quick = {'evaluate': ['--workers', '0'], 'distill': [*RECIPE, '--set=stages.0.fit.epochs=1']}
    printed = run_chain('embeddings.md', 'chain without labels', {'--minutes': '', '600': ''}, quick, capsys)
    assert 'cosine' in printed['evaluate'] and re.search('odevit evaluate .* --embedding$', printed['distill'], re.M)


def test_predict_gives_json_and_no_answer_that_is_not_a_number(folder, capsys):
    assert run('predict', 'local-dir:student', 'images/c0/0.png', '--steps', '6', '--json') == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found['evaluations'] == 6 and [entry['name'] for entry in found['classes']] == [None] * 3
    assert sum(entry['probability'] for entry in found['classes']) == pytest.approx(1, abs=1e-3)
    config = json.loads((folder / 'student' / 'config.json').read_text())
    (folder / 'student' / 'config.json').write_text(json.dumps({**config, 'label_names': ['one']}))  # anyone's
    assert run('predict', 'local-dir:student', 'images/c0/0.png') == 0 and '%  class ' in capsys.readouterr().out
    model = timm.create_model('local-dir:teacher', pretrained=True)
    model.head.bias.data[1] = torch.nan
    save_pretrained(model, 'broken')
    assert run('predict', 'local-dir:broken', 'images/c0/0.png', '--json') == 2
    assert "outputs for 'images/c0/0.png' are not finite" in json.loads(capsys.readouterr().out)[0]['error']


def test_predict_takes_folders_and_goes_on_after_a_file_that_it_cannot_read(folder, capsys):
    Image.new('1', (20_000, 20_000)).save('images/c0/bomb.png')  # of absurd size
    Image.new('L', (1, 60_000)).save('images/c0/\x1bwide.png')  # would be resized to gigabytes
    assert run('predict', 'local-dir:student', 'images', 'nowhere.jpg', 'images/c1/0.png', '--top', '1') == 2
    out, err = capsys.readouterr()
    assert [line.split(' (')[0] for line in out.splitlines()[::2]] == [f'images/c{c}/{i}.png' for c in range(3) for i in range(10)] + ['images/c1/0.png']
    assert [line[:28] for line in err.splitlines()] == [
        "odevit: 'images/c0/?wide.png", "odevit: 'images/c0/bomb.png'", "odevit: 'nowhere.jpg' cannot", 'odevit: error: 3 of 34 image']


@pytest.mark.parametrize('file', ['student.pt2', 'student.onnx'])
def test_an_exported_file_predicts_what_its_model_does(folder, capsys, file):
    if file.endswith('onnx'):
        [pytest.importorskip(name) for name in ('onnx', 'onnxscript', 'onnxruntime')]
    model = timm.create_model('local-dir:student', pretrained=True)
    model.pretrained_cfg.update(label_names=['a', 'b', 'c'], mean=(0.1, 0.2, 0.3), crop_pct=0.7)
    save_pretrained(model, 'student')
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save('photo.png')
    assert run('export', 'local-dir:student', file) == 0
    found = []
    for name in ('local-dir:student', file):
        capsys.readouterr()
        assert run('predict', name, 'photo.png', '--json') == 0
        found.append({each['name']: each['probability'] for each in json.loads(capsys.readouterr().out)[0]['classes']})
    assert found[0] == pytest.approx(found[1], abs=2e-4)
    assert run('predict', file, 'photo.png', '--steps', '2') == 2
    assert f"'{file}' has fixed steps. Leave out --steps" in capsys.readouterr().err


@pytest.mark.parametrize('args, said', [
    (['calibrate', 'local-dir:student', 'flat', 'out', *T, '--epochs', '1'], 'saved out'),
    (['evaluate', 'local-dir:student', 'flat', '--embedding', *T], 'flat: 10 images'),
    (['evaluate', 'local-dir:student', 'flat', '--embedding', '--held-out', '0.5', *T], 'the share 0.5 held out'),
    (['evaluate', 'local-dir:student', 'flat', '--embedding'], 'labelled images with --held-out'),
    (['distill', 'three_blocks', 'flat', 'out', *T, *RECIPE, '--set', 'stages.1.fit.epochs=1', '--set', 'ode.phases=1'], ' --held-out 0.1 --embedding'),
    (['benchmark', 'local-dir:student', '--data', 'flat', '--rounds', '1'], '| batch 8'), (['export', 'local-dir:student', 'a.html', '--images', 'flat'], 'wrote a.html'),
    (['distill', 'embedding', 'flat', 'out', *T, *RECIPE, '--set', 'stages.0.fit.epochs=1', '--set', 'ode.phases=1'], 'saved out'),
    (['predict', 'local-dir:student', 'flat'], 'flat/9.png'), (['halt', 'local-dir:student', 'flat', 'out'], 'labels are needed'),
    (['evaluate', 'local-dir:student', 'flat'], 'Make a sub-folder for each class')])
def test_what_needs_no_labels_takes_a_folder_without_classes(folder, capsys, args, said):
    (folder / 'images' / 'c0').rename(folder / 'flat')
    assert run(*args) == 2 * ('label' in said or 'sub-folder' in said)
    assert said in ''.join(capsys.readouterr())


def test_evaluating_embeddings_leaves_the_classifiers_of_both_models_out(folder, capsys):
    teacher = timm.create_model('local-dir:teacher', pretrained=True)
    teacher.head.bias.data.fill_(9.)
    save_pretrained(teacher, 'teacher')
    assert run('evaluate', 'local-dir:student', 'images', '--embedding', *T, '--json', 'found.json') == 0
    assert capsys.readouterr().out.startswith('images, outputs without the head: 30 images')
    assert json.loads(Path('found.json').read_text())[0]['parameters'] == 40_419 - 99
    assert run('halt', 'local-dir:student', 'images', 'halting', '--held-out', '0.5', '--workers', '0') == 0
    assert run('evaluate', 'local-dir:halting', 'images', '--embedding', *T) == 0


def test_unlabelled_arrays_are_compared_with_the_teacher(folder, capsys):
    np.savez('few.npz', x_train=np.zeros((4, 16, 16, 3), np.uint8))
    assert main(['evaluate', 'local-dir:student', 'few.npz', '--embedding', *T]) == 0 and 'few.npz' in capsys.readouterr().out
    assert main(['evaluate', 'local-dir:student', 'few.npz']) == 2 and "few.npz': y_train is not a file" in capsys.readouterr().err


def lightning(prefix, key='state_dict'):
    return lambda state: {key: {prefix + name: value for name, value in state.items()}, 'epoch': 3, 'hyper_parameters': {'lr': 0.1}}


@pytest.mark.parametrize('wrapped', [lightning('model.'), lightning('net._orig_mod.'), lightning('module._orig_mod.'), lightning('module.', 'state_dict_ema'), lightning('', 'model_state_dict')])
def test_a_checkpoint_of_lightning_or_of_timms_script(folder, wrapped):
    state = timm.create_model('local-dir:teacher', pretrained=True).state_dict()
    torch.save(wrapped({name: value + 1 for name, value in state.items()}), 'weights.ckpt')
    assert run('convert', 'local-dir:teacher', 'new', '--checkpoint', 'weights.ckpt') == 0
    assert torch.equal(timm.create_model('local-dir:new', pretrained=True).cls_token, state['cls_token'] + 1)


@pytest.mark.parametrize('wrapped, message', [
    (lightning('encoder.'), 'Missing key(s) in state_dict: "cls_token", "pos_embed", .... Unexpected key(s) in state_dict: "encoder.cls_token", '),
    (lambda state: {'state_dict': state, 'hyper_parameters': Path}, 'holds Python objects, which may run code. If you trust it, save its state_dict')])
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(folder, capsys, wrapped, message):
    torch.save(wrapped(timm.create_model('local-dir:teacher').state_dict()), 'weights.ckpt')
    assert run('convert', 'local-dir:teacher', 'new', '--checkpoint', 'weights.ckpt') == 2
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings('ignore:The classes of .parts')
def test_evaluate_holds_something_out_and_says_whose_classes_it_counts(folder, capsys):
    x, y = np.zeros((9, 16, 16, 3), np.uint8), np.arange(9) % 3
    np.savez('d.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=['c2', 'c1', 'c0'])
    for more, why in ((['0'], 'held_out must be a number between 0 and 1; got 0.0'), (['0.1', '--test', 'e.npz'], '--test and --held-out both')):
        assert main(['evaluate', 'local-dir:teacher', 'd.npz', '--quiet', '--held-out', *more]) == 2
        assert why in capsys.readouterr().err
    config = json.loads((folder / 'teacher' / 'config.json').read_text())
    (folder / 'teacher' / 'config.json').write_text(json.dumps({**config, 'label_names': ['c0', 'c1', 'c3']}))
    for data in ('d.npz', 'images'):
        with pytest.warns(RuntimeWarning, match=f"The classes of '{data}' are not those of the model"):
            assert main(['evaluate', 'local-dir:teacher', data, '--quiet', *(['--workers', '0'] if data == 'images' else [])]) == 0
    capsys.readouterr()
    for part in ('train', 'val'):
        shutil.copytree('images', Path('parts') / part)
    assert run('evaluate', 'local-dir:teacher', 'parts', '--held-out', '0.1') == 0
    assert capsys.readouterr().out.startswith('parts/val: 30 images')


def test_recipes_are_listed_shown_and_checked(folder, capsys):
    assert main(['recipe', 'list']) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == builtin_recipes()
    assert main(['recipe', 'show', 'three_blocks']) == 0
    (folder / 'mine.yaml').write_text(capsys.readouterr().out)
    assert main(['recipe', 'show', 'mine.yaml']) == 0
    assert capsys.readouterr().out == Path('mine.yaml').read_text()


def test_a_run_is_continued_from_anywhere(folder, capsys, monkeypatch):
    assert main(['finetune', 'local-dir:teacher', 'images', 'tuned', '--set', 'fit.epochs=1', *RECIPE, '--quiet']) == 0
    (folder / 'elsewhere').mkdir()
    monkeypatch.chdir(folder / 'elsewhere')
    assert main(['finetune', '--resume', '../tuned', '--set', 'fit.epochs=2', '--quiet']) == 0
    assert len(json.loads((folder / 'tuned' / 'history.json').read_text())) == 2
    assert Recipe.load(folder / 'tuned' / 'recipe.yaml').model_args == {'pretrained': True, 'num_classes': 3}
    monkeypatch.chdir(folder)  # the recipe of a card names its model as the command does
    assert main(['finetune', 'local-dir:teacher', 'images', 'again', '--recipe', 'finetune', '--set', 'model=local-dir:teacher', '--set', 'fit.epochs=1', *RECIPE, '--quiet']) == 0
    monkeypatch.chdir(folder / 'elsewhere')
    capsys.readouterr()
    assert main(['finetune', '--resume', '../tuned', '--recipe', 'finetune', '--quiet']) == 2
    assert 'is a different recipe' in capsys.readouterr().err
    assert main(['distill', '--resume', '../tuned', '--quiet']) == 2
    assert "'../tuned' is not a run of odevit distill. Type: odevit finetune --resume ../tuned" in capsys.readouterr().err


def test_evaluate_on_other_images_in_mixed_precision(folder, capsys):
    shutil.copytree('images', 'other')
    Path('other/c0/0.png').unlink()
    assert run('evaluate', 'local-dir:student', 'images', '--test', 'other', '--amp', 'bfloat16', '--json', 'a.json') == 0
    assert run('evaluate', 'local-dir:student', 'other', '--json', 'b.json') == 0
    assert capsys.readouterr().out.startswith('other: 29 images')
    (mixed, of), (exact, others) = ([json.loads(Path(f'{name}.json').read_text())[0][key] for key in ('loss', 'data')] for name in 'ab')
    assert of == others == 'other' and mixed != exact == pytest.approx(mixed, rel=0.05)


def test_finetune_on_a_part_judged_by_others(folder, capsys):
    assert run('finetune', 'local-dir:teacher', 'images', 'out', '--test', 'others', *RECIPE) == 2 and not Path('out').exists()
    shutil.copytree('images', 'others')
    Path('others/c0').rename('others/z0')
    with pytest.warns(RuntimeWarning, match="The classes of 'others' are not those of the model, so labels are compared by number"):
        assert run('finetune', 'local-dir:teacher', 'images', 'out', '--limit', '9', '--test', 'others', *RECIPE, '--set', 'fit.epochs=1') == 0
    assert re.search(r"(?s)9 images to learn from; 3 classes: \['c0', 'c1', 'c2'\].*others: 30 images", capsys.readouterr().out) and json.loads(Path('out/run.json').read_text())['limit'] == 9
