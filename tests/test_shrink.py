"""shrink: a small student of a model, and whether it is worth it."""
import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import TINY, reloaded, snapshot
from PIL import Image

from timm_odevit import convert_, export_model, save_pretrained, shrink
from timm_odevit.cli import main
from timm_odevit.data.read import NOTE, read_data
from timm_odevit.export.files import load_exported, metadata
from timm_odevit.ode.blocks import count_parameters, find_ode_blocks
from timm_odevit.saving.save import describe
from timm_odevit.shrinking import candidates, material, run
from timm_odevit.shrinking.candidates import Row
from timm_odevit.shrinking.material import Held, plain_student, prepare
from timm_odevit.shrinking.verdict import Verdict
from timm_odevit.training import stages
from timm_odevit.training.run import train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', **{**TINY, 'depth': 4, 'num_classes': 3}).eval()


M = 0.02  # minutes


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A second of training at most, and files that need no other package."""
    monkeypatch.setattr(candidates, 'find_spec', lambda name: None)
    monkeypatch.setattr(candidates, 'ROUNDS', 3)
    monkeypatch.setattr(run, 'LEAST', 0.)
    monkeypatch.setattr(run, 'EXPORTS', 0)
    monkeypatch.setattr(run, 'FILES', 0)


@pytest.fixture
def no_files(monkeypatch):
    """What stands for the files, which take seconds each."""
    written = {}

    def write(model, path, **options):
        path.write_bytes(b'model %d' % len(written) + bytes(4 * count_parameters(model)))
        written[path.read_bytes()] = copy.deepcopy(model).eval()
        return path
    monkeypatch.setattr(candidates, 'export_model', write)
    monkeypatch.setattr(candidates, 'load_exported', lambda path: (written[path.read_bytes()], {}))
    monkeypatch.setattr(candidates, 'times_in_turns', lambda runs, *args, **kwargs: np.full((len(runs), 3), 0.032))  # seconds


@pytest.fixture
def few(monkeypatch, no_files):
    """Some of the candidates."""
    names = 'original', 'plain, 2 blocks', 'student, K = 4', 'student, K = 4+4'
    monkeypatch.setattr(run, 'candidates', lambda *models: [each for each in candidates.candidates(*models) if each.name in names])


def images(n=40, seed=0):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def labels_of(model, x, wrong=0):
    with torch.no_grad():
        found = model(x).argmax(dim=1)
    found[:wrong] = (found[:wrong] + 1) % 3
    return found


def npz(path, model, n=60, **more):
    pixels = np.random.default_rng(0).integers(0, 256, (n, 16, 16, 3), np.uint8)
    np.savez(path, x_train=pixels, **more)
    return path


def folder(path, names, n=40, size=16):
    """A folder of n images, called by the names in turn."""
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8)):
        file = path / names[i % len(names)].format(i)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    return path


def test_the_verdict_compares_original_plain_and_student_and_leaves_the_model_as_it_is(model, tmp_path, no_files):
    before = snapshot(model)
    found = shrink(model, images(), tmp_path, size=0.5, minutes=M, progress=False)
    assert snapshot(model) == before
    names = [row.name for row in found.rows]
    assert names == ['original', 'original, tokens = 0.5', 'original, tokens = 0.2', 'plain, 2 blocks', 'student, K = 4']
    assert [row.kind for row in found.rows] == [name.split(',')[0] for name in names] and 'without int8' in str(found)
    assert found.measure == 'agreement' and found.rows[0].value == 100. and found.images == len(prepare(images(), model).judging.images)
    text = str(found)
    assert repr(found) == text
    assert all(f'| {name} ' in text for name in names) and found.recommendation in text
    saved = json.loads((tmp_path / 'verdict.json').read_text())
    assert [row['name'] for row in saved['rows']] == names and saved['recommendation'] == found.recommendation
    page = (tmp_path / 'verdict.html').read_text()
    assert all(f'<td>{name}</td>' in page for name in names) and found.recommendation in page and '<details>' in page
    rows = dict(zip(names, found.rows, strict=True))
    gone = {row.file for row, by in zip(found.rows, found.beaten, strict=True)
            if by and (rows[by].mb < row.mb or rows[by].value > row.value)}  # none for its time
    assert gone and {path.name for path in (tmp_path / 'files').iterdir()} == {row.file for row in found.rows} - gone
    judging = prepare(images(), model).judging
    for kind, name in (('student', 'student, K = 4'), ('plain', 'plain, 2 blocks')):
        saved = timm.create_model(f"local-dir:{tmp_path / kind / 'best'}", pretrained=True)
        assert (row := rows[name]).value == pytest.approx(judging.value_of(saved)) and count_parameters(saved) < count_parameters(model)
        assert row.mb == pytest.approx(4e-6 * count_parameters(saved), abs=1e-5) and row.ms == pytest.approx((32., 1.))
    assert rows['original'].interval == pytest.approx(judging.interval(torch.ones(found.images).double()))
    assert 0 < found.rows[-1].operations < 2 * found.rows[0].operations


@pytest.mark.parametrize('kind, measure', [
    ('tensor', 'agreement'), ('labels', 'accuracy'), ('other labels', 'agreement'), ('8 classes', 'agreement'), ('npz', 'accuracy'),
    ('npz without labels', 'agreement'), ('no classes', 'cosine')])
def test_what_is_measured_depends_on_the_labels(model, tmp_path, kind, measure):
    x = images(60)
    given = {'tensor': x, 'labels': (x, labels_of(model, x)), 'other labels': (x, labels_of(model, x, wrong=60)),
             '8 classes': (x, torch.arange(60) % 8), 'no classes': x}.get(kind)
    if given is None:
        given = npz(tmp_path / 'd.npz', model)
        if kind == 'npz':
            prepared = torch.cat([x for x, _ in read_data(given, model, labels=False, held_out=0.).plain()])
            y = labels_of(model, prepared).numpy()
            npz(given, model, y_train=y, x_test=np.load(given)['x_train'][:4], y_test=y[:4])  # which then judge
    if kind == 'no classes':
        model.reset_classifier(0)
    found = prepare(given, model)
    assert found.judging.measure == measure and 42 < found.data.count() < 60
    assert kind != 'npz' or (len(found.judging.images) == 4 and 'may have been trained' not in str(found))
    assert found.judging.value_of(model) == pytest.approx(100.)
    assert bool(found.why) == (measure != 'accuracy') == (' % by naming one class alone)' not in str(found))


def test_a_model_with_stages(tmp_path, few):
    torch.manual_seed(0)
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=32, window_size=2, depths=(4, 4), num_heads=(2, 4), embed_dim=24,
                             num_classes=3).eval()
    x = torch.randn(40, 3, 32, 32)
    found = shrink(swin, x, tmp_path, size=0.5, minutes=M, progress=False)
    assert [row.name for row in found.rows] == ['original', 'student, K = 4+4'] and 'no plain student' in str(found)
    student = timm.create_model(f"local-dir:{tmp_path / 'student' / 'best'}", pretrained=True)
    names = [each.name for each in candidates.candidates(prepare(x, swin), student, None)]
    assert names[:2] == ['original', 'original, int8'] and {'student, K = 4+4', 'student, K = 4+4, int8'} <= set(names)
    assert not any('plain' in name or 'tokens' in name for name in names)


@pytest.mark.parametrize('count', [12, 1])  # one image does everything
def test_few_images_make_smaller_batches(model, count):
    found = prepare(images(count), model)
    assert len(found.data.train) == 1 and len(next(iter(found.data.train))[0]) == found.data.count() >= min(8, count)
    assert len(found.choosing.images) and len(found.judging.images)


def test_a_model_is_judged_by_images_that_it_has_not_seen(model, tmp_path):
    x = images(400)
    pair = x, labels_of(model, x)
    assert 'may have been trained on some of these' in str(prepare(pair, model))  # nobody knows
    for share in (0., 0.05, 0.1, 0.3):
        model.pretrained_cfg = {**model.pretrained_cfg, 'notes': [f'{NOTE}{share:g}']}
        found = prepare(pair, timm.create_model(f'local-dir:{save_pretrained(model, tmp_path)}', pretrained=True))
        seen, _ = read_data(pair, model, held_out=share).sample('train', 400)
        both = {x.numpy().tobytes() for x in seen} & {x.numpy().tobytes() for x in found.judging.images}
        assert bool(both) is ('may have been trained' in str(found)) is (share == 0.)
    others = prepare(pair, model, test=(x[:7] + 1, pair[1][:7]))
    assert torch.equal(others.judging.images.sort(dim=0).values, (x[:7] + 1).sort(dim=0).values)


def test_the_intervals_of_shares_are_never_zero():
    held = Held(images(4), torch.zeros(4, dtype=torch.long), torch.zeros(4, 3), 'accuracy')
    scores = held.scores(torch.tensor([[1., 0, 0]]).repeat(4, 1))
    assert scores.tolist() == [1.] * 4 and held.interval(scores) == pytest.approx(25 + 196 * (0.75 * 0.25 / 8) ** 0.5)
    assert not held.scores(torch.full((4, 3), torch.nan)).any()  # whose argmax is class 0
    first = torch.tensor([1., 1, 1, 0] * 25, dtype=torch.double)
    other = first.clone()
    other[:4] = torch.tensor([0., 0, 1, 1])  # two lost, one won
    assert held.margin(other, first) == pytest.approx(2 / 102 + 196 * (3 + 1 - 1 / 102) ** 0.5 / 102)  # of the difference on the same images
    assert held.margin(first, first) > 0 and held._replace(measure='cosine').margin(first, first) == 0


def test_a_plain_student_has_the_blocks_of_the_model(model):
    plain = plain_student(model, describe(model)[:2], count_parameters(model) // 2)
    blocks = find_ode_blocks(plain)[0]
    assert len(blocks) == blocks.config.phases == 2
    for i, layer in enumerate((0, 3)):
        theirs = model.blocks[layer].state_dict()
        assert all(torch.equal(p, theirs[name]) for name, p in blocks.shared.fields[i].block.state_dict().items())
    x = model.patch_embed(images(2))
    expected = model.forward_head(model.norm(model.blocks[3](model.blocks[0](model.norm_pre(model._pos_embed(x))))))
    torch.testing.assert_close(plain(images(2)), expected)


@pytest.mark.parametrize('name, options', [
    ('swin_tiny_patch4_window7_224', dict(img_size=32, window_size=2, depths=(1, 1, 2, 1), embed_dim=24)),  # takes no depth
    ('vit_small_patch16_rope_mixed_224', {**TINY, 'depth': 4})])  # has tensors for each layer outside of its blocks
def test_a_model_that_timm_cannot_build_with_fewer_blocks_has_no_plain_student(name, options):
    model = timm.create_model(name, **options)
    assert plain_student(model, describe(model)[:2], count_parameters(model) // 2) is None


def test_an_interrupted_training_keeps_the_best_so_far_and_goes_on(model, tmp_path, monkeypatch, few):
    original, calls = stages.fit, []

    def interrupted(task, *args, **kwargs):
        calls.append('/'.join(kwargs['out'].parts[-3:-1]))
        if len(calls) == 2:
            assert (tmp_path / 'student' / 'best' / 'model.safetensors').exists()  # since the first validation
            raise KeyboardInterrupt
        return original(task, *args, **kwargs)
    monkeypatch.setattr(stages, 'fit', interrupted)
    x = images()
    with pytest.raises(KeyboardInterrupt):
        shrink(model, x, tmp_path, size=0.5, minutes=M, progress=False)
    saved = timm.create_model(f"local-dir:{tmp_path / 'student' / 'best'}", pretrained=True)
    assert count_parameters(saved) < count_parameters(model)
    with pytest.raises(ValueError, match='holds a run. Pass resume=True'):
        shrink(model, x, tmp_path, size=0.5, minutes=M, progress=False)
    first = x.clone()
    first[torch.randperm(40, generator=torch.Generator().manual_seed(0))[-1]] += 1  # which is learned from
    for wrong, message in ((dict(minutes=M / 2), 'was given 0.02 minutes before; got 0.01. Give more'),
                           (dict(images=first), "The data of the run in '.*' is not this one's"),
                           (dict(images=(x, torch.ones(40, dtype=torch.long))), 'The data of the run')):
        with pytest.raises(ValueError, match=message):
            shrink(model, **{'images': x, 'out': tmp_path, 'size': 0.5, 'minutes': M, 'resume': True, 'progress': False, **wrong})
    calls[:] = ['', '']  # no more interrupts
    found = shrink(model, x, tmp_path, size=0.5, minutes=M, resume=True, progress=False)
    assert calls[2:] == ['student/1'] * 2 + ['plain/1'] * 2 and found.rows


def test_more_minutes_go_on_from_the_constant_rate_and_lose_nothing(model, tmp_path, monkeypatch, few, capsys):
    first = shrink(model, images(), tmp_path, size=0.5, minutes=M, progress=False)
    done = (tmp_path / 'student' / '1' / 'history.json').read_bytes()
    (tmp_path / 'files' / 'original_of_a_verdict_without_onnx.pt2').touch()
    (tmp_path / 'files' / 'mine.onnx').touch()

    def training(*args, **kwargs):
        assert len([*tmp_path.glob('verdict.*')]) == 2  # of the files as they are
        return train(*args, **kwargs)

    def measuring(*args, **kwargs):
        assert not [*tmp_path.glob('verdict.*')]  # of files that are replaced now
        return candidates.measure(*args, **kwargs)
    monkeypatch.setattr(run, 'measure', measuring)
    monkeypatch.setattr(run, 'train', training)
    found = shrink(model, images(), tmp_path, size=0.5, minutes=3 * M, resume=True)
    printed = capsys.readouterr().out
    assert 'student: was trained for' in printed and 'student: training for' in printed and 'minutes left' in printed
    assert (tmp_path / 'student' / '1' / 'history.json').read_bytes() == done
    runs = [json.loads((tmp_path / 'student' / name / 'run.json').read_text()) for name in '12']
    assert runs[0]['student sha256'] != runs[1]['student sha256']
    before = torch.load(tmp_path / 'student' / '1' / 'stage0' / 'last.pt')['model']
    start = timm.create_model(f"local-dir:{tmp_path / 'student' / '2' / 'start'}", pretrained=True).state_dict()
    assert all(torch.equal(start[name], tensor) for name, tensor in before.items())
    best = timm.create_model(f"local-dir:{tmp_path / 'student' / 'best'}", pretrained=True)
    choosing = prepare(images(), model).choosing
    runs = [timm.create_model(f"local-dir:{tmp_path / 'student' / name / 'best'}", pretrained=True) for name in '12']
    assert choosing.value_of(best) == max(map(choosing.value_of, runs)) and len(found.rows) == len(first.rows)
    assert (left := {path.name for path in (tmp_path / 'files').iterdir()}) <= {'mine.onnx', *(row.file for row in found.rows)} and 'mine.onnx' in left


@pytest.mark.parametrize('needed', [0., 0.6, 1.])
def test_the_smallest_size_that_keeps_enough(model, monkeypatch, needed):
    total = count_parameters(model)
    monkeypatch.setattr(material, 'calibrate_', lambda *args, **kwargs: None)
    monkeypatch.setattr(Held, 'value_of', lambda held, student: 100. * (count_parameters(student) >= needed * total))
    config = material.smallest_size(prepare(images(), model), 0.9, 1., False)
    parameters = count_parameters(convert_(model, config).model)
    assert parameters >= needed * total and (needed == 1. or parameters < total * (needed + 0.4))


def verdict(*rows):
    return Verdict(rows, 'accuracy', 0.95, 100, (), (), '')


def row(name, mb=1., value=50., ms=(1., 1.), off=0., slack=0.):
    return Row(name.split(',')[0], name, name, mb, value, 1., off, ms, (slack, slack), 1.)


def test_a_row_is_beaten_by_one_that_is_as_good_in_everything_and_better_in_one():
    rows = [row('a', 4., 80.), row('b', 2., 80.), row('c', 2., 70.), row('d', 1., 60.), row('e', 3., 90., (2., 1.)),
            row('f', math.nan, 99., (math.nan, math.nan))]
    assert verdict(*rows).beaten == ['b', '', 'b', '', '', '']
    assert verdict(row('a'), row('b', value=50.04)).beaten == ['', '']  # equal as shown
    assert '| 50.0 ± 1.0 ' in verdict(row('a', off=3.)).table()
    page = verdict(row('original', 4., 80.), *rows[1:3]).to_html('x')  # the first row stays in sight, even if it is beaten
    assert page.index('<td>original</td>') < page.index('<details>') < page.index('<td>c</td>')
    beaten, better = row('plain', 2., 89., (1., 10.1), slack=1.), row('student', 1., 90., (1., 10.2), slack=1.)  # as fast, as far as is known
    found = verdict(row('original', 20., 90., (9., 90.)), beaten, better)
    assert found.fastest == found.smallest == better


@pytest.mark.parametrize('other, says', [
    (row('student, int8', 2., 70.), 'Keep your model: no file much smaller than original, int8 (5.00 MB) keeps 95 % of its accuracy.'),
    (row('student, int8', 4.9, 90.), 'Keep your model: no file much smaller than original, int8 (5.00 MB) keeps 95 % of its accuracy.'),
    (row('student, int8', 2., 89.), 'For a small file: student, int8 (2.00 MB, 89.0 % accuracy; 0.40 of the size and 1.00 of the time, for a batch, of original, int8).'),
    (row('plain', 6., 88., (0.2, 0.2)), 'For speed: plain'),
    (row('plain', 6., 86., (0.2, 0.2), off=3.), '100 images cannot tell whether plain would keep 95 % on others'),
    (row('student, int8', 2., 84., off=3.), '100 images cannot tell whether student, int8 would keep 95 % on others: the difference from the original is known to ± 3.0 points.'),
])
def test_the_recommendation(other, says):
    assert says in verdict(row('original', 20., 90.), row('original, int8', 5., 90.), other).recommendation


@pytest.mark.parametrize('right, measure', [(0.6, 'agreement'), (0.9, 'accuracy')])
def test_labels_count_if_the_model_knows_more_of_them_than_by_chance(right, measure):
    torch.manual_seed(0)
    two, x = timm.create_model('vit_tiny_patch16_224', **{**TINY, 'depth': 2, 'num_classes': 2}).eval(), images(100)
    labels = labels_of(two, x)
    labels = torch.where(torch.rand(100) < right, labels, 1 - labels)
    assert prepare((x, labels), two).judging.measure == measure


def test_too_few_minutes_are_refused_and_what_is_in_the_folder_stays(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run, 'LEAST', 0.2)
    (tmp_path / 'files').mkdir()
    (tmp_path / 'files' / 'thesis.txt').write_text('mine')
    with pytest.raises(ValueError, match=r'0.001 minutes are too few: .* Give at least \d+\.'):
        shrink(model, images(), tmp_path, minutes=0.001, progress=False)
    assert [path.name for path in tmp_path.rglob('*')] == ['files', 'thesis.txt']


def test_operations_are_those_of_an_image(model):
    image = images(1)
    whole = candidates.operations(model, image)
    N, D = 17, 32
    blocks = 4 * (12 * D * D * N + 2 * N * N * D)
    assert whole == pytest.approx((blocks + 16 * D * 48 + 3 * D) / 1e6, rel=0.01)
    student = convert_(model, phases=2).model
    assert candidates.operations(student, image) == pytest.approx(whole)


@pytest.mark.parametrize('options, message', [
    (dict(size='25%', keep='95%'), 'Give a size, or the share to keep, not both'), (dict(keep=95), 'keep must be a number between 0 and 1'),
    (dict(minutes=0), 'minutes must be'), (dict(size=1), 'is too little'), (dict(model=timm.create_model('vit_tiny_patch16_224', depth=1).half()), 'than float16'), (dict(keep='950%'), 'a share up to 100%'),
    (dict(images=(torch.zeros(4, 3, 16, 16), torch.zeros(4))), 'labels must be whole numbers'),
    (dict(images=[torch.zeros(4, 3, 16, 16)]), 'cannot do for a loader'),
])
def test_bad_input_is_refused_and_nothing_is_written(model, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        shrink(**{'model': model, 'images': images(), 'out': tmp_path / 'out', 'progress': False, **options})
    assert not (tmp_path / 'out').exists()


def test_command(model, tmp_path, monkeypatch, capsys, few):
    monkeypatch.chdir(tmp_path)
    npz('images.npz', model)
    save_pretrained(model, 'teacher')
    command = ['shrink', 'local-dir:teacher', 'images.npz', 'out', '--size', '50%', '--minutes', '0.03']
    assert main(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert 'by agreement (few: small differences mean nothing); labels are not used' in printed and '| plain, 2 blocks ' in printed
    assert Path(printed.rstrip().rpartition('Smallest good file: ')[2]).is_file()
    assert main(command) == 2 and "'out' is not empty. Give another folder, or --resume." in capsys.readouterr().err
    assert main([*command, '--resume', '--quiet']) == main(['shrink', '--resume', 'out', '--quiet']) == 0


@pytest.mark.parametrize('size, phases, steps', [(None, 3, 6), ('10%', 1, 6), ('50%', 6, 12), ('100%', 12, 12)])
def test_a_quarter_of_the_blocks_runs_half_as_many_steps_and_more_blocks_two_each(size, phases, steps):
    found = prepare(images(), timm.create_model('vit_tiny_patch16_224', **{**TINY, 'depth': 12, 'num_classes': 3}).eval())
    config = material.suitable_settings(found, size, None, 1., False)
    assert (config.phases, config.steps) == (phases, steps)


def test_a_student_that_is_the_model_itself_learns_nothing(model, tmp_path, few):
    found = shrink(model, images(), tmp_path, size='100%', minutes=M, progress=False)
    assert found.rows[-1].value == 100. and found.outlook == ('The student computes what the original does, so there was nothing to learn.',)


def test_the_classifier_of_an_embedding_is_left_out_of_a_copy_and_neighbours_are_counted(vit, tmp_path, few):
    before = snapshot(model := vit(num_classes=7, depth=4))
    found = shrink(model, images(), tmp_path, size=0.6, minutes=M, embedding=True, progress=False)
    assert found.measure == 'cosine' and found.rows[0].value == pytest.approx(100., abs=0.01)
    assert 'val_cosine' in json.loads((tmp_path / 'student' / '1' / 'history.json').read_text())[0]
    assert shrink(model, images(), tmp_path, size=0.6, minutes=M, embedding=True, resume=True, progress=False).rows[-1].value == found.rows[-1].value
    assert snapshot(model) == before and "the model's outputs, without its head, are embeddings" in found.about[0]
    saved = timm.create_model(f"local-dir:{tmp_path / 'student' / 'best'}", pretrained=True)
    assert saved.num_classes == 0 and saved(images(1)).shape == (1, 32) and found.rows[-2].kind == 'plain'
    judging = prepare(images(), model, embedding=True).judging
    assert found.rows[0].neighbours == 100. and found.rows[-1].neighbours == judging.neighbours(saved(judging.images))
    assert 'same nearest image, %' in found.table() and 'nearest' not in verdict(row('a')).table() and math.isnan(row('a').neighbours)


def test_an_exported_plain_student_calls_itself_a_plain_model(model, tmp_path):
    plain = plain_student(model, describe(model)[:2], count_parameters(model) // 2)
    for each in (plain, reloaded(plain, tmp_path / 'plain')):
        about = load_exported(export_model(each, tmp_path / 'a.pt2', overwrite=True))[1]
        assert about['model'] == 'vit_tiny_patch16_224 with 2 blocks' and 'steps' not in about
    mixer = timm.create_model('mixer_s32_224', img_size=32)  # its blocks are used whole
    assert metadata(convert_(mixer, phases=8, method='euler').model)['model'] == 'mixer_s32_224 with 8 blocks'
    assert metadata(convert_(model, phases=2).model)['steps'] == 4


@pytest.mark.parametrize('names', [['{}.png'], ['a/{}.png', 'b/{}.png', 'c/{}.png'], ['train/a/{}.png', 'train/b/{}.png', 'train/c/{}.png', 'val/a/{}.png', 'val/b/{}.png', 'val/c/{}.png']])
def test_folders_of_any_kind(model, tmp_path, names):
    folder(tmp_path, names, 24, size=20)
    for name in ('aaa', 'broken', 'zzz'):
        (tmp_path / names[-1]).with_name(f'{name}.png').write_bytes(b'no image')
    found = prepare(tmp_path, model)
    held = len(found.choosing.images) + len(found.judging.images)
    assert found.data.count() >= 12 and held >= 2 and len(next(iter(found.data.train))[0]) >= 4
    assert found.why and found.data.classes is None if found.judging.measure == 'agreement' else len(names) > 1


def test_a_size_that_keeps_a_share_is_searched_once(model, tmp_path, monkeypatch, few):
    monkeypatch.setattr(material, 'calibrate_', lambda *args, **kwargs: None)
    calls, original = [], material.smallest_size
    monkeypatch.setattr(material, 'smallest_size', lambda *args: (calls.append(args), original(*args))[1])
    found = shrink(model, images(), tmp_path, keep='60%', minutes=M, progress=False)
    again = shrink(model, images(), tmp_path, keep='60%', minutes=M, resume=True, progress=False)
    assert found.keep == 0.6 and len(calls) == 1 and [row.value for row in again.rows] == [row.value for row in found.rows]


def test_an_interrupted_command_says_how_to_go_on(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_pretrained(model, 'teacher')

    def interrupted(model, images, out, **kwargs):
        if out == 'out':
            save_pretrained(model, 'out/student/best')
        raise KeyboardInterrupt
    monkeypatch.setattr('timm_odevit.cli.train.run_shrink', interrupted)
    for out in ('out', 'none'):
        assert main(['shrink', 'local-dir:teacher', 'images.npz', out, '--quiet']) == 130
        printed = capsys.readouterr()
        assert f"The best so far: {'out/student/best' if out == 'out' else 'nothing yet'}." in printed.out
        assert 'interrupted. To continue, repeat the command with --resume.' in printed.err


@pytest.mark.parametrize('dtype, kind', [(torch.float64, 'npz'), (torch.bfloat16, 'folder')])
def test_a_model_of_another_precision_is_shrunk(model, tmp_path, few, dtype, kind):
    data = npz(tmp_path / 'd.npz', model) if kind == 'npz' else folder(tmp_path / 'images', ['{}.png'], 20)
    found = shrink(model.to(dtype), data, tmp_path / 'out', size=0.5, minutes=M, progress=False)
    assert found.rows[0].value == 100.
    assert timm.create_model(f"local-dir:{tmp_path / 'out' / 'student' / 'best'}", pretrained=True)


def test_a_folder_whose_name_is_in_no_encoding_has_a_verdict(model, tmp_path, few, capsys):
    try:
        data = folder(tmp_path / 'caf\udce9', ['{}.png'], 20)
    except OSError:
        pytest.skip('the file system takes UTF-8 only')
    found = shrink(model, data, tmp_path / 'out', size=0.5, minutes=M)
    assert (tmp_path / 'out' / 'verdict.html').is_file() and 'caf?' in capsys.readouterr().out and str(found).encode()


def test_a_student_that_keeps_too_little_is_calibrated(model, monkeypatch):
    calls, own = [], material.calibrate_
    monkeypatch.setattr(material, 'TRIALS', 1)
    monkeypatch.setattr(material, 'calibrate_', lambda *a, **k: calls.append(own(*a, **k)))
    assert material.smallest_size(prepare(images(), model), 2., 1e-6, False).phases == 4 and calls[0]


@pytest.mark.parametrize('measure, each', [(0.5, 4.05), (4., 2.5)])
def test_both_trainings_share_what_is_left(model, tmp_path, monkeypatch, measure, each):
    monkeypatch.setattr(run, '_minutes', lambda *a: {'prepare': 1., 'measure': measure, 'train': []})
    monkeypatch.setattr(run, '_trained', lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shrink(model, images(), tmp_path, minutes=10., progress=False)
    assert json.loads((tmp_path / 'run.json').read_text())['train'] == [pytest.approx(each)]


@pytest.mark.parametrize('last, word, others, more', [(50., 'help', 100., 'would change little'), (22., 'change little', 93., 'may help'), (50., 'help', 5., 'would help')])
def test_the_outlook(model, tmp_path, monkeypatch, last, word, others, more):
    monkeypatch.setattr(Held, 'value_of', lambda self, model, values=iter([100., others]): next(values))
    (tmp_path / '1').mkdir()
    (tmp_path / '1' / 'history.json').write_text(json.dumps([{'stage': 0, 'val_top1': t} for t in (10., 20., 20., last)]))
    first, second = run._outlook(model, prepare(images(), model), tmp_path)
    assert f'more minutes would {word}.' in first and f'for {others} % of others: more images {more}.' in second
