"""The report: as a page without a network in headless Chromium, and what is in it."""
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from timm_odevit import OdeConfig, convert_, save_pretrained, write_report
from timm_odevit.cli import main
from timm_odevit.data.read import pictures
from timm_odevit.reporting.report import photos, spotlight

pytest.importorskip('plotly')
CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
QUIET = ('--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
         '--disable-component-update', '--disable-sync')


@pytest.fixture(scope='module')
def images():
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture
def pair(vit):
    teacher, student = vit(), vit()
    student.load_state_dict(teacher.state_dict())
    convert_(student, OdeConfig(time='low_rank', rank=2))
    return student.eval(), teacher


def written(folder):
    return (folder / 'index.html').read_text(), json.loads((folder / 'report.json').read_text())


def body(html):
    """The page with what it shows, and without what draws it."""
    return re.sub(r'<script>.*?</script>', '', html, flags=re.S)


# --- what is in it ---

def test_the_page_says_what_was_measured(pair, images, tmp_path):
    student, teacher = pair
    modes = [m.training for m in student.modules()]
    page = write_report(student, images, tmp_path, teacher=teacher, names=['a', 'b', 'c', 'd'], progress=False)
    assert page == tmp_path / 'index.html' and [m.training for m in student.modules()] == modes
    html, numbers = written(tmp_path)
    with torch.no_grad():
        ours, theirs = student(images).softmax(-1), teacher(images).softmax(-1)
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    assert f'gives the teacher&#x27;s class for {same} of 4 images' in html
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]', body(html))  # it asks for nothing outside
    rows = numbers['images']
    assert [row['image'] for row in rows] == list('abcd')
    assert [row['model'] for row in rows] == [f'class {i}' for i in ours.argmax(-1).tolist()]
    assert [row['teacher'] for row in rows] == [f'class {i}' for i in theirs.argmax(-1).tolist()]
    assert [row['probability'] for row in rows] == pytest.approx(ours.amax(-1).tolist(), rel=1e-4)
    assert numbers['geometry']['times'] == numbers['teacher']['times'] == [0, 1, 2, 3]
    assert {file.name for file in tmp_path.iterdir()} == {'index.html', 'report.json'}


@pytest.mark.parametrize('name,config,kwargs', [
    ('vit_tiny_patch16_224', None, {}),
    ('vit_tiny_patch16_224', None, dict(num_classes=0)),
    ('vit_tiny_patch16_224', dict(field='lipschitz', method='rk4', steps=2), {}),
    ('vit_tiny_patch16_224', dict(steps=1), {}),
    ('vit_tiny_patch16_224', None, dict(class_token=False, global_pool='avg')),
    ('vit_tiny_patch16_224', None, dict(class_token=False, global_pool='avg', reg_tokens=2)),
    ('vit_tiny_patch16_224', None, dict(reg_tokens=2)),
    ('vit_tiny_patch16_224', None, dict(in_chans=1)),
    ('vit_tiny_patch16_224', None, dict(depth=1)),
    ('mixer_s32_224', None, dict(img_size=64)),
])
def test_every_model_with_a_sequence_of_blocks_has_a_report(vit, name, config, kwargs, tmp_path):
    model = timm.create_model(name, num_classes=5, **kwargs) if 'mixer' in name else vit(name, **kwargs)
    if config:
        convert_(model, OdeConfig(**config))
    images = torch.randn(2, kwargs.get('in_chans', 3), *[kwargs.get('img_size', 16)] * 2)
    html, numbers = written(write_report(model.eval(), images, tmp_path, progress=False).parent)
    assert numbers['sentence'] in body(html).replace('&#x27;', "'") and len(numbers['images']) == 2
    assert ('What it would answer' in html) == (model.num_classes > 0) and 'NaN' not in body(html)
    assert (numbers['attention'] is None) == ('Entropy of attention' not in html) == ('mixer' in name)
    named = 'class token' in body(html).lower()  # a register is none
    assert named == (getattr(model, 'cls_token', None) is not None) == (numbers['geometry']['cosine'][0][0] is not None)


def test_a_diverging_image_is_shown_beside_the_others(vit, images, tmp_path):
    images = images.index_put([torch.tensor(1)], torch.tensor(math.inf))
    _, numbers = written(write_report(vit(), images, tmp_path, progress=False).parent)
    rows = numbers['images']
    assert rows[1]['exponent'] is None and rows[1]['settled at t'] is None and rows[0]['exponent'] is not None
    assert 'not finite' in numbers['exponents']['reasons'][1]


