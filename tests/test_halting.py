"""Images that leave the batch before the last step."""
import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch

from timm_odevit import OdeConfig, calibrate_halting, convert_, evaluate, save_pretrained
from timm_odevit.cli import main
from timm_odevit.ode.halting import entropy


def halting(vit, threshold=None, steps=6, **kwargs):
    """A model that halts at the median of its scores, so that images take different numbers of steps."""
    model = convert_(vit(), steps=steps, **kwargs).model
    if threshold is None:
        x = torch.randn(32, 3, 16, 16)
        with torch.no_grad():
            threshold = torch.cat(all_scores(model, x)).median().item()
    model.blocks.config = replace(model.blocks.config, halting='entropy', halting_threshold=threshold)
    return model


def all_scores(model, x):
    return [entropy(model.blocks.readout(state)) for state in states(model, x)[1:]]


def states(model, x):
    return model.blocks.trajectory(model.norm_pre(model._pos_embed(model.patch_embed(x))))


def test_scores_with_known_answers():
    torch.testing.assert_close(entropy(torch.tensor([[0., 0., 0., 0.], [100., 0., 0., 0.]])), torch.tensor([1., 0.]))


def test_a_halted_image_has_the_answer_of_its_step_as_in_a_batch_of_one(vit):
    model = halting(vit)
    x = torch.randn(16, 3, 16, 16)
    with torch.no_grad():
        logits, taken = model(x), model.blocks.steps_taken
        path = states(model, x)
        scores = torch.stack(all_scores(model, x), dim=1)
        alone = torch.cat([model(image[None]) for image in x])
    assert 1 < len(taken.unique()) and taken.shape == (16,)
    done = scores <= model.blocks.config.halting_threshold
    done[:, -1] = True
    assert taken.tolist() == (done.int().argmax(dim=1) + 1).tolist()
    expected = torch.stack([model.blocks.readout(path[k, i:i + 1])[0] for i, k in enumerate(taken.tolist())])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


def test_the_extremes(vit, images):
    never, at_once = halting(vit, threshold=0.), halting(vit, threshold=10.)
    plain = copy.deepcopy(never)
    plain.blocks.config = replace(plain.blocks.config, halting=None)
    assert torch.equal(never(images), plain(images)) and never.blocks.steps_taken.tolist() == [6, 6]
    calls, shared = [], at_once.blocks.shared
    attention = shared.attention
    shared.attention = lambda *args: calls.append(1) or attention(*args)
    assert at_once(images).shape == (2, 5) and at_once.blocks.steps_taken.tolist() == [1, 1] and len(calls) == 1
    assert plain.blocks.steps_taken is None
    assert never(images[:0]).shape == (0, 5)


def test_compiled_and_exported_it_gives_the_same_answers_with_fixed_shapes(vit):
    model = halting(vit, steps=3)
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(x), expected)
        torch.testing.assert_close(torch.jit.trace(model, x[:2], check_trace=False)(x), expected)
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim('batch', max=64)},)).module()
        torch.testing.assert_close(exported(x[:3]), expected[:3])


def test_steps_with_hooks_training_and_intermediates_see_all_images(vit, images):
    model = halting(vit, threshold=10.)
    seen = []
    handle = model.blocks[4].register_forward_hook(lambda *args: seen.append(args[2].shape))
    model(images)
    assert seen == [(2, 17, 32)]
    handle.remove()
    assert len(model.forward_intermediates(images)[1]) == 6
    model.train()
    full = copy.deepcopy(model)
    full.blocks.config = replace(full.blocks.config, halting=None)
    assert torch.equal(model(images), full(images))


def test_evaluations_are_those_of_the_last_pass(vit, images):
    model = halting(vit, threshold=10.)  # every image halts after its first step
    model(images)
    assert model.blocks.evaluations == 1
    assert model(images[:0]).shape == (0, 5) and model.blocks.evaluations == 6
    model(images)
    model.train()(images)
    assert model.blocks.evaluations == 6 and model.blocks.steps_taken is None
    model.eval()(images)
    assert model.blocks.evaluations == 1


