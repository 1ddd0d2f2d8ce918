"""Exported files, run where this package cannot be imported. Tests of a package that is not installed are skipped: pip install -e '.[deploy]'."""
import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import snapshot

from timm_odevit import convert_, export_model, save_pretrained, with_steps
from timm_odevit.cli import main
from timm_odevit.export import files as export
from timm_odevit.export.onnx import _round
from timm_odevit.quantization import packed, unpacked
from timm_odevit.shrinking import candidates
from timm_odevit.shrinking.candidates import Candidate

onnx_here = pytest.mark.skipif(not all(map(find_spec, ('onnx', 'onnxscript', 'onnxruntime'))), reason="not installed: pip install -e '.[deploy]'")
ODES = {'phases': dict(phases=2, steps=4), 'one block': dict(steps=4),
        'early and fewer tokens': dict(steps=4, tokens=0.4, halting='entropy', halting_threshold=0.9)}

# each program reads a file and images, and may import neither this package nor what made the file
READ = """
import json, sys
for name in sys.argv[3].split(): sys.modules[name] = None
import numpy as np
images = np.load(sys.argv[2])
"""
RUN = {
    'onnx': """
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])
about = session.get_modelmeta().custom_metadata_map
outputs = [session.run(None, {'images': images[:n]})[0] for n in (1, len(images))]
""",
    'pt2': """
import torch
extra = {'metadata.json': ''}
model = torch.export.load(sys.argv[1], extra_files=extra).module()
about = json.loads(extra['metadata.json'])
torch.set_grad_enabled(False)  # torch 2.9 loads frozen weights as trainable ones
outputs = [model(torch.from_numpy(images[:n])).numpy() for n in (1, len(images))]
""",
}
WRITE = """
np.savez(sys.argv[2] + '.out.npz', *outputs)
print(json.dumps({key: json.loads(value) for key, value in about.items() if not key.startswith('onnx.')}))
"""
BLOCKED = {'onnx': 'timm_odevit timm torch onnx', 'pt2': 'timm_odevit timm'}


def run_alone(format, path, images, tmp_path):
    """The outputs for one image and for all, and the metadata, from a process without this package."""
    np.save(tmp_path / 'images.npy', images.numpy())
    done = subprocess.run([sys.executable, '-I', '-c', READ + RUN[format] + WRITE, str(path), str(tmp_path / 'images.npy'), BLOCKED[format]],
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.from_numpy(output) for output in np.load(tmp_path / 'images.npy.out.npz').values()], json.loads(done.stdout)


def case(format, *rest):
    return pytest.param(format, *rest, marks=[onnx_here] if format == 'onnx' else [])


@pytest.fixture
def five():
    return torch.randn(5, 3, 16, 16)


@pytest.mark.parametrize('format, ode', [*(case('onnx', ode) for ode in ODES), ('pt2', 'phases'), ('pt2', 'early and fewer tokens')])
def test_a_file_gives_the_models_outputs_without_this_package(vit, five, tmp_path, format, ode):
    model = vit()
    model.pretrained_cfg['label_names'] = ['a', 'b', 'c', 'd', 'é']
    convert_(model, **ODES[ode])
    with torch.no_grad():
        expected = model(five)
    model.train()
    before = snapshot(model)
    path = export_model(model, tmp_path / f'model.{format}')
    assert snapshot(model) == before and model.blocks.steps == 4
    (one, all_of_them), about = run_alone(format, path, five, tmp_path)
    torch.testing.assert_close(one, expected[:1], atol=1e-4, rtol=0)
    torch.testing.assert_close(all_of_them, expected, atol=1e-4, rtol=0)
    cfg = model.pretrained_cfg
    assert about['steps'] == 4 and about['classes'] == ['a', 'b', 'c', 'd', 'é'] and about['input_size'] == [3, 16, 16]
    assert about['mean'] == list(cfg['mean']) and about['std'] == list(cfg['std']) and about['model'].startswith('vit_tiny_patch16_224')