def test_the_sentence_is_about_methods_of_many_stages_one_image_and_images_unlike_the_classes(vit, images, tmp_path):
    model = vit()
    convert_(model, OdeConfig(method='rk4', steps=2))
    said = written(write_report(model.eval(), images[:1], tmp_path, teacher=vit(), progress=False).parent)[1]['sentence']
    assert said.startswith("2 steps of rk4: gives the teacher's class for ") and 'of 1 images; its last states' in said
    model = vit(depth=1, num_classes=40)
    for p in model.head.parameters():
        torch.nn.init.zeros_(p)
    write_report(model, images, tmp_path, progress=False)
    said = written(tmp_path)[1]['sentence']
    assert said.startswith('1 blocks: settled on its class at t = 0; small changes of the state grow at most by ')
    assert said.endswith('No class gets 20 % for any image: they are unlike the classes that the model knows.')


def test_nothing_is_half_written(vit, images, tmp_path, monkeypatch):
    write_report(vit(), images, tmp_path, names=[f'caf\udce9 {i}' for i in range(4)], progress=False)  # a name in no encoding
    assert written(tmp_path)[1]['images'][0]['image'] == 'caf? 0'
    with pytest.raises(ValueError, match='float32'):
        write_report(vit().bfloat16(), images, tmp_path / 'out', progress=False)
    with torch.autocast('cpu', torch.bfloat16):
        assert write_report(vit(), images, tmp_path, progress=False).exists()
    monkeypatch.setattr('timm_odevit.reporting.report.to_json', lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(vit(), images, tmp_path / 'out', progress=False)
    assert not (tmp_path / 'out').exists()


def test_names_are_text_and_nothing_else(vit, images, tmp_path):
    model = vit()
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': [f'</script><b>{i}$body' for i in range(5)]}
    write_report(model, images, tmp_path, names=['<img src=x onerror=alert(1)>', '"', '$plotly', '&amp;'],
                 title='</title><script>alert(1)</script>', progress=False)
    html, numbers = written(tmp_path)
    assert '<script>alert(1)' not in html and '<img src=x' not in html and '</script><b>' not in html
    assert html.count('</script>') == 3 and numbers['images'][2]['image'] == '$plotly'


def test_what_cannot_be_shown_is_refused_before_anything_is_written(pair, vit, images, tmp_path):
    student, teacher = pair
    out = tmp_path / 'out'
    for wrong, kwargs, message in (
            (images[:0], {}, 'of 1 to 64 images'), (images[0], {}, 'of 1 to 64 images'), ([1], {}, "got <class 'list'>"),
            (images, dict(names=['a']), 'must be 4 strings'), (images, dict(classes=torch.tensor([0, 1, 2, 3])), 'must be 4 strings'),
            (images, dict(teacher=vit(num_classes=7)), r'classes \[7\] and \[5\]'), (images, dict(teacher=vit(img_size=32)), r'input_size \[3, 32, 32\] and \[3, 16, 16\]'),
            (images, dict(teacher=vit(embed_dim=48)), 'cannot be compared'), (images, dict(teacher=vit(depth=2)), 'until t = 3')):
        with pytest.raises(ValueError, match=message):
            write_report(student, wrong, out, **kwargs, progress=False)
    with pytest.raises(TypeError, match='no single sequence of blocks'):
        write_report(timm.create_model('test_resnet'), torch.randn(1, 3, 64, 64), out, progress=False)
    assert not out.exists()


def test_without_plotly_it_says_what_to_type(vit, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'plotly.offline', None)
    with pytest.raises(ImportError, match='Type: pip install plotly'):
        write_report(vit(), images[:, :2], tmp_path / 'out', progress=False)  # before the images are looked at
    assert not (tmp_path / 'out').exists()


def test_a_photo_is_what_the_model_sees(vit):
    model = vit()
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    seen = photos((pixels / 255 - mean) / std, model)
    assert np.array_equal(np.asarray(seen[1]), pixels[1].permute(1, 2, 0).numpy())
    veil = np.asarray(spotlight(torch.tensor([[0., 1.], [0.5, 0.]])))
    assert veil[..., 3].tolist() == [[200, 0], [100, 200]]


# --- as a command ---

@pytest.fixture
def folder(tmp_path, vit):
    """A saved model, and a folder of images."""
    model = vit()
    convert_(model)
    save_pretrained(model, tmp_path / 'model')
    for i in range(5):
        path = tmp_path / 'images' / ('cats' if i < 3 else 'dogs') / f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    return tmp_path


def test_the_command_writes_a_report_and_refuses_to_lose_one(folder, capsys):
    out = str(folder / 'report')
    command = ['report', f'local-dir:{folder / "model"}', '--images', str(folder / 'images'), '-o', out, '--count', '3', '--quiet']
    assert main(command) == 0 and 'index.html' in capsys.readouterr().out
    assert [row['image'] for row in written(folder / 'report')[1]['images']] == ['cats/0.png', 'cats/2.png', 'dogs/4.png']
    assert main(command) == 2 and '--overwrite' in capsys.readouterr().err
    assert main([*command, '--overwrite', '--steps', '5', '--count', '2']) == 0
    assert len(written(folder / 'report')[1]['geometry']['times']) == 6


def test_the_command_says_what_is_wrong_with_the_images(folder, capsys):
    (folder / 'images' / 'cats' / '0.png').write_bytes(b'no image')
    for images, message in ((folder / 'nothing', 'There is no '), (folder / 'model', 'There are no images'),
                            (folder / 'images' / 'cats' / '0.png', 'is a file. Give the folder that it is in'),
                            (folder / 'images', 'cannot be read as an image')):
        assert main(['report', f'local-dir:{folder / "model"}', '--images', str(images), '-o', str(folder / 'out')]) == 2
        assert message in capsys.readouterr().err and not (folder / 'out').exists()


def test_images_of_a_folder_are_spread_and_hidden_ones_left_out(folder, vit):
    model = vit()
    (folder / 'images' / '.hidden').mkdir()
    (folder / 'images' / '.hidden' / 'x.png').write_bytes(b'')
    found = pictures(folder / 'images', model, 100)
    assert len(found.images) == 5 and found.classes is None
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': ['cats', 'dogs', 'c', 'd', 'e']}
    assert pictures(folder / 'images', model, 2).classes == ['cats', 'dogs']


def test_images_of_an_npz_come_with_their_classes(vit, tmp_path):
    x, y = np.arange(6 * 16 * 16 * 3, dtype=np.uint8).reshape(6, 16, 16, 3), np.arange(6) % 5
    np.savez(tmp_path / 'x.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(list('abcde')))
    found = pictures(tmp_path / 'x.npz', vit(), 3)
    assert found.names == ['x.npz 0', 'x.npz 2', 'x.npz 5'] and found.classes == ['a', 'c', 'a']


# --- as a person sees it ---

@pytest.fixture(params=['light', 'dark'])
def shown(request, pair, images, tmp_path):
    """The open page, and what it complained about or asked for."""
    sync_playwright = pytest.importorskip('playwright.sync_api').sync_playwright
    if CHROMIUM is None:
        pytest.skip('needs a Chromium on the PATH')
    page = write_report(pair[0], images, tmp_path, teacher=pair[1], progress=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        tab = browser.new_page(viewport={'width': 1280, 'height': 900}, color_scheme=request.param)
        wrong = []
        tab.on('console', lambda m: wrong.append(m.text) if m.type in ('error', 'warning') else None)
        tab.on('pageerror', lambda e: wrong.append(str(e)))
        tab.on('request', lambda r: wrong.append(r.url) if not r.url.startswith(('file:', 'data:', 'blob:')) else None)
        tab.goto(page.as_uri())
        tab.wait_for_function('document.getElementById("now").value')
        yield tab, wrong, request.param
        browser.close()


MASK = 'document.querySelector("img[data-of=attention]").src'
BARS = 'JSON.stringify(document.getElementById("chart-0").data[0].x)'
BAR = 'document.getElementById("chart-1").layout.shapes[0].x0'


def test_the_slider_moves_everything_together(shown):
    tab, wrong, scheme = shown
    tab.click('summary')
    tab.wait_for_function(f'{BAR} == 3')
    before = [tab.evaluate(what) for what in (MASK, BARS, BAR)]
    tab.focus('#t')
    for _ in range(2):
        tab.keyboard.press('ArrowLeft')
    tab.wait_for_function(f'{BAR} == 1')
    after = [tab.evaluate(what) for what in (MASK, BARS, BAR)]
    assert all(a != b for a, b in zip(after, before)), after
    assert re.fullmatch(r't = 1 of 3 · image 1: class \d, \d+ %', tab.evaluate('document.getElementById("now").value'))
    photo = 'document.querySelector("img[data-of=photo]").src'
    first, bars = tab.evaluate(photo), tab.evaluate(BARS)
    tab.locator('input[name=image]').first.focus()
    tab.keyboard.press('ArrowRight')
    tab.wait_for_function(f'{BARS} != {bars!r}')
    assert tab.evaluate(photo) != first
    background = tab.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (sum(map(int, re.findall(r'\d+', background)[:3])) > 600) == (scheme == 'light')
    text = tab.evaluate('document.getElementById("chart-0").layout.font.color')
    assert text == ('#1b1f24' if scheme == 'light' else '#e8eaed')
    assert not wrong, wrong


@pytest.mark.parametrize('width', [390, 1280])
def test_nothing_is_cut_off(shown, width):
    tab, wrong, _ = shown
    tab.set_viewport_size({'width': width, 'height': 844})
    tab.reload()
    tab.wait_for_function(f"""document.documentElement.scrollWidth <= {width}
        && [...document.querySelectorAll(".panel")].every(panel => panel.scrollWidth <= panel.clientWidth)""")
    assert not wrong