def test_a_threshold_lies_between_two_scores_or_above_all(vit):
    model, x = halting(vit, method='midpoint'), torch.randn(32, 3, 16, 16)
    with torch.no_grad():
        scores = torch.stack(all_scores(model, x)[:-1])
    found = calibrate_halting(model, [x], max_drop=0.05)
    assert (scores - found.threshold).abs().min() > 0 and 0 < (scores <= found.threshold).sum() < scores.numel()
    found = calibrate_halting(model, [x], max_drop=1.)  # all halt at once, also the image of the largest score
    assert found.threshold > scores.max() and found.nfe == 2  # of one step
    two = calibrate_halting(model, list(x.split(16)), max_drop=1.)  # two batches of images are no images and labels
    assert two.images == 32 and two.threshold == pytest.approx(found.threshold)
    model.head.bias.data.fill_(torch.nan)
    assert calibrate_halting(model, [x]).full_top1 == 0  # an answer that is no number is never right


def test_two_threads(vit):
    model = halting(vit)
    inputs = torch.randn(2, 6, 3, 16, 16)

    @torch.no_grad()
    def work(x, times=20):
        return [(model(x), model.blocks.steps_taken) for _ in range(times)]
    expected = [work(x, 1)[0] for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, inputs))
    for (logits, taken), results in zip(expected, found):
        assert all(torch.equal(y, logits) and torch.equal(k, taken) for y, k in results)


def test_evaluate_counts_the_evaluations_of_each_image(vit):
    model = halting(vit, method='strang')
    x, y = torch.randn(40, 3, 16, 16), torch.randint(5, (40,))
    result = evaluate(model, (x, y)).results[0]
    with torch.no_grad():
        model(x)
    assert result.nfe == pytest.approx(3 * model.blocks.steps_taken.double().mean().item())
    assert evaluate(model, (x, y), steps=(3, 6)).results[1].nfe == result.nfe


def test_a_model_in_train_mode_halts_at_every_number_of_steps(vit):
    model, data = halting(vit, threshold=10.), (torch.randn(8, 3, 16, 16), torch.arange(8) % 5)
    for each in (model.eval(), model.train()):
        assert [r.nfe for r in evaluate(each, data, steps=(3, 6, 12)).results] == [1] * 3
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize('labelled', [True, False])
def test_calibration_keeps_what_it_promises(vit, labelled):
    model = convert_(vit(depth=4, drop_rate=0.5), steps=6, blocks=(1, 3) if labelled else (0, 3)).model
    x = torch.randn(100, 3, 16, 16)
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    y[:30] = (y[:30] + 1) % 5
    batches = [(x[i:i + 25], y[i:i + 25]) for i in range(0, 100, 25)]
    evaluate(compiled := torch.compile(model, backend='eager'), batches)
    model.train()
    found = calibrate_halting(compiled, batches if labelled else [b for b, _ in batches], max_drop=0.05)
    assert model.blocks.config.halting is None and model.blocks.steps_taken is None
    assert found.full_top1 == pytest.approx(70 if labelled else 100) and found.top1 >= found.full_top1 - 5.0001
    assert found.nfe < found.full_nfe == 6 and found.images == 100
    found.apply_(model)
    result = evaluate(model, batches).results[0]
    assert result.nfe == pytest.approx(found.nfe)
    if labelled:
        assert result.top1 == pytest.approx(found.top1)
    stricter = calibrate_halting(model, batches if labelled else [b for b, _ in batches], max_drop=0.)
    assert stricter.nfe >= found.nfe - 1e-9 and stricter.top1 >= stricter.full_top1
    assert 'entropy' in str(found) and 'instead of 6' in str(found)


def test_saved_with_the_model_and_off_by_default(tmp_path):
    assert OdeConfig().halting is None
    model = timm.create_model('odevit_tiny', img_size=32, num_classes=3, ode_halting='entropy', ode_halting_threshold=0.9)
    model.eval()
    save_pretrained(model, tmp_path / 'm')
    again = timm.create_model(f'local-dir:{tmp_path / "m"}', pretrained=True).eval()
    assert (again.blocks.config.halting, again.blocks.config.halting_threshold) == ('entropy', 0.9)
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(again(x), model(x)) and torch.equal(again.blocks.steps_taken, model.blocks.steps_taken)
    assert again.to('meta')(x.to('meta')).shape == (4, 3)
    other = copy.deepcopy(model)
    other.head.bias.data.add_(1.)  # the copy reads its own head
    state = torch.ones(1, 5, 192)
    torch.testing.assert_close(other.blocks.readout(state), model.blocks.readout(state) + 1.)