@pytest.mark.parametrize('ode, computed', [
    (dict(steps=4), 4 * 4 + 1), (dict(steps=2, phases=2), 2 * 4 + 1),
    (dict(field='lipschitz', method='euler'), 3 * 4 + 1)])
def test_int8_is_close_and_smaller(vit, five, tmp_path, ode, computed):
    onnx = pytest.importorskip('onnx')
    model = convert_(vit(embed_dim=128), **ode).model
    with torch.no_grad():
        expected = model(five)
    path = export_model(model, tmp_path / 'model.onnx', int8=True)
    (_, found), about = run_alone('onnx', path, five, tmp_path)
    error = (found - expected).norm() / expected.norm()
    assert 1e-6 < error < 0.1 and about['int8'] is True  # 8 bits round; without rounding, it would be 1e-7
    assert domains_of(path) == ['']
    written = onnx.load(path).graph
    assert [node.op_type for node in written.node].count('MatMulInteger') == computed  # linear layers, in each step
    stored = sum(len(t.raw_data) for t in written.initializer)
    assert stored < 0.4 * sum(p.nbytes for p in model.parameters())  # some small ones are floats


def test_a_weight_in_int8_has_a_scale_per_row_or_for_positions_per_token():
    for shape, scales in (((64, 65), (64, 1)), ((64, 3, 8, 8), (64, 1, 1, 1)), ((3, 23, 64), (3, 23, 1)), ((1, 65, 192), (1, 65, 1)), ((1, 197, 64), (1, 197, 1))):
        weight = torch.randn(shape)
        stored, scale = _round(weight)
        assert stored.dtype == torch.int8 and scale.shape == scales
        assert ((stored * scale - weight).abs() <= scale / 2 + 1e-7).all()
    assert _round(torch.randn(5000)) is None and _round(torch.randn(8, 8)) is None
    assert not _round(torch.zeros(64, 64))[0].any()


@onnx_here
@pytest.mark.parametrize('ode, int8, any_steps, allowed', [
    (dict(phases=2, steps=4), False, True, 1e-4), (dict(phases=2, steps=4), True, False, 0.1), (dict(phases=2, steps=4), True, True, 0.1),
    (dict(model=dict(name='vit_small_patch16_rope_224', num_heads=1)), False, False, 4e-5), (dict(field='lipschitz', method='euler'), False, False, 1e-3),
    (dict(field='lipschitz', method='euler'), True, False, 0.4)], ids=str)  # its norms are folded into the weights first
def test_four_bits_are_those_of_a_folder_and_small(vit, five, tmp_path, ode, int8, any_steps, allowed):
    model = convert_(vit(**{'num_heads': 4, **ode.pop('model', {})}, embed_dim=128, depth=4, num_classes=41), **ode).model  # an odd number, and a head that is large enough
    next(p for name, p in model.named_parameters() if name.endswith('fc2.weight')).data.zero_()  # its bytes are those of its transpose
    path = export_model(model, tmp_path / 'model.onnx', bits=4, int8=int8, any_steps=any_steps)
    (_, found), about = run_alone('onnx', path, five, tmp_path)
    model.load_state_dict(unpacked(packed(model.state_dict())))
    with torch.no_grad():
        expected = model(five)
    assert (found - expected).norm() < allowed * expected.norm() and about['bits'] == 4 and about['int8'] is int8
    assert domains_of(path) == ['', 'timm_odevit']
    stored = sum(len(t.raw_data) for part in parts_of(path) for t in part.initializer)
    assert stored < 5.2 / 8 * sum(p.numel() for p in model.parameters())  # with scales, zero points and vectors in 16 bits


def domains_of(path):
    """Whose operators a file asks for: a program may refuse one that imports others than it knows."""
    import onnx
    return [each.domain for each in onnx.load(path).opset_import]


