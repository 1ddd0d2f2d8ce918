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
from torch import nn

from timm_odevit import OdeConfig, convert_, save_pretrained, with_steps
from timm_odevit.hooks import evaluating, watch_blocks

KINDS = [
    OdeConfig(),
    OdeConfig(phases=2, method='rk4', steps=2),
    OdeConfig(field='lipschitz', method='euler', phases=2),
    OdeConfig(phases=2, method='dopri5'),
    OdeConfig(phases=2, tokens=0.4),
]
kinds = pytest.mark.parametrize('config', KINDS, ids=repr)


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
    model = converted(vit, OdeConfig(phases=2))
    calls, handle = [], model.blocks[0].register_forward_hook(lambda *_: calls.append('model'))
    view = with_steps(model, 3)
    view.blocks[0].register_forward_hook(lambda *_: calls.append('view'))
    view(images)
    handle.remove()
    assert calls == ['view']  # its own hooks alone
    view, expected, before = with_steps(model, 6), model(images), snapshot(model)
    assert view.blocks.steps == 6 and len(view.feature_info) == 6 and view.blocks[5].field is model.blocks.shared.fields[1]
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
    model = converted(vit, OdeConfig(phases=2))
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
    for config in (OdeConfig(), OdeConfig(phases=2), OdeConfig(field='lipschitz', method='euler')):
        done = convert_(model, config)
        model(images)
        assert not calls
        done.restore()
    model(images)
    assert len(calls) == 2


def test_hooks_on_a_step_and_inside_it_are_called(vit, images):
    model, calls = converted(vit, OdeConfig()), []
    step = model.blocks[1]
    assert step is model.blocks.solver[1]
    step.register_forward_hook(lambda *_, **__: calls.append('after'), with_kwargs=True)
    step.register_full_backward_hook(lambda *_: calls.append('backward'))
    model.blocks.shared.block.attn.register_forward_hook(lambda *_: calls.append('inner'))
    model(images).sum().backward()
    assert calls == ['inner', 'inner', 'after', 'inner', 'backward']
    model.forward_intermediates(images)
    model.blocks[:2](torch.randn(1, 17, 32))  # of which timm's pruning makes use
    assert calls[5:].count('after') == 2


def test_copies_of_a_conversion_restore_too(vit, images):
    model = vit()
    expected = model(images)
    done = convert_(model)
    twin, again = copy.deepcopy((model, done))
    again.restore()
    assert torch.equal(twin(images), expected) and twin.group_matcher()


def test_a_view_of_a_model_whose_forward_a_wrapper_replaced(vit, images):
    """As Accelerate does: a partial of a function over the module, which calls the old forward."""
    model = converted(vit)
    expected = with_steps(model, 6)(images)

    def new_forward(self, *args, **kwargs):
        return 2 * self._old_forward(*args, **kwargs)
    model._old_forward = model.forward
    model.forward = functools.update_wrapper(functools.partial(new_forward, model), model._old_forward)
    assert torch.equal(with_steps(model, 6)(images), 2 * expected)
    model.forward = lambda x: x
    with pytest.raises(RuntimeError, match='forward of this VisionTransformer was replaced by a function'):
        with_steps(model, 6)


def test_a_view_groups_its_own_parameters(vit):
    model = converted(vit, OdeConfig(phases=2))
    model.reset_classifier(0)
    twin = with_steps(model, 3)
    twin.reset_classifier(7)
    assert timm.optim.create_optimizer_v2(twin, 'adamw', lr=1e-3, layer_decay=0.7).param_groups
