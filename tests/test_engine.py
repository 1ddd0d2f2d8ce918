import copy
import json

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import muon
from timm.task import ClassificationTask
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import TrajectoryDistillationTask, convert_, fit

X, Y = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5


def loaders():
    return (DataLoader(TensorDataset(X[:32], Y[:32]), 8, shuffle=True), DataLoader(TensorDataset(X[32:], Y[32:]), 8))


def build(vit):
    torch.manual_seed(0)
    teacher = vit(drop_path_rate=0.1)
    student = copy.deepcopy(teacher)
    convert_(student)
    return TrajectoryDistillationTask(student, teacher, task_weight=1.)


def run(task, out=None, epochs=3, **kwargs):
    return fit(task, *loaders(), epochs=epochs, out=out, progress=False, lr=3e-3, **kwargs)


def test_trains_and_keeps_last_best_and_history(vit, tmp_path):
    task = build(vit)
    history = run(task, tmp_path / 'run', epochs=6, ema_decay=0.5, warmup_epochs=1)
    assert [r['epoch'] for r in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1]['loss'] < history[0]['loss'] and history[-1]['lr'] < history[1]['lr']
    assert {'trajectory_loss', 'kd_loss', 'task_loss', 'val_top1', 'val_loss', 'seconds'} <= set(history[0])
    assert json.loads((tmp_path / 'run' / 'history.json').read_text()) == history
    assert sorted(p.name for p in (tmp_path / 'run').iterdir()) == ['best', 'history.json', 'last.pt']
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True).eval()
    top1 = 100 * (best(X[32:]).argmax(1) == Y[32:]).double().mean().item()
    assert top1 == pytest.approx(max(r['val_top1'] for r in history))


@pytest.mark.parametrize('settings', [dict(), dict(ema_decay=0.9, opt='muon'), dict(amp='bfloat16', opt='sgd')])
def test_resume_gives_the_weights_of_an_undisturbed_run(vit, tmp_path, monkeypatch, settings):
    whole = build(vit)
    expected = run(whole, **settings)
    interrupted = build(vit)
    save = torch.save

    def save_twice_then_stop(state, path):
        if len(state['history']) == 3:
            raise KeyboardInterrupt
        save(state, path)
    monkeypatch.setattr(torch, 'save', save_twice_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, tmp_path / 'run', **settings)
    monkeypatch.undo()
    resumed = build(vit)
    history = run(resumed, tmp_path / 'run', resume=True, **settings)
    for ema in (False, True):
        if whole.has_ema() >= ema:
            ours, theirs = resumed.get_eval_model(ema=ema).state_dict(), whole.get_eval_model(ema=ema).state_dict()
            assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    strip = [{k: v for k, v in r.items() if k != 'seconds'} for r in history]
    assert strip == [{k: v for k, v in r.items() if k != 'seconds'} for r in expected]


def test_muon_multiplies_in_float32_on_a_cpu(vit, monkeypatch):
    seen, original = [], muon.zeropower_via_newtonschulz

    def spy(*args, **kwargs):
        seen.append(kwargs.get('dtype'))
        return original(*args, **kwargs)
    monkeypatch.setattr(muon, 'zeropower_via_newtonschulz', spy)
    history = run(build(vit), opt='muon')
    assert set(seen) == {torch.float32} and history[-1]['loss'] < history[0]['loss']
    assert muon.zeropower_via_newtonschulz is spy  # as it was


@pytest.mark.parametrize('ema_decay', [None, 0.5])
def test_trains_a_teacher_with_timms_own_task(vit, tmp_path, ema_decay):
    model = vit()
    history = run(ClassificationTask(model, torch.nn.CrossEntropyLoss()), tmp_path / 'run', epochs=8, ema_decay=ema_decay)
    assert history[-1]['loss'] < history[0]['loss']
    again = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    assert again.num_classes == 5


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(vit, tmp_path):
    task = build(vit)
    run(task, tmp_path / 'run', epochs=1)
    before = (tmp_path / 'run' / 'last.pt').read_bytes()
    with torch.no_grad():
        for p in task.trainable_module.parameters():
            p.fill_(float('nan'))
    bad = copy.deepcopy(task)
    torch_load = torch.load
    try:
        torch.load = lambda *a, **k: {**torch_load(*a, **k), 'model': bad.get_eval_model().state_dict()}
        with pytest.raises(FloatingPointError, match=r'not finite in epoch 2, batch 1 \(loss nan'):
            run(task, tmp_path / 'run', epochs=2, resume=True)
    finally:
        torch.load = torch_load
    assert (tmp_path / 'run' / 'last.pt').read_bytes() == before


def test_refuses(vit, tmp_path):
    task = build(vit)
    with pytest.raises(ValueError, match='epochs must be at least 1'):
        run(task, epochs=0)
    with pytest.raises(ValueError, match="Unknown amp 'fp16'"):
        run(task, amp='fp16')
    with pytest.raises(ValueError, match='train_loader is empty'):
        fit(task, [], epochs=1)
    with pytest.raises(ValueError, match='needs a length'):
        fit(task, iter([]), epochs=1)
    nameless = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=1, num_classes=5)
    with pytest.raises(ValueError, match='was not made by timm.create_model'):
        run(ClassificationTask(nameless, torch.nn.CrossEntropyLoss()), tmp_path / 'nameless')
    assert not (tmp_path / 'nameless').exists()
    for name, bad in (('clip_grad', -1), ('clip_grad', 0), ('ema_decay', 2), ('ema_decay', -0.1)):
        with pytest.raises(ValueError, match=f'{name} must be'):
            run(task, **{name: bad})
    frozen = build(vit)
    frozen.get_eval_model().requires_grad_(False)
    with pytest.raises(ValueError, match='Every parameter of the model is frozen'):
        run(frozen)
    run(task, tmp_path / 'run', epochs=1)
    with pytest.raises(ValueError, match="made with opt='adamw', this run has opt='sgd'"):
        run(task, tmp_path / 'run', epochs=2, resume=True, opt='sgd')
    with pytest.raises(ValueError, match='holds another model'):
        run(ClassificationTask(vit(depth=4), torch.nn.CrossEntropyLoss()), tmp_path / 'run', epochs=2, resume=True)
    with pytest.raises(ValueError, match='holds a run already. Pass resume=True'):
        run(task, tmp_path / 'run', epochs=1)
    torch.save({'model': {}}, tmp_path / 'run' / 'last.pt')
    with pytest.raises(ValueError, match='is not the state of a run of fit'):
        run(build(vit), tmp_path / 'run', epochs=2, resume=True)
    (tmp_path / 'run' / 'last.pt').write_bytes(b'cut off')
    with pytest.raises(ValueError, match='cannot be read .* Delete it to start anew'):
        run(build(vit), tmp_path / 'run', epochs=2, resume=True)