def parts_of(path):
    """The graph of a file, and those of its loops."""
    import onnx
    whole = onnx.load(path).graph
    return [whole, *(node.attribute[0].g for node in whole.node if node.op_type == 'Loop')]


@onnx_here
@pytest.mark.parametrize('ode, counts', [
    (dict(phases=2), (2, 3, 5, 12, 100)), (dict(method='rk4', steps=2), (1, 3)), (dict(field='lipschitz', method='euler'), (1, 5)),
    (dict(phases=2, blocks=(1, 2)), (2, 3)), (dict(phases=4, T=2., steps=3), (2, 5))], ids=str)  # without the last two blocks
def test_one_file_has_any_number_of_steps(vit, five, tmp_path, ode, counts):
    onnxruntime = pytest.importorskip('onnxruntime')
    model = convert_(vit(depth=4), **ode).model
    model.set_grad_checkpointing()
    before, own = snapshot(model), model.blocks.steps
    path = export_model(model, tmp_path / 'model.onnx', any_steps=True)
    assert snapshot(model) == before
    assert domains_of(path) == ['']
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    images = {'images': five.numpy()}
    def run(**more):
        return torch.from_numpy(session.run(None, {**images, **more})[0])
    for steps in counts:
        with torch.no_grad():
            torch.testing.assert_close(run(steps=np.array(steps)), with_steps(model, steps)(five), atol=1e-4, rtol=0)
    torch.testing.assert_close(run(), run(steps=np.array(own)), atol=0, rtol=0)  # it may be left out
    with pytest.raises(ValueError, match=f'takes at least {counts[0]} steps; got {counts[0] - 1}'):
        export.load_exported(path, counts[0] - 1)
    torch.testing.assert_close(run(steps=np.array(-3)), run(steps=np.array(counts[0])), atol=0, rtol=0)  # too few are as many as there must be


@onnx_here
def test_steps_of_a_file_are_checked_and_used(vit, five, tmp_path):
    model = convert_(vit(depth=4), phases=2).model
    for any_steps in (False, True):
        export_model(model, tmp_path / f'{any_steps}.onnx', any_steps=any_steps)
    run, about = export.load_exported(tmp_path / 'True.onnx', 6)
    torch.testing.assert_close(run(five), with_steps(model, 6)(five), atol=1e-4, rtol=0)
    onnx, onnxruntime = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    whole = onnx.load(tmp_path / 'True.onnx')  # without its default, as onnxruntime-web needs it
    default, = [tensor for tensor in whole.graph.initializer if tensor.name == 'steps']
    whole.graph.initializer.remove(default)
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=['CPUExecutionProvider'])
    assert [each.name for each in session.get_inputs()] == ['images', 'steps']
    found, = session.run(None, {'images': five.numpy(), 'steps': np.array(6)})
    torch.testing.assert_close(torch.from_numpy(found), run(five), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match='False.onnx. has fixed steps'):
        export.load_exported(tmp_path / 'False.onnx', 6)


@onnx_here
@pytest.mark.parametrize('ode, why', [
    (None, 'needs an ODE-ViT'), (dict(halting='entropy'), 'no halting'), (dict(tokens=0.5), 'tokens=0.5 merges others at each step'),
    (dict(phases=3), 'its spans are not of equal length')])
def test_a_model_whose_steps_cannot_be_an_input_is_refused(vit, tmp_path, ode, why):
    model = vit(depth=4)
    if ode is not None:
        convert_(model, **ode)
    with pytest.raises(ValueError, match=why):
        export_model(model, tmp_path / 'a.onnx', any_steps=True)
    assert not list(tmp_path.iterdir())


@onnx_here
def test_steps_that_the_model_runs_itself_cannot_be_an_input(tmp_path):
    model = timm.create_model('beit_base_patch16_224', img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)
    with pytest.raises(ValueError, match='the model runs each of them itself. Leave out any_steps'):
        export_model(convert_(model).model, tmp_path / 'a.onnx', any_steps=True)


