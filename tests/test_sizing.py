import numpy as np
import pytest
import timm
import torch

from timm_odevit import OdeConfig, choose_size, convert_, save_pretrained
from timm_odevit.convert.planning import parse_size, predict_parameters
from timm_odevit.ode.blocks import count_parameters


@pytest.mark.parametrize('name', ['deit_tiny_patch16_224', 'samvit_base_patch16', 'swin_tiny_patch4_window7_224'])
@pytest.mark.parametrize('settings', [
    dict(), dict(phases=3), dict(time='low_rank'), dict(time='low_rank', rank=5), dict(time='low_rank', rank=5, phases=2),
    dict(time='low_rank', rank=10 ** 4)], ids=str)
def test_prediction_is_what_conversion_leaves(name, settings):
    model = timm.create_model(name, device='meta')
    predicted = predict_parameters(model, OdeConfig(**settings))
    assert predicted == convert_(model, OdeConfig(**settings)).parameters_after == count_parameters(model)


def test_parameters_tied_between_blocks_count_once(vit):
    model = vit()
    for block in model.blocks[1:]:
        block.mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    target = int(0.7 * count_parameters(model))
    config = choose_size(model, target)
    predicted = predict_parameters(model, config)
    convert_(model, config)
    assert predicted == count_parameters(model) <= target


@pytest.mark.parametrize('target', [0.16, 0.25, 0.6, 900_000, 3_000_000])
def test_the_largest_that_fits(target):
    model = timm.create_model('deit_tiny_patch16_224', device='meta')
    total = count_parameters(model)
    limit = target * total if target < 1 else target
    config = choose_size(model, target)
    assert config.time == 'low_rank' and config.phases == 1
    assert predict_parameters(model, config) <= limit
    bigger = OdeConfig(time='low_rank', rank=config.rank + 1)
    assert predict_parameters(model, bigger) > limit


def test_ends_of_the_dial():
    model = timm.create_model('deit_tiny_patch16_224', device='meta')
    assert choose_size(model, 1.0).phases == 12
    assert choose_size(model, 10 ** 9, OdeConfig(steps=7)).steps == 7
    assert choose_size(model, 0.1450).time == 'autonomous' and choose_size(model, 0.1500).time == 'low_rank'
    assert choose_size(model, 0.3, init='svd_data').init == 'svd_data'
    with pytest.raises(ValueError, match=r'570,000 parameters are too few: one shared block .* take 823,912 of 5,717,416 \(14.4 %\)\. A share is written'):
        choose_size(model, 570_000)
    for wrong in (0, -1, True, 'a', None):
        with pytest.raises(ValueError, match='number of parameters, (such as 3M, )?a share'):
            choose_size(model, wrong)
    part = choose_size(model, 1.0, OdeConfig(blocks=(2, 4)))
    assert part.phases == 3
    convert_(model, part).restore()
    assert choose_size(model, np.int64(3_000_000)) == choose_size(model, 3_000_000)
    assert choose_size(model, np.float32(0.5)) == choose_size(model, 0.5)
    for wrong in (1.5, '1.5', '3.0', float('inf')):
        with pytest.raises(ValueError, match='number of parameters, (such as 3M, )?a share'):
            choose_size(model, wrong)
    with pytest.raises(ValueError, match="Unknown init 'spectral'"):
        choose_size(model, 0.5, init='spectral')
    with pytest.raises(TypeError, match='Cannot convert ResNet'):
        choose_size(timm.create_model('resnet18', device='meta'), 0.5)


@pytest.mark.parametrize('text, expected', [
    ('3M', 3_000_000), ('250k', 250_000), ('1.5M', 1_500_000), ('25%', 0.25), ('0.25', 0.25), ('1e6', 1_000_000), ('900_000', 900_000),
    ('10MB', 2_500_000), ('500 kB', 125_000), ('1GB', 250_000_000), ('2B', 2_000_000_000)])
def test_sizes_in_words(text, expected):
    found = parse_size(text)
    assert found == pytest.approx(expected) and type(found) is type(expected)


@pytest.mark.parametrize('text', ['', 'many', '-3', '101%', '0', '3Q', '1.2.3', '10 bytes', 'nan', '1MBB'])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=f"3M, a share up to 100%, such as 25%, or bytes, such as 10MB; got '{text}'"):
        parse_size(text)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_bytes_are_those_of_the_file(dtype, tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', depth=6).to(dtype)
    convert_(model, choose_size(model, '4MB'), keep_original=False)
    save_pretrained(model, tmp_path / 'model')
    assert 3_600_000 < (tmp_path / 'model' / 'model.safetensors').stat().st_size < 4_020_000
    assert choose_size(timm.create_model('vit_tiny_patch16_224', depth=6), '50%').rank == choose_size(
        timm.create_model('vit_tiny_patch16_224', depth=6), 0.5).rank
