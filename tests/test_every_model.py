"""Models of every module of the installed timm, on the meta device: each converts and runs, or is refused unchanged.

    EVERY_MODEL=1 pytest tests/test_every_model.py    all of them
"""
import os

import pytest
import timm
import torch
from timm.data import resolve_data_config

from timm_odevit import OdeConfig, convert_
from timm_odevit.convert.planning import convertibility
from timm_odevit.hooks import on_meta

PARTS = 16
EVERY = 1 if os.environ.get('EVERY_MODEL') else 24


def chosen():
    """The first, the last and every 24th of the models of each module."""
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not name.startswith('odevit')]
        yield from dict.fromkeys([*names[::EVERY], *names[-1:]])


NAMES = list(chosen())
assert len(NAMES) > 200


def check(name):
    """What is wrong with the conversion of a model, if anything is."""
    with on_meta():
        model = timm.create_model(name).eval()
    modules = dict(model.named_modules())
    ok, text = convertibility(model)
    config = OdeConfig(method='lie_trotter' if 'all methods' in text else 'euler')
    try:
        done = convert_(model, config)
    except (TypeError, ValueError) as e:
        if ok:
            return f'was to be converted, and is refused: {e}'
        return '' if dict(model.named_modules()) == modules else 'is refused and changed'
    if not ok:
        return f'was to be refused ({text}), and is converted'
    if done.parameters_after >= done.parameters_before:
        return 'has as many parameters as before'
    try:
        with torch.no_grad():
            model(torch.empty(1, *resolve_data_config({}, model=model)['input_size'], device='meta'))
    except Exception as e:
        return f'does not run: {e}'
    done.restore()
    return '' if dict(model.named_modules()) == modules else 'is not restored'


@pytest.mark.timeout(900)
@pytest.mark.parametrize('part', range(PARTS))
def test_converts_and_runs_or_is_refused_before_any_change(part):
    wrong = [f'{name}: {found}' for name in NAMES[part::PARTS] if (found := check(name))]
    assert not wrong, '\n'.join(wrong)
