import copy
import pickle
from functools import partial

import pytest
import torch
from conftest import converted, reloaded
from timm.models import FeatureGraphNet, FeatureHookNet
from timm.utils import ModelEmaV3
from torch import nn

from timm_odevit import OdeConfig, convert_, with_steps
from timm_odevit.benchmark import peak_of
from timm_odevit.ode.fields import FIELDS, Field
from timm_odevit.ode.methods import METHODS

KINDS = [
    OdeConfig(method='lie_trotter'),
    *(OdeConfig(field=field, method='euler', init='spectral') for field in FIELDS if field != 'native'),
    OdeConfig(field='lipschitz', method='strang', steps=2),
    OdeConfig(method='rk4', steps=4),
]
kinds = pytest.mark.parametrize('config', KINDS, ids=lambda c: f'{c.field}-{c.method}')


@pytest.mark.parametrize('layer_scale', [None, 0.1])
def test_lie_trotter_at_h_1_is_that_block_applied_L_times(vit, images, layer_scale):
    model = vit(init_values=layer_scale)
    repeated = copy.deepcopy(model)
    convert_(model)
    repeated.blocks = nn.Sequential(*[model.blocks.shared.block] * 3)
    assert torch.equal(model(images), repeated(images))


@kinds
def test_is_the_sequence_of_its_steps(vit, images, config):
    model = converted(vit, config)
    blocks, K = model.blocks, len(model.blocks)
    final, states = model.forward_intermediates(images, output_fmt='NLC', return_prefix_tokens=True)
    assert len(states) == len(list(blocks)) == K == len(model.feature_info) == blocks.steps
    torch.testing.assert_close(final, model.forward_features(images))
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    path = blocks.trajectory(x)
    assert path.shape == (K + 1, 2, 17, 32)
    torch.testing.assert_close(path[-1], blocks(x))
    for state, (patches, prefix) in zip(path[1:], states):
        torch.testing.assert_close(state, torch.cat([prefix, patches], dim=1))
    torch.testing.assert_close(blocks[:2](x), path[2])
    torch.testing.assert_close(blocks[1:](path[1]), path[-1])
    torch.testing.assert_close(blocks[-1](path[-2]), path[-1])
    assert blocks[1:].t == pytest.approx(blocks[1].t)
    blocks.train().shared.eval()
    assert blocks[1:].training and not blocks.shared.training
    assert [m['module'] for m in model.feature_info] == [f'blocks.solver.{i}' for i in range(K)]
    assert model.feature_info[0]['num_chs'] == 32 and model.feature_info[0]['reduction'] == 4
    with pytest.raises(IndexError):
        blocks[K]
    assert list(blocks[::2]) == list(blocks)[::2] and not len(blocks[2:2])  # as of any nn.Sequential


def test_masks_reach_every_evaluation(vit, images):
    for config in KINDS:
        model = converted(vit, config)
        mask = torch.zeros(2, 1, 17, 17)
        mask[..., 9:] = float('-inf')
        assert not torch.allclose(model(images, attn_mask=mask), model(images))
        x = model._pos_embed(model.patch_embed(images))
        torch.testing.assert_close(model.blocks(x, attn_mask=mask), model.blocks.trajectory(x, attn_mask=mask)[-1])
        assert not torch.allclose(model(images, is_causal=True), model(images))


def test_the_dial(vit, images):
    model = converted(vit)
    for steps in (1, 5, 3):
        model.blocks.steps = steps
        assert len(model.blocks) == len(model.feature_info) == model.blocks.nfe == steps
        assert model.blocks[0].h == pytest.approx(3 / steps)
        model(images)
    model.blocks.method = 'rk4'
    assert model.blocks.nfe == 12
    fine = model(images)
    model.blocks.method, model.blocks.steps = 'strang', 64
    torch.testing.assert_close(model(images), fine, rtol=1e-2, atol=1e-2)
    for bad in (0, 2.5, None, '3', 10 ** 9):
        with pytest.raises(ValueError, match='steps (must be|and T are needed)'):
            model.blocks.steps = bad
    with pytest.raises(ValueError, match="Unknown method 'rk5'"):
        model.blocks.method = 'rk5'
    assert model.blocks.steps == 64 and model.blocks.method == 'strang'


