"""The reversible method: steps that can be undone, and a backward pass that keeps no states."""
import copy

import pytest
import timm
import torch

from timm_odevit import OdeConfig, StepwiseTask, TrajectoryDistillationTask, convert_, integrate, merge_
from timm_odevit.ode.reversible import step_forth


def reversible(vit, **kwargs):
    model = vit()
    convert_(model, method='reversible', **kwargs)
    return model


def gradients(model, images, through_steps):
    """Gradients by the method's own backward pass, or by plain back-propagation through its steps."""
    images = images.clone().requires_grad_()
    handles = [step.register_forward_hook(lambda *_: None) for step in model.blocks] if through_steps else []
    out = model(images)
    (out * torch.arange(1., 1 + out.shape[1], dtype=out.dtype)).sum().backward()
    for handle in handles:
        handle.remove()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.detach(), {**found, 'images': images.grad}


@pytest.mark.parametrize('config', [
    dict(), dict(time='low_rank', rank=2), dict(phases=3), dict(field='lipschitz', init='mean'), dict(steps=7)], ids=str)
def test_gradients_are_those_of_plain_back_propagation(vit, images, config):
    model = reversible(vit, **config).double().train()
    (out, found), (plain_out, plain) = (gradients(model, images.double(), through) for through in (False, True))
    assert torch.equal(out, plain_out) and found.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-9, msg=name)  # rounding of 12 steps back
    assert found['images'].abs().sum() > 0


def test_only_what_is_trained_gets_gradients(vit, images):
    model = reversible(vit).train().requires_grad_(False)
    model.blocks.shared.block.mlp.requires_grad_(True)
    _, found = gradients(model, images, False)
    assert {name for name in found if name != 'images'} == {
        f'blocks.shared.block.mlp.{fc}.{kind}' for fc in ('fc1', 'fc2') for kind in ('weight', 'bias')}


def test_a_step_alone_starts_from_two_equal_states(vit, images):
    model = reversible(vit)
    x = torch.randn(2, 17, 32)
    for step in model.blocks:
        y, _ = step_forth(step, x, x, step.field.context((), {}))
        torch.testing.assert_close(model.blocks[int(step.t)](x), y)


def test_gradients_are_those_of_the_parameters_that_ran(vit, images):
    """torch.func.functional_call swaps them for the forward pass only."""
    model = reversible(vit).double().train()
    swapped = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}

    def gradients_of(call):
        return torch.autograd.grad(call().square().sum(), list(swapped.values()), allow_unused=True)
    found = gradients_of(lambda: torch.func.functional_call(model, swapped, (images.double(),)))
    for p, value in zip(model.parameters(), swapped.values(), strict=True):
        p.data.copy_(value.detach())
    _, plain = gradients(model, images.double(), True)
    model.zero_grad()
    model(images.double()).square().sum().backward()
    for grad, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-8, atol=1e-8)
    assert plain


def test_function_transforms_use_plain_steps(vit, images):
    model = reversible(vit).double()
    weights = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, (images.double(),)).square().sum()
    found = torch.func.grad(loss)(weights)
    model(images.double()).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-8, atol=1e-8)


def test_low_precision_is_as_exact_as_plain_back_propagation(vit, images):
    """The states are kept in float32, because undoing a step would amplify the rounding of bfloat16."""
    model = reversible(vit, steps=24).train()
    _, exact = gradients(model, images, True)
    model.bfloat16()
    errors = []
    for through_steps in (False, True):
        _, found = gradients(model, images.bfloat16(), through_steps)
        a, b = (torch.cat([g[name].float().flatten() for name in exact if name != 'images']) for g in (found, exact))
        errors.append(((a - b).norm() / b.norm()).item())
    assert errors[0] < 1.2 * errors[1], errors


def test_memory_of_training_does_not_grow_with_K(vit, images):
    """What the backward pass of a model saves, in bytes of tensors."""
    def saved(method, K):
        model = vit()
        convert_(model, method=method, steps=K)
        seen = {}

        def pack(x):
            seen[x.data_ptr()] = x.numel() * x.element_size()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.train()(images)
        return sum(seen.values())
    assert saved('reversible', 48) == saved('reversible', 12)
    assert saved('euler', 48) > 2 * saved('euler', 12)


def test_all_ways_to_run_it_agree(vit, images):
    model = reversible(vit, time='low_rank', rank=2)
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(model.forward_intermediates(images)[0], model.forward_features(images))
        torch.testing.assert_close(model.blocks.trajectory(x)[-1], model.blocks(x))
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(images), expected)
        torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), expected)
        merge_(model)
        torch.testing.assert_close(model(images), expected)


def test_converges_to_the_solution_of_euler(vit, images):
    model = reversible(vit).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    with torch.no_grad():
        exact = integrate(model.blocks.shared, x, OdeConfig(method='rk4', steps=200, T=3.))
        errors = [(integrate(model.blocks.shared, x, OdeConfig(method='reversible', steps=K, T=3.)) - exact).norm()
                  for K in (100, 200)]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize('settings', [dict(method='reversible'), dict(tokens=0.5)], ids=str)
def test_a_step_that_learns_on_its_own_does_not_go_on_from_the_step_before(vit, images, settings):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student, phases=3, **settings)
    states = [teacher.blocks[:k](teacher.patch_drop(teacher._pos_embed(teacher.patch_embed(images)))) for k in range(4)]
    errors = [(student.blocks[k](states[k]) - states[k + 1]).square().mean() / (states[k + 1] - states[k]).square().mean()
              for k in range(3)]
    torch.testing.assert_close(StepwiseTask(student, teacher)(images)['loss'], torch.stack(errors).mean())
    with pytest.raises(ValueError, match='unlike those of merged tokens'):
        TrajectoryDistillationTask(student, teacher, segments=(3,))


def test_what_is_refused(vit, images):
    dropping = vit(proj_drop_rate=0.1)
    convert_(dropping, method='reversible')
    dropping.train()
    with pytest.raises(ValueError, match='drops at random'):
        dropping(images)
    assert dropping.eval()(images).shape == (2, 5)
    model = reversible(vit).train()
    model.set_grad_checkpointing()
    with pytest.raises(RuntimeError, match='without gradient checkpointing'):
        model(images).sum().backward()
    with pytest.raises(ValueError, match='could not be undone'):
        OdeConfig(method='reversible', tokens=0.5)
    with pytest.raises(ValueError, match='another method first'):
        torch.jit.script(reversible(vit))
    frozen = reversible(vit).requires_grad_(False)
    assert not frozen(images).requires_grad


def test_under_autocast_and_with_rope(images):
    eva = timm.create_model('eva02_tiny_patch14_224', img_size=28, depth=2, embed_dim=48, num_heads=2, num_classes=3)
    convert_(eva, method='reversible')
    x = torch.randn(2, 3, 28, 28)
    with torch.autocast('cpu', torch.bfloat16):
        eva.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in eva.blocks.parameters())


def test_halting(vit):
    model = reversible(vit, halting='residual', halting_threshold=0.2)
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), torch.cat([copy.deepcopy(model)(image[None]) for image in x]))
