"""Every model of the installed timm, on the meta device: it converts and runs, or it is refused before any change."""
import pytest
import timm
import torch
from timm.data import resolve_data_config

from timm_odevit import OdeConfig, convert_
from timm_odevit.convert import convertibility

PARTS = 16
NAMES = [name for name in timm.list_models() if not name.startswith('odevit')]


@pytest.mark.parametrize('part', range(PARTS))
def test_converts_and_runs_or_is_refused_before_any_change(part):
    ran = set()
    for name in NAMES[part::PARTS]:
        with torch.device('meta'):
            model = timm.create_model(name).eval()
        modules = dict(model.named_modules())
        ok, text = convertibility(model)
        if not ok:
            with pytest.raises((TypeError, ValueError)):
                convert_(model, OdeConfig(method='euler'))
            assert dict(model.named_modules()) == modules, name
            continue
        done = convert_(model, OdeConfig(method='lie_trotter' if 'all methods' in text else 'euler'))
        assert done.parameters_after < done.parameters_before, name
        kind = (type(model), done.blocks[0].shared.__class__, text)
        size = resolve_data_config({}, model=model)['input_size']
        if kind not in ran or size[-1] <= 224:  # the same code at a larger size tells nothing new
            with torch.no_grad():
                model(torch.empty(1, *size, device='meta'))
            ran.add(kind)
        done.restore()
        assert dict(model.named_modules()) == modules, name