@pytest.mark.parametrize('method', METHODS)
def test_nfe_counts_the_calls(vit, images, method):
    model = converted(vit, OdeConfig(method=method, steps=5))
    calls = []
    model.blocks.shared.block.attn.register_forward_hook(lambda *_: calls.append(0.5))
    model.blocks.shared.block.mlp.register_forward_hook(lambda *_: calls.append(0.5))
    model(images)
    assert sum(calls) == model.blocks.nfe == 5 * METHODS[method].evaluations


def test_adaptive_methods_measure_their_evaluations(vit, images):
    model = converted(vit, OdeConfig(field='lipschitz', method='dopri5', init='spectral', rtol=1e-5, atol=1e-5))
    assert model.blocks.nfe == 0
    calls = []
    model.blocks.shared.register_forward_hook(lambda *_: calls.append(1))
    logits = model(images)
    assert (nfe := model.blocks.nfe) == len(calls) > 6
    with torch.autocast('cpu', torch.bfloat16):
        assert (model(images).float() - logits).norm() < 0.1 * logits.norm() and model.blocks.nfe <= 1.5 * nfe
    final, states = model.forward_intermediates(images)
    assert len(states) == 3
    torch.testing.assert_close(model.forward_head(final), logits, rtol=1e-3, atol=1e-3)
    for loose in ({'rtol': 0.1}, {'atol': 0.1}):
        (other := converted(vit, OdeConfig(field='lipschitz', method='dopri5', init='spectral', **{'rtol': 1e-5, 'atol': 1e-5, **loose})))(images)
        assert 6 < other.blocks.nfe < nfe


def test_an_adaptive_method_takes_an_empty_batch(vit):
    model = converted(vit, OdeConfig(method='dopri5', phases=3))
    assert model(torch.empty(0, 3, 16, 16)).shape == (0, 5) and model.blocks.nfe == 0
    assert model.blocks.trajectory(torch.empty(0, 17, 32)).shape == (4, 0, 17, 32)


@kinds
def test_compiles_in_one_graph_and_exports(vit, images, config):
    model = converted(vit, config)
    torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), model(images))
    assert model.feature_info is model.blocks.feature_info
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(images), model(images))
    model.train()
    compiled(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()


@kinds
def test_copies_are_whole_and_apart(vit, images, config):
    model = converted(vit, config)
    expected = model(images)
    ema = ModelEmaV3(model, decay=0.5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), ema.module):
        assert torch.equal(twin(images), expected)
        twin.blocks.steps = 2
        assert len(twin.feature_info) == 2 and twin.blocks[0].field is twin.blocks.shared
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(model(images), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0)
    ema.update(model)
    assert not torch.equal(ema.module(images), expected)


