"""A classifier as one HTML page: what is refused, and what headless Chromium computes. Its tests are skipped without one, or without playwright."""
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from timm_odevit import convert_, export_model, save_pretrained
from timm_odevit.cli import main
from timm_odevit.data.preprocessing import data_config, open_image
from timm_odevit.quantization import packed, unpacked

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
SMALL = dict(img_size=32, embed_dim=64, depth=6)


@pytest.fixture(scope='module')
def browser():
    sync_playwright = pytest.importorskip('playwright.sync_api', reason='not installed: pip install playwright').sync_playwright
    if CHROMIUM is None:
        pytest.skip('needs a Chromium on the PATH')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu', '--disable-background-networking'])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a model; whatever it would ask of a network, and its errors, must be none."""
    wrong, pages = [], []

    def open_page(model):
        page = browser.new_page()
        pages.append(page)
        page.on('pageerror', lambda error: wrong.append(str(error)))
        page.on('request', lambda r: wrong.append(r.url) if not r.url.startswith(('file:', 'data:', 'blob:')) else None)
        page.goto(export_model(model, tmp_path / 'page.html', overwrite=True).as_uri())
        return page
    yield open_page
    for page in pages:
        page.close()
    assert not wrong


def test_the_published_page_is_that_of_the_published_weights(tmp_path, monkeypatch):
    stored = Path(__file__).parent.parent / 'examples' / 'page'
    words = shlex.split(re.search('^odevit (export .*)$', (stored / 'README.md').read_text(), re.M)[1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / words[2]).parent.mkdir(parents=True)
    assert main(words) == 0
    assert (tmp_path / words[2]).read_bytes() == (stored / 'index.html').read_bytes()


def logits(page, images, steps):
    given = [json.dumps(images.flatten(1).tolist()), steps]  # playwright is slow with long lists
    return torch.tensor(page.evaluate('([text, K]) => JSON.parse(text).map(x => [...logits(Float32Array.from(x), K)])', given))


@pytest.mark.parametrize('kwargs, ode', [
    ({}, dict(phases=3, steps=6)),
    ({}, dict(phases=2, steps=5, T=7.5, field='lipschitz', method='euler')),
    (dict(global_pool='avg', qk_norm=True, init_values=0.5, reg_tokens=2, no_embed_class=True, qkv_bias=False), dict(steps=6)),
    ({}, None)], ids=['three phases', 'lipschitz', 'other settings', 'not converted'])
def test_the_page_computes_the_logits_of_the_rounded_model(vit, opened, kwargs, ode):
    model, images = vit(**{**SMALL, **kwargs}), torch.randn(20 if ode == dict(phases=3, steps=6) else 3, 3, 32, 32)
    if ode:
        convert_(model, **ode)
    page = opened(model)
    model.load_state_dict(unpacked(packed(model.state_dict())))
    for steps in (3, 6, 12) if ode else (6,):
        if ode:
            model.blocks.steps = steps
        with torch.no_grad():
            torch.testing.assert_close(logits(page, images, steps), model(images), atol=1e-4, rtol=0)  # both in float32


@pytest.mark.parametrize('T, least', [(6.7, 3), (3., 2)])
def test_the_page_lays_its_steps_as_the_solver_does(vit, opened, T, least):
    model = convert_(vit(**{**SMALL, 'depth': 7}), phases=3, T=T, steps=6).model
    page = opened(model)
    for steps in (*range(least, 20), 48):
        model.blocks.steps = steps
        got = [(step['t'], step['h']) for step in page.evaluate('K => layout(K)', steps)]
        assert np.allclose(got, [(step.t, step.h) for step in model.blocks.solver], atol=1e-9), steps


def test_a_picture_is_prepared_as_timm_does_it_and_classified(vit, opened, tmp_path):
    model = vit(**SMALL)
    model.pretrained_cfg.update(crop_pct=0.9, label_names=['<i>a</i>', '</script><script>alert(1)', '$model', 'd', 'é'])
    convert_(model, phases=3)
    page, rng = opened(model), np.random.default_rng(0)
    for i, (width, height) in enumerate([(64, 64), (35, 35), (90, 41), (41, 75), (20, 23), (300, 200)]):
        file = tmp_path / f'{i}.png'
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file)
        page.set_input_files('#file', file)
        page.get_by_text('ms for 6 steps').wait_for()
        expected = open_image(file, data_config(model))
        got = torch.tensor(page.evaluate('[...image]')).view(3, 32, 32)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)  # the same bytes: one more or less would be 0.008
    names = page.locator('#top li > span:first-child').all_inner_texts()
    assert sorted(names) == sorted(model.pretrained_cfg['label_names']) and page.evaluate('path.length') == 7
    page.focus('#steps')
    page.keyboard.press('ArrowRight')
    page.get_by_text('ms for 7 steps').wait_for()
    assert page.inner_text('#count') == '7'
    Image.new('RGB', (70_000, 100), 'red').save(tmp_path / 'wide.png')  # more than a canvas holds
    page.set_input_files('#file', tmp_path / 'wide.png')
    page.evaluate('new Promise(seen => setInterval(() => image?.[0] > image?.at(-1) + 1 && seen(), 50))')
    (tmp_path / 'none.jpg').write_text('no picture')
    page.set_input_files('#file', tmp_path / 'none.jpg')
    page.get_by_text('cannot read none.jpg').wait_for()
    assert not page.is_visible('#shown') and page.evaluate('path.length') == 0 and not page.locator('#top i').count()


