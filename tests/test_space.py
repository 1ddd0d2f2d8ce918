"""The demo, as a visitor uses it: in headless Chromium, without a network."""
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

SPACE = Path(__file__).parent.parent / 'examples' / 'space'
CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
QUIET = ('--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
         '--disable-component-update', '--disable-sync')


@pytest.fixture
def page(tmp_path):
    pytest.importorskip('gradio')
    sync_playwright = pytest.importorskip('playwright.sync_api').sync_playwright
    if CHROMIUM is None:
        pytest.skip('needs a Chromium on the PATH')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'GRADIO_SERVER_PORT': str(port), 'HF_HUB_OFFLINE': '1'}
    url = f'http://127.0.0.1:{port}'
    with (tmp_path / 'log').open('w') as log, \
            subprocess.Popen([sys.executable, str(SPACE / 'app.py')], env=env, stdout=log, stderr=log) as app:
        try:
            for _ in range(360):
                try:
                    urllib.request.urlopen(url, timeout=2)
                    break
                except OSError:
                    assert app.poll() is None, (tmp_path / 'log').read_text()
                    time.sleep(0.5)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
                page = browser.new_page(viewport={'width': 1280, 'height': 1100})
                page.outside = []
                page.on('request', lambda r: page.outside.append(r.url) if not r.url.startswith((url, 'data:', 'blob:')) else None)
                page.goto(url, wait_until='domcontentloaded')
                yield page
                browser.close()
        finally:
            app.terminate()


PLOTS = '[...document.querySelectorAll("img")].map(i => i.src.slice(-400)).join()'


def percents(page, least):
    page.wait_for_function(f"document.body.innerText.split('%').length > {least}", timeout=60000)
    return page.inner_text('body')


def test_opens_answered_and_follows_the_dial_the_student_and_the_image(page, tmp_path):
    text = percents(page, 10)  # five classes each of student and teacher, before anything was done
    assert 'leopard' in text and 'Error' not in text
    for width in (390, 1280):
        page.set_viewport_size({'width': width, 'height': 900})
        assert page.evaluate('document.documentElement.scrollWidth') <= width
    page.wait_for_function('document.querySelectorAll("img").length >= 5', timeout=60000)
    before, typed = page.evaluate(PLOTS), page.locator('input[type=number]')
    typed.fill('3')  # typing is enough
    typed.press('Tab')
    page.wait_for_function(f'{PLOTS} != {before!r}', timeout=60000)
    before, slider = page.evaluate(PLOTS), page.locator('input[type=range]')
    slider.focus()
    slider.press('ArrowRight')  # and so is a key
    page.wait_for_function(f'{PLOTS} != {before!r}', timeout=60000)
    assert typed.input_value() == '4'
    after = page.inner_text('body')
    page.get_by_role('listbox').or_(page.get_by_label('student: data')).first.click()
    page.get_by_role('option', name='CIFAR-10, one block').first.click()
    page.wait_for_function(f'document.body.innerText != {after!r}', timeout=60000)
    page.get_by_text('What it knows').click()
    page.wait_for_selector('text=10 classes: airplane, automobile', timeout=60000)
    page.get_by_label('Clear').or_(page.get_by_label('Remove Image')).first.click()  # nothing red without an image
    page.wait_for_function("document.body.innerText.split('%').length < 5", timeout=60000)
    assert 'Error' not in page.inner_text('body')
    Image.fromarray(load_sample_image('flower.jpg')).save(tmp_path / 'flower.png')
    page.set_input_files('input[type=file]', str(tmp_path / 'flower.png'))
    percents(page, 5)  # of the student alone: its teacher is not published
    assert not page.outside, page.outside
