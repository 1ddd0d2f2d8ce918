"""Token merging along t."""
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import timm
import torch
from conftest import converted
from timm.models import FeatureGraphNet
from torch.utils.checkpoint import checkpoint

from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_, fit
from timm_odevit.dynamics.flow import follow
from timm_odevit.hooks import watch_blocks
from timm_odevit.ode.tokens import TokenMerging, groups_of, tokens_at


def embedded(model, images):
    return model.norm_pre(model._pos_embed(model.patch_embed(images)))


def with_tokens(vit, share=0.5, **kwargs):
    return converted(vit, OdeConfig(tokens=share, **kwargs))


@pytest.mark.parametrize('config', [
    dict(), dict(method='strang'), dict(field='lipschitz', method='euler', init='mean'), dict(phases=3)], ids=str)
def test_merging_equal_tokens_changes_nothing(vit, images, config):
    """Known answer: tokens that are equal stay equal, and a group of n counts n times in attention."""
    model = with_tokens(vit, 0.5, **config)
    x = embedded(model, images)
    x = torch.cat([x[:, :1], x[:, 1:9].repeat_interleave(2, dim=1)], dim=1)
    merged = model.blocks(x)
    model.blocks.config = replace(model.blocks.config, tokens=1.)
    torch.testing.assert_close(merged, model.blocks(x), atol=1e-5, rtol=1e-5)


def test_merging_different_tokens_changes_something_and_every_token_keeps_its_place(vit, images):
    model = with_tokens(vit, 0.25)
    x = embedded(model, images)
    path = model.blocks.trajectory(x)
    assert path.shape == (4, 2, 17, 32)
    counts = [len(torch.unique(state[0].detach().round(decimals=4), dim=0)) for state in path[1:]]
    # 16 patch tokens at t = 0, 12 at t = 1, 8 at t = 2, and the class token
    assert counts == [17, 13, 9]
    model.blocks.config = replace(model.blocks.config, tokens=1.)
    whole = model.blocks.trajectory(x)
    assert torch.equal(path[1], whole[1])  # before the first merge
    assert not torch.allclose(path[-1], whole[-1])


def test_the_report_says_how_many_tokens_are_left(vit):
    merged, plain = (str(convert_(vit(), phases=3, tokens=share)) for share in (0.2, 1.))
    assert '  tokens      merged along t, 20 % of the patches left at T\n' in merged and 'tokens' not in plain


def test_a_group_is_the_mean_of_its_tokens():
    merging = TokenMerging(0.5, 1, 0., 2.)
    x = torch.tensor([[[9., 9.], [1., 0.], [0., 1.], [0., 3.], [-1., 0.]]])  # a prefix token and 4 patch tokens
    merged, groups = merging.merge(x, 0.5, 5, None)  # 3 of the 4 are left: the second and the third have the same direction
    assert merged.tolist() == [[[9., 9.], [1., 0.], [0., 2.], [-1., 0.]]]
    assert groups.sizes.tolist() == [[1., 1., 2., 1.]]
    assert groups.numbers.tolist() == [[0, 1, 2, 2, 3]]
    merged, groups = merging.merge(merged, 1., 5, groups)  # 2 are left: the group of two goes on with both
    assert groups.sizes.sum() == 5 and merged.shape == (1, 3, 2)
    for group in range(3):
        torch.testing.assert_close(merged[0, group], x[0, groups.numbers[0] == group].mean(dim=0))


def test_the_number_of_tokens_falls_linearly_in_t():
    assert [tokens_at(100, 0.4, t) for t in (0., 0.5, 1.)] == [100, 70, 40] and tokens_at(2, 0.1, 1.) == 1


def test_prefix_tokens_are_never_merged(vit, images):
    model = vit('vit_tiny_patch16_224', reg_tokens=2)
    whole = torch.nn.Module()
    whole.encoder = model  # which has them, not the model that is converted
    convert_(whole, tokens=0.2)
    x = embedded(model, images)
    x[:, :3] = x[:, :1]  # even if they are equal
    for step in model.blocks:
        x = step(x)
    groups = groups_of(x)
    assert groups.numbers[:, :3].tolist() == [[0, 1, 2]] * 2 and (groups.numbers[:, 3:] > 2).all()


def test_the_state_of_every_step_has_all_tokens(vit, images):
    model = with_tokens(vit, 0.25)
    final, states = model.forward_intermediates(images, output_fmt='NLC', return_prefix_tokens=True)
    torch.testing.assert_close(final, model.forward_features(images))
    assert all(patches.shape == (2, 16, 32) for patches, _ in states)
    with watch_blocks([list(model.blocks)]) as seen:
        model(images)
    assert [tuple(state.shape) for state in seen[0][0]] == [(2, 17, 32)] * 4
    with pytest.raises(ValueError, match='tokens=1'), follow(model, images):
        pass


