"""A model may run in several threads at a time, and be interrupted at any moment: nothing in it changes."""
import copy
import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from conftest import converted, snapshot
from timm.task import ClassificationTask
from torch import nn

from timm_odevit import OdeConfig, convert_, evaluate, fit, merge_, merged_bytes, save_pretrained, with_steps
from timm_odevit.hooks import evaluating, watch_blocks
from timm_odevit.ode.methods import METHODS

KINDS = [
    OdeConfig(),
    OdeConfig(time='low_rank', rank=2),
    OdeConfig(time='low_rank', rank=2, phases=2, method='rk4', steps=2),
    OdeConfig(field='lipschitz', method='euler', time='low_rank'),
    OdeConfig(time='low_rank', method='dopri5'),
]
kinds = pytest.mark.parametrize('config', KINDS, ids=lambda c: f'{c.field}-{c.time}-{c.method}')


def in_threads(work, count=8):
    ready = threading.Barrier(count)

    def run(i):
        ready.wait()
        with torch.inference_mode():
            return work(i)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@kinds
def test_threads_get_the_answers_of_one(vit, config):
    model = converted(vit, config)
    images = torch.randn(64, 3, 16, 16)
    counts = [2, 3, 5]
    expected = {}
    with torch.inference_mode():
        for count in counts:
            expected[count] = [with_steps(model, count)(batch) for batch in images.split(8)]
    before = snapshot(model)

    def work(i):
        count = counts[i % len(counts)]
        view = with_steps(model, count)
        return count, [view(batch) for batch in images.split(8)]
    for count, answers in in_threads(work):
        assert all(torch.equal(a, b) for a, b in zip(answers, expected[count], strict=True))
    assert snapshot(model) == before


def test_a_view_shares_the_weights_but_not_the_steps(vit, images, tmp_path):
    model = converted(vit, OdeConfig(time='low_rank', rank=2))
    calls, handle = [], model.blocks[0].register_forward_hook(lambda *_: calls.append('model'))
    view = with_steps(model, 3)
    view.blocks[0].register_forward_hook(lambda *_: calls.append('view'))
    view(images)
    handle.remove()
    assert calls == ['view']  # its own hooks alone
    view, expected, before = with_steps(model, 6), model(images), snapshot(model)
    assert view.blocks.steps == 6 and len(view.feature_info) == 6 and view.blocks[5].field is model.blocks.shared
    assert model.blocks.steps == 3 and len(model.feature_info) == 3
    assert list(view.state_dict()) == list(model.state_dict())
    view.blocks.steps = 3
    assert torch.equal(view(images), expected) and snapshot(model) == before
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    model.cls_token = nn.Parameter(model.cls_token + 1)
    assert torch.equal(view(images), model(images))
    save_pretrained(with_steps(view, 6), tmp_path)
    saved = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert saved.blocks.steps == 6 and torch.equal(saved(images), with_steps(model, 6)(images))
    assert copy.deepcopy(view).blocks.steps == 3
    compiled = torch.compile(model, backend='eager')
    assert torch.equal(with_steps(compiled, 6)(images), saved(images))


def test_a_view_has_rope_tables_for_its_steps():
    model = timm.create_model('vit_small_patch16_rope_mixed_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2,
                              depth=3, num_classes=5).eval()
    convert_(model)
    images, view = torch.randn(2, 3, 16, 16), with_steps(model, 7)
    found = view(images)
    model.blocks.steps = 7
    assert torch.equal(found, model(images))


@pytest.mark.parametrize('steps', [0, None, 2.5, (2, 3), '3'])
def test_a_view_refuses(vit, steps):
    with pytest.raises(ValueError, match='steps (must be|and T are needed)'):
        with_steps(converted(vit, OdeConfig()), steps)
    with pytest.raises(TypeError, match='has no steps'):
        with_steps(vit(), 3)


def test_training_beside_inference_gives_the_gradients_of_one_thread(vit, images):
    model = converted(vit, OdeConfig(time='low_rank', rank=2))
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(images).square().sum(), parameters)

    def work(i):
        if i % 2:
            return [model(images) for _ in range(10)][-1]
        with torch.inference_mode(False), torch.enable_grad():
            return torch.autograd.grad(model(images.clone()).square().sum(), parameters)
    for i, found in enumerate(in_threads(work, 4)):
        if i % 2 == 0:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_last_of_two_evaluations_ends_eval_mode(vit):
    model = vit().train()
    model.norm.eval()
    first, second = evaluating(model), evaluating(model)
    for context in (first, second):
        context.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert model.training and model.blocks[0].mlp.training and not model.norm.training