@pytest.mark.parametrize('format', [case('onnx'), case('pt2')])
def test_each_tensor_is_stored_once(vit, tmp_path, format):
    model = convert_(vit(embed_dim=256, depth=6), steps=6, phases=3).model
    path = export_model(model, tmp_path / f'model.{format}')
    weights = save_pretrained(model, tmp_path / 'model') / 'model.safetensors'
    assert path.stat().st_size < 1.3 * weights.stat().st_size  # two copies would take twice as much
    if format == 'pt2':
        assert len(torch.export.load(path).state_dict) == len(model.state_dict())


@onnx_here
def test_smaller_files_of_a_verdict_are_made_of_one_export(vit, five, tmp_path, monkeypatch):
    model, exported = vit(embed_dim=128), []
    monkeypatch.setattr(candidates, 'export_model', lambda *args: exported.append(args) or export_model(*args))
    with torch.no_grad():
        expected = model(five)
    files, notes = candidates._files(Candidate('original', 'original', model).and_smaller(), five, tmp_path / 'files', print)
    errors = [(run(five) - expected).norm() / expected.norm() for *_, run in files]
    assert errors[0] < 1e-4 < errors[1] < 0.1 and errors[2] < 0.4 and len(exported) == 1 and not notes
    whole, int8, bits = (path.stat().st_size for _, path, _ in files)
    assert int8 < 0.5 * whole and bits < 0.8 * int8
    about = [export.load_exported(path)[1] for _, path, _ in files]
    assert [(each['int8'], each.get('bits')) for each in about] == [(False, None), (True, None), (True, 4)]


MODELS = {
    'stock ViT': lambda: timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=2, num_classes=5),
    'stock Swin': lambda: timm.create_model('swin_tiny_patch4_window7_224', img_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2),
                                            num_heads=(1, 2), num_classes=5),
    'stages': lambda: convert_(MODELS['stock Swin'](), phases=2).model,
    'a view': lambda: with_steps(convert_(MODELS['stock ViT'](), steps=3).model, 7),
}


@pytest.mark.parametrize('format, name', [case(format, name) for name in MODELS for format in ('pt2', 'onnx')])
def test_other_models(five, tmp_path, format, name):
    model = MODELS[name]().eval()
    with torch.no_grad():
        expected = model(five)
    run, about = export.load_exported(export_model(model, tmp_path / f'model.{format}'))
    torch.testing.assert_close(run(five), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(run(five[:1]), expected[:1], atol=1e-4, rtol=0)
    assert about.get('steps') == {'stages': [2, 2], 'a view': 7}.get(name)


def test_a_file_is_replaced_only_on_request_and_only_by_a_whole_one(vit, tmp_path, monkeypatch):
    model, path = vit(depth=1), tmp_path / 'a.pt2'
    before = snapshot(model)
    path.write_text('old')
    with pytest.raises(ValueError, match=r"a.pt2' exists.* overwrite=True \(--overwrite\)"):
        export_model(model, path)
    def stop(*args, **kwargs):
        raise KeyboardInterrupt
    for where in ('torch.export.export', 'torch.export.save'):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(where, stop)
            export_model(model, path, overwrite=True)
        assert path.read_text() == 'old' and snapshot(model) == before and list(tmp_path.iterdir()) == [path]
    export_model(model, path, overwrite=True)
    assert torch.export.load(path).module()(torch.randn(3, 3, 16, 16)).shape == (3, 5) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('change, given, message', [
    (vars, dict(path='a.onx'), "Unknown format of 'a.onx': 'onx'. Did you mean 'onnx'?"),
    (vars, dict(int8=True), 'A .pt2 has no int8'),
    (vars, dict(bits=4), 'Give a file that ends in .onnx'), (lambda model: model.half(), dict(path='a.onnx', int8=True), 'int8, 4 bits and any_steps are'),
    (vars, dict(path='a.onnx', bits=3), 'Give 4, or None'),
    (lambda model: model.half(), dict(path='a.onnx', bits=4), r'are made of float32; got torch.float16'),
    (lambda model: convert_(model.half()), dict(path='a.onnx', any_steps=True), 'are made of float32'),
    (lambda model: model.bfloat16(), dict(path='a.onnx'), r'Call model.float\(\) first'),
    (lambda model: delattr(model, 'in_chans'), {}, 'Expected a timm model; got a VisionTransformer'),
    (lambda model: convert_(model, method='dopri5'), {}, "such as model.blocks.method = 'rk4'"),
    (lambda model: setattr(model.norm, 'forward', lambda x: x if x.sum() > 0 else -x), {}, 'torch.export cannot export this Vis[^\\n]*$'),
])
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(vit, tmp_path, monkeypatch, change, given, message):
    monkeypatch.chdir(tmp_path)
    model = vit()
    change(model)
    with pytest.raises(ValueError, match=message):
        export_model(model, **{'path': 'a.pt2', **given})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('format, missing, int8', [('onnx', 'onnxscript', False), ('onnx', 'onnxruntime', True)])
def test_a_missing_package_is_named_with_the_command_that_installs_it(vit, tmp_path, monkeypatch, format, missing, int8):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'{format}.* needs .*{missing}.* Type: pip install .*{missing}'):
        export_model(vit(), tmp_path / f'a.{format}', int8=int8)