@kinds
def test_half_precision_and_autocast(vit, images, config):
    model = converted(vit, config)
    expected = model(images)
    with torch.autocast('cpu', torch.bfloat16):
        assert (model(images).float() - expected).norm() < 0.1 * expected.norm()
    half = model.bfloat16()(images.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize('config', [*KINDS, OdeConfig(tokens=0.25)], ids=str)
def test_gradient_checkpointing(vit, images, config):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = converted(vit, config).train()
        model.set_grad_checkpointing(checkpointing)
        model(images).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


@kinds
@pytest.mark.parametrize('kind', [FeatureHookNet, FeatureGraphNet])
def test_hooks_and_fx_find_the_layers(vit, images, config, kind):
    model = converted(vit, config)
    last = len(model.blocks) - 1
    expected = model.forward_intermediates(images, output_fmt='NLC', return_prefix_tokens=True, intermediates_only=True)
    expected = [torch.cat([prefix, patches], dim=1) for patches, prefix in expected]
    torch.testing.assert_close(kind(model, out_indices=(0, last))(images), [expected[0], expected[last]])


def test_prune_intermediate_layers(vit, images):
    model = converted(vit, OdeConfig(steps=6))
    expected = model.forward_intermediates(images, indices=[3], intermediates_only=True)
    model.prune_intermediate_layers([3])
    assert len(model.blocks) == 4 and model.blocks.config.T == pytest.approx(2)
    torch.testing.assert_close(model.forward_intermediates(images, indices=[3], intermediates_only=True), expected)


def test_a_wrapper_in_the_place_of_the_shared_block_is_used(vit, images):
    model = converted(vit)
    class Louder(Field):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def attention(self, *args):
            return 2 * self.inner.attention(*args)

        def mlp(self, *args):
            return self.inner.mlp(*args)
    before = model(images)
    model.blocks.shared = Louder(model.blocks.shared)
    assert not torch.allclose(model(images), before)
    held = model.blocks.shared
    with pytest.raises(TypeError, match='Steps call one shared block each'):
        model.blocks.shared = torch.nn.Identity()
    assert model.blocks.shared is held and model.blocks[0].field is held
    with pytest.raises(TypeError, match='Use DistributedDataParallel'):  # before it replaces the block in the original's steps
        model.blocks._replicate_for_data_parallel()


def test_no_state_is_left_on_the_modules(vit, images):
    model = converted(vit, OdeConfig(field='lipschitz', method='dopri5'))
    model.train()(images).sum().backward()
    for module in model.modules():
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
    calls = []
    model.blocks[-1].register_full_backward_hook(lambda *args: calls.append(1))
    model.blocks[0].register_full_backward_pre_hook(lambda *args: calls.append(2))
    model(images).sum().backward()
    assert calls == [1, 2] and model.blocks.nfe == 0


def test_memory_of_inference_does_not_grow_with_steps(vit):
    for config in KINDS:
        model = converted(vit, config)
        x, peaks = torch.randn(8, 3, 16, 16), {}
        for steps in (2, 4, 32):
            view = with_steps(model, steps)
            with torch.inference_mode():
                view(x)
                peaks[steps] = peak_of(partial(view, x), 'cpu')
        assert peaks[2] > 0
        assert peaks[32] <= 1.02 * peaks[4], (config, peaks)  # 2 %: the allocator rounds sizes up
        assert model.blocks.config.steps == (config.steps or 3)


@kinds
def test_what_recurses_over_modules_meets_the_shared_block_once(vit, images, config):
    model = converted(vit, config)
    with torch.no_grad():
        expected, weights = model(images), dict(model.named_parameters())
        doubled = {name: 2 * p for name, p in weights.items()}
        assert not torch.equal(torch.func.functional_call(model, doubled, (images,)), expected)
        assert torch.equal(model(images), expected)  # its own weights are back
        assert all(p is weights[name] for name, p in model.named_parameters())
    seen = []
    model.apply(lambda module: seen.append(id(module)))
    assert len(seen) == len(set(seen))
    assert str(model).count('CenterNorm()') <= 2 and len(list(model.named_parameters(remove_duplicate=False))) == len(weights)


@pytest.mark.parametrize('method', ['lie_trotter', 'dopri5'])
def test_a_compiled_shared_block_is_used(vit, images, method):
    model, calls = converted(vit, OdeConfig(method=method)), []
    expected = model(images)
    model.blocks.shared = torch.compile(model.blocks.shared, backend=lambda graph, inputs: calls.append(1) or graph)
    torch.testing.assert_close(model(images), expected)
    assert calls
    three = converted(vit, OdeConfig(phases=3))
    three.blocks.shared.fields[1] = torch.compile(three.blocks.shared.fields[1], backend=lambda graph, inputs: calls.append(3) or graph)
    three(images)
    assert 3 in calls
    with pytest.raises(TypeError, match=r'each of blocks.shared.fields'):
        three.blocks.shared = torch.compile(three.blocks.shared)
    torch._dynamo.reset()


def test_a_pruned_model_can_be_saved(vit, images, tmp_path):
    model = convert_(vit(), phases=2).model.eval()
    model.prune_intermediate_layers([1], prune_norm=False, prune_head=False)
    nn.utils.parametrizations.weight_norm(layer := model.blocks.shared.fields[0].block.attn.qkv)
    nn.utils.parametrize.remove_parametrizations(layer, 'weight')  # is now behind the bias
    assert torch.equal(reloaded(model, tmp_path)(images), model(images))