def test_hooks_of_one_thread_do_not_record_another(vit, images):
    model = converted(vit, OdeConfig())
    with watch_blocks([list(model.blocks)]) as seen:
        thread = threading.Thread(target=lambda: model(images))
        thread.start()
        thread.join()
        assert not seen[0][0]
        model(images)
    assert len(seen[0][0]) == 4


class Stop(BaseException):
    pass


@kinds
def test_an_exception_anywhere_in_the_block_leaves_no_trace(vit, images, config):
    """The block is stopped at every 31st of its calls of a function, one after the other, until it runs through."""
    model = converted(vit, config)
    with torch.no_grad():
        expected = model(images)
    before = snapshot(model)
    for after in range(0, 3000, 31):
        count = 0

        def trace(frame, event, arg, after=after):
            nonlocal count
            count += event == 'call'
            if count > after:
                raise Stop
        try:
            sys.setprofile(trace)
            with torch.no_grad():
                model(images)
            sys.setprofile(None)
            break
        except Stop:
            sys.setprofile(None)
            torch.set_grad_enabled(True)  # torch's own no_grad does not survive a stop in its __enter__ or __exit__
        assert snapshot(model) == before
    with torch.no_grad():
        assert torch.equal(model(images), expected)


def test_hooks_that_cannot_be_copied_stay_behind(vit, images):
    model, calls = vit(), []

    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, *_):
            calls.append(1)
    for module in (model.blocks[0], model.blocks[0].mlp.act):
        module.register_forward_hook(Locked())
        module.register_full_backward_hook(Locked())
    with pytest.raises(TypeError, match='cannot pickle'):
        copy.deepcopy(model.blocks[0])
    for config in (OdeConfig(), OdeConfig(time='low_rank', rank=2), OdeConfig(field='lipschitz', method='euler')):
        done = convert_(model, config)
        model(images)
        assert not calls
        done.restore()
    model(images)
    assert len(calls) == 2


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('config', [dict(time='low_rank', rank=2), dict(time='low_rank', phases=2),
                                    dict(time='low_rank', rank=2, field='lipschitz')], ids=str)
def test_merged_is_the_same_and_ordinary(vit, images, method, config):
    model = converted(vit, OdeConfig(method=method, steps=4, **config))
    with torch.no_grad():
        expected, keys = model(images), list(model.state_dict())
        predicted = merged_bytes(model)
        done = merge_(model)
        torch.testing.assert_close(model(images), expected)
        assert done.bytes_after == predicted > done.bytes_before and f'{predicted / 1e6:.1f} MB' in str(done)
        assert len(model.blocks) == 4 and not any(p.requires_grad for p in model.blocks.parameters())
        if method in ('lie_trotter', 'rk4'):
            torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), expected)
        torch.testing.assert_close(model.forward_head(model.forward_intermediates(images)[0]), expected)
        done.restore()
        assert list(model.state_dict()) == keys and torch.equal(model(images), expected)
    with pytest.raises(ValueError, match='no longer holds the merged blocks'):
        done.restore()


def test_merging_refuses_and_is_refused(vit, images, tmp_path):
    with pytest.raises(TypeError, match='Cannot merge VisionTransformer: it is not an ODE-ViT'):
        merge_(vit())
    with pytest.raises(ValueError, match='There is nothing to merge: the shared block does not depend on time'):
        merge_(converted(vit, OdeConfig()))
    with pytest.raises(ValueError, match="'dopri5' chooses its own times"):
        merge_(converted(vit, OdeConfig(time='low_rank', method='dopri5')))
    model = vit()
    conversion = convert_(model, OdeConfig(time='low_rank', blocks=(1, 1)))
    kept, expected = model.blocks[0], model(images)
    done = merge_(model)
    assert model.blocks[0] is kept and torch.equal(model(images), expected) and kept.mlp.fc1.weight.requires_grad
    for call in (lambda: merge_(model), lambda: convert_(model), lambda: save_pretrained(model, tmp_path / 'x'),
                 conversion.restore):
        with pytest.raises(ValueError, match='This model is merged. Call'):
            call()
    assert not list(tmp_path.iterdir())
    done.restore()
    conversion.restore()


