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
            for _ in range(120):
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



def test_upload_turn_the_dial_and_change_the_student(page, tmp_path):
    Image.fromarray(load_sample_image('flower.jpg')).save(tmp_path / 'flower.png')
    page.wait_for_selector('input[type=file]', state='attached', timeout=60000)
    page.set_input_files('input[type=file]', str(tmp_path / 'flower.png'))
    page.wait_for_selector('text=/%$/', timeout=60000)
    page.wait_for_function('document.querySelectorAll("img").length >= 3', timeout=60000)
    plots = '[...document.querySelectorAll("img")].map(i => i.src.slice(-400)).join()'
    text, before = page.inner_text('body'), page.evaluate(plots)
    slider = page.locator('input[type=range]')
    slider.focus()
    for _ in range(9):
        slider.press('ArrowLeft')
    slider.dispatch_event('pointerup')
    page.wait_for_function(f'{plots} != {before!r}', timeout=60000)
    assert page.locator('input[type=number]').input_value() == '3'
    after = page.inner_text('body')
    assert after != text and after.count('%') >= 10
    page.get_by_label('student').first.click()
    page.get_by_role('option', name='cifar100').first.click()
    page.wait_for_function(f'document.body.innerText != {after!r}', timeout=60000)
    assert not page.outside, page.outside