def test_gradient_checkpointing_of_the_steps_in_another_thread_after_another_pass(vit, images):
    """Autograd computes a step again in a thread of its own on a GPU, and there may have been other passes before."""
    model = with_tokens(vit, 0.25).train()
    x = embedded(model, images).detach().requires_grad_()
    expected = [torch.autograd.grad(model.blocks(x * k).square().sum(), x)[0] for k in (1, 2)]
    outputs = []
    for k in (1, 2):
        y = x * k
        for step in model.blocks:
            y = checkpoint(step, y, use_reentrant=False)
        outputs.append(y.square().sum())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [y.backward() for y in outputs]).result()
    torch.testing.assert_close(x.grad, sum(expected))
    for step in model.blocks:
        x = checkpoint(step, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match='use_reentrant=False'):
        x.sum().backward()


def test_derivatives_by_function_transforms(vit, images):
    model = with_tokens(vit, 0.25)
    x = images.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: model(x).square().sum())(images), expected)
    y = embedded(model, images).detach().requires_grad_()
    expected = torch.stack([torch.autograd.grad(model.blocks(y)[0, -1, i], y)[0] for i in range(3)])
    torch.testing.assert_close(torch.func.jacrev(lambda y: model.blocks(y)[0, -1, :3])(y.detach()), expected)


@pytest.mark.parametrize('reentrant', [False, True])
def test_a_whole_forward_pass_may_run_inside_a_backward_pass(vit, images, reentrant):
    model = with_tokens(vit, 0.3)
    x = images.clone().requires_grad_()
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    seen, out = [], model(x)
    out.register_hook(lambda gradient: seen.append(model(images)))
    out.sum().backward()
    torch.testing.assert_close(seen[0], model(images))


def test_distillation_with_merged_tokens_follows_all_tokens(vit, images):
    teacher = vit()
    student = convert_(copy.deepcopy(teacher), tokens=0.5).model
    task = TrajectoryDistillationTask(student, teacher, verbose=False).train()
    before = task(images, None)['loss']
    fit(task, [(images, torch.tensor([0, 1]))], epochs=20, opt='adam', lr=1e-3, progress=False)
    assert task.train()(images, None)['loss'] < before


def test_compiled_and_exported(vit, images):
    model = with_tokens(vit, 0.4, phases=2)
    with torch.no_grad():
        expected = model(images)
        compiled = torch.compile(model, fullgraph=True, backend='eager')
        torch.testing.assert_close(compiled(images), expected)
        torch.testing.assert_close(torch.compile(model, dynamic=True, backend='eager')(images), expected)
        batch = torch.export.Dim('batch', max=64)
        exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},)).module()
        torch.testing.assert_close(exported(images.repeat(2, 1, 1, 1)), expected.repeat(2, 1))


def test_a_slice_merges_as_fast_as_the_whole(vit, images):
    model = with_tokens(vit, 0.3, steps=6, phases=2).eval()
    with torch.no_grad():
        x, expected = embedded(model, images), model.forward_intermediates(
            images, output_fmt='NLC', return_prefix_tokens=True, intermediates_only=True)
        for count in range(1, 7):
            patches, prefix = expected[count - 1]
            y = model.blocks[:count](x)
            torch.testing.assert_close(y, torch.cat([prefix[:, None] if prefix.ndim == 2 else prefix, patches], dim=1))
        late = model.blocks[3:]
        config = late.config
        assert config.steps == 3 and config.tokens == pytest.approx(0.65)
        assert late.t == pytest.approx(config.T)
        assert len(torch.unique(late(x)[0], dim=0)) == 1 + tokens_at(16, 0.3, 5 / 6)


def test_fx_does_not_drop_merged_tokens(vit):
    with pytest.raises(ValueError, match='tokens=1'):
        FeatureGraphNet(with_tokens(vit).eval(), out_indices=(0,))


@pytest.mark.parametrize('change', [
    lambda x: x[:1], lambda x: x.clone(), lambda x: x.transpose(0, 1), lambda x: x.detach(), lambda x: x.index_fill_(1, torch.tensor([3]), 1.)])
def test_only_the_very_state_that_a_step_returned_has_groups(vit, change):
    model = with_tokens(vit, 0.3, steps=6)
    with torch.no_grad():
        x = model.blocks[2](torch.randn(17, 17, 32))
        assert groups_of(x) is not None
        y = change(x)  # a hook that steers one token in place, say
        assert groups_of(y) is None and torch.equal(model.blocks[3](y), model.blocks[3](y.clone()))


def test_compiled_steps_go_on_where_others_ended(vit, images):
    model = with_tokens(vit, 0.3, steps=4).eval()
    with torch.no_grad():
        x = embedded(model, images)
        expected, y = model.blocks(x), x
        for step in model.blocks:
            y = torch.compile(step, fullgraph=True, backend='eager')(y)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize('name, kwargs', [
    ('swin_tiny_patch4_window7_224', dict(img_size=56, depths=(2, 2), embed_dim=24, num_heads=(2, 2))),
    ('eva02_tiny_patch14_224', dict(img_size=28, depth=2, embed_dim=48, num_heads=2))])
def test_refused_where_attention_depends_on_positions(name, kwargs):
    model = timm.create_model(name, num_classes=3, **kwargs)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match='windows, RoPE'):
        convert_(model, tokens=0.5)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_refused_under_a_mask(vit, images):
    model = with_tokens(vit)
    with pytest.raises(ValueError, match='attention mask'):
        model(images, attn_mask=torch.ones(2, 1, 17, 17, dtype=torch.bool))