def test_every_kind_of_hook_on_a_step_is_called(vit, images):
    model, calls = converted(vit, OdeConfig(time='low_rank', rank=2)), []
    step = model.blocks[1]
    assert step is model.blocks.solver[1]
    handles = [step.register_forward_pre_hook(lambda *_: calls.append('before')),
               step.register_forward_hook(lambda *_, **__: calls.append('after'), with_kwargs=True),
               step.register_full_backward_pre_hook(lambda *_: calls.append('backward before')),
               step.register_full_backward_hook(lambda *_: calls.append('backward after'))]
    model(images).sum().backward()
    assert calls == ['before', 'after', 'backward before', 'backward after']
    model.forward_intermediates(images)
    model.blocks[:2](torch.randn(1, 17, 32))  # of which timm's pruning makes use
    assert calls[4:] == ['before', 'after'] * 2
    for handle in handles:
        handle.remove()
    model.blocks.shared.base.block.attn.register_forward_hook(lambda *_: calls.append('inner'))
    model(images).sum().backward()
    assert calls[8:] == ['inner'] * 3


def test_copies_of_a_conversion_restore_too(vit, images):
    model = vit()
    expected = model(images)
    done = convert_(model)
    twin, again = copy.deepcopy((model, done))
    again.restore()
    assert torch.equal(twin(images), expected) and twin.group_matcher()


@pytest.mark.parametrize('where', ['inner', 'step', 'field'])
def test_hooks_that_change_the_output_do_so_when_merged(vit, images, where):
    model = converted(vit, OdeConfig(time='low_rank', rank=2))
    target = {'inner': model.blocks.shared.base.block.mlp, 'step': model.blocks[1], 'field': model.blocks.shared.base}[where]
    before = model(images)
    target.register_forward_hook(lambda module, args, out: 0.5 * out)
    expected = model(images)
    assert not torch.allclose(before, expected)
    done = merge_(model)
    torch.testing.assert_close(model(images), expected)
    calls = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    model(images)
    done.restore()
    model(images)
    assert calls == [1]  # what is put on a merged block is its own


def test_merged_models_say_what_they_cannot_do(vit, images):
    model = converted(vit, OdeConfig(time='low_rank', rank=2, steps=6))
    done = merge_(model)
    for name, value in (('steps', 2), ('method', 'euler')):
        with pytest.raises(ValueError, match='This model is merged. Call'):
            setattr(model.blocks, name, value)
    with pytest.raises(ValueError, match='This model is merged'):
        with_steps(model, 2)
    batch = (images, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match='This model is merged'):
        evaluate(model, [batch], steps=(1, 2))
    assert evaluate(model, [batch]).results[0].images == 2
    with pytest.raises(ValueError, match='This model is merged'):
        fit(ClassificationTask(model, nn.CrossEntropyLoss()), [batch], epochs=1)
    names = dict(model.named_modules())
    assert [info['module'] for info in model.feature_info] == [f'blocks.solver.{i}' for i in range(6)]
    assert all(info['module'] in names for info in model.feature_info)
    assert model.blocks[2:].layers == done.blocks[0].layers[2:]
    done.restore()
    assert model.feature_info is model.blocks.feature_info


def test_a_forward_that_wrappers_replaced(vit, images):
    """As Accelerate does: a partial of a function over the module, which calls the old forward."""
    model = converted(vit, OdeConfig(time='low_rank', rank=2))
    with torch.no_grad():
        expected = model(images)
        for module in model.modules():
            def new_forward(self, *args, **kwargs):
                return 2 * self._old_forward(*args, **kwargs) / 2
            if isinstance(module, nn.Linear):
                module._old_forward = module.forward
                module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)
        torch.testing.assert_close(model(images), expected)
        done = merge_(model)
        torch.testing.assert_close(model(images), expected)
        done.restore()
        model.blocks.shared.base.block.mlp.fc1.forward = lambda x: x
        with pytest.raises(RuntimeError, match='forward of this Linear was replaced by a function'):
            model(images)