@pytest.mark.parametrize('format', [case('onnx'), case('pt2')])
def test_the_example_runs_a_file_and_measures_it(vit, tmp_path, capsys, format):
    model = convert_(vit(num_classes=3), **ODES['phases']).model
    model.pretrained_cfg['crop_pct'] = 1.
    x = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    prepared = (torch.from_numpy(x).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5  # this model's mean and std
    with torch.no_grad():
        model.head.bias.sub_(model(prepared).mean(0))  # else it gives one class to all
        answers = model(prepared).argmax(1).numpy()
    path = export_model(model, tmp_path / f'a.{format}')
    np.savez(tmp_path / 'data.npz', x_test=x, y_test=np.where(np.arange(20) < 15, answers, (answers + 1) % 3))
    example = runpy.run_path(str(Path(__file__).parent.parent / 'examples' / 'exported.py'))
    assert example['main'](str(path), tmp_path / 'data.npz', batch_size=8)[0] == 75.
    assert '4 steps, top-1 75.0 % of 20 images' in capsys.readouterr().out


def test_the_command(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = convert_(vit(num_classes=3), **ODES['phases']).model
    model.pretrained_cfg.update(num_classes=3, label_names=['a', 'b', 'c'])
    save_pretrained(model, 'student')
    assert main(['export', 'local-dir:student', 'student.pt2', '--steps', '2', '--img-size', '32', '--device', 'cpu']) == 0
    assert capsys.readouterr().out == f"wrote student.pt2: {(tmp_path / 'student.pt2').stat().st_size / 1e6:.2f} MB\n"
    extra = {export.METADATA: ''}
    loaded = torch.export.load('student.pt2', extra_files=extra).module()
    about = json.loads(extra[export.METADATA])
    assert about['steps'] == '2' and about['input_size'] == '[3, 32, 32]' and about['classes'] == '["a", "b", "c"]'
    same_model = timm.create_model('local-dir:student', pretrained=True, img_size=32).eval()
    same_model.blocks.steps = 2
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(loaded(images), same_model(images), atol=1e-4, rtol=0)
    assert main(['export', 'local-dir:student', 'student.pt2', '--device', 'cpu']) == 2
    assert "'student.pt2' exists" in capsys.readouterr().err
    assert main(['export', 'local-dir:student', 'student.pt2', '--overwrite', '--device', 'cpu']) == 0