def test_on_the_command_line(vit, tmp_path, capsys):
    x_train, x_test = np.random.default_rng(0).integers(0, 256, (2, 40, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / 'data.npz', x_train=x_train, x_test=x_test, y_train=np.arange(40) % 3, y_test=np.arange(40) % 3)
    save_pretrained(convert_(vit(num_classes=3)).model, tmp_path / 'student')
    out = tmp_path / 'out'
    options = [f'local-dir:{tmp_path / "student"}', str(tmp_path / 'data.npz')]
    assert main(['halt', *options, str(out), '--max-drop', '1', '--device', 'cpu', '--quiet']) == 0
    assert 'instead of 3' in capsys.readouterr().out
    assert main(['evaluate', f'local-dir:{out}', options[1], '--device', 'cpu', '--quiet']) == 0
    assert float(re.search(r'\| model +\| 3 +\| ([\d.]+)', capsys.readouterr().out)[1]) < 3
    assert main(['halt', *options, str(out), '--device', 'cpu']) == 2
    assert 'is not empty' in capsys.readouterr().err


def test_models_with_merged_tokens_or_kept_blocks_halt_when_compiled(vit, images):
    for settings in (dict(tokens=0.4), dict(blocks=(1, 2))):
        model = convert_(vit(), phases=2, steps=4, halting='entropy', halting_threshold=0.9, **settings).model
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(images), model(images))
        torch._dynamo.reset()


def test_calibration_leaves_other_threads_alone(vit):
    model = convert_(vit(), steps=6, halting='entropy', halting_threshold=0.9).model
    model.eval()
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        expected, found, stop = model(x), [], threading.Event()

    def run():
        with torch.no_grad():
            while not stop.is_set():
                found.append(torch.equal(model(x), expected))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run)
        calibrate_halting(model, [(torch.randn(8, 3, 16, 16), torch.arange(8) % 5) for _ in range(20)], max_drop=1.)
        stop.set()
    assert found and all(found)


# --- what is refused

def test_settings_that_cannot_halt(vit, images):
    with pytest.raises(ValueError, match="Unknown halting 'acceleration'.*Allowed: entropy, or None"):
        timm.create_model('odevit_tiny', device='meta', ode_halting='acceleration')
    with pytest.raises(ValueError, match='chooses its own'):
        OdeConfig(method='dopri5', halting='entropy')
    with pytest.raises(ValueError, match='blocks after the ODE that they would skip'):
        convert_(vit(), blocks=(0, 1), halting='entropy')
    with pytest.raises(ValueError, match='one sequence of blocks'):
        convert_(timm.create_model('swin_tiny_patch4_window7_224', img_size=56, depths=(2, 2), embed_dim=24, num_heads=(2, 2)), halting='entropy')
    with pytest.raises(ValueError, match='attn_mask'):
        halting(vit).blocks(torch.randn(2, 17, 32), torch.ones(2, 1, 17, 17, dtype=torch.bool))
    for options in (dict(num_classes=0), dict(num_classes=1), dict(global_pool='')):
        model = convert_(vit(**options), halting='entropy', halting_threshold=1.).model
        with pytest.raises(ValueError, match='needs pooling, and two classes or more'):
            model.eval()(images)


def test_data_and_settings_that_calibration_cannot_use(vit, images):
    model, labels = halting(vit), torch.zeros(2, dtype=torch.long)
    for loader, options, message in (
            ([], {}, 'gave no images'),
            ((images, labels + 10), {}, 'from 0 to 4, .* to 10'),
            ([images], dict(max_drop=2.), 'max_drop must be'), ([(images, [0, 1])], {}, 'got torch.float32.*list')):
        with pytest.raises(ValueError, match=message):
            calibrate_halting(model, loader, **options)


def test_models_that_calibration_cannot_use(vit, images):
    stages = convert_(timm.create_model('swin_tiny_patch4_window7_224', img_size=56, depths=(2, 2), embed_dim=24, num_heads=(2, 2))).model
    featureless = convert_(vit()).model
    featureless.reset_classifier(0)
    one_by_one = convert_(timm.create_model('beit_base_patch16_224', img_size=16, depth=2, embed_dim=32, num_heads=2, num_classes=3).eval()).model
    for model, message in ((stages, 'one sequence of blocks; this SwinTransformer has 2'), (vit(), 'has 0'),
                           (convert_(vit(), blocks=(0, 1)).model, 'blocks after the ODE'),
                           (featureless, 'two classes or more'), (one_by_one, 'runs its blocks one by one')):
        with pytest.raises((TypeError, ValueError), match=message):
            calibrate_halting(model, [images])