def test_the_file_is_small_and_names_in_it_are_only_text(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = convert_(vit(embed_dim=256, num_heads=4, act_layer='gelu')).model
    model.pretrained_cfg['label_names'] = ['<b>', '</script><script>alert(1)</script>', '<!--', 'd', '$title']
    stored = sum(tensor.nbytes for tensor in packed(model.state_dict()).values())
    save_pretrained(model, 'student')
    assert main(['export', 'local-dir:student', 'page.html', '--device', 'cpu']) == 0
    assert (tmp_path / 'page.html').stat().st_size < 1.45 * stored + 60_000
    text = (tmp_path / 'page.html').read_text()
    about = json.loads(re.search('(?s)id="model">(.*?)</script>', text)[1])
    assert about['classes'] == model.pretrained_cfg['label_names'] and 'alert(1)</' not in text and 'src=' not in text and 'http' not in re.sub(
        'http-equiv', '', text)


@pytest.mark.parametrize('build, message', [
    (lambda: timm.create_model('vit_small_patch16_rope_224', depth=1), 'it is a Eva'),
    (lambda: timm.create_model('swin_tiny_patch4_window7_224'), 'it is a SwinTransformer'),
    (lambda: timm.create_model('vit_small_patch14_dinov2', img_size=28, depth=1, mlp_layer=timm.layers.SwiGLUPacked), 'mlp is a GluMlp'),
    (lambda: timm.create_model('deit_tiny_distilled_patch16_224'), 'it is a VisionTransformerDistilled'),
    (dict(num_classes=0), 'it has 0 classes'), (dict(global_pool='max'), "it pools tokens by 'max'"), (dict(in_chans=1), r'images are \[1, 16, 16\] .*patches \[4, 4\]'),
    (dict(act_layer='gelu_tanh'), 'act is a GELUTanh'), (dict(scale_mlp_norm=True), 'parameter 0.mlp.norm.weight'),
    (dict(pretrained_cfg_overlay=dict(interpolation='lanczos')), 'prepared with lanczos'), (dict(pretrained_cfg_overlay=dict(crop_mode='border')), 'border'),
    (dict(ode=dict(method='rk4')), 'solver.0 is a RK4'), (dict(ode=dict(tokens=0.5)), 'merges tokens'), (dict(ode=dict(blocks=(1, 2))), 'it kept blocks of the base'),
])
def test_what_a_page_cannot_run_is_refused(vit, tmp_path, build, message):
    ode = build.pop('ode', None) if isinstance(build, dict) else None
    model = vit(**build) if isinstance(build, dict) else build()
    if ode:
        convert_(model, **ode)
    with pytest.raises(ValueError, match=rf"A page cannot run this model: .*{message}.* It runs timm's VisionTransformer"):
        export_model(model, tmp_path / 'a.html')
    assert not list(tmp_path.iterdir())
