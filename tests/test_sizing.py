import re

import numpy as np
import pytest
import timm
import torch

from timm_odevit import OdeConfig, choose_size, convert_, save_pretrained
from timm_odevit.convert.planning import parse_size, predict_parameters
from timm_odevit.ode.blocks import count_parameters


@pytest.mark.parametrize('name', ['deit_tiny_patch16_224', 'samvit_base_patch16', 'swin_tiny_patch4_window7_224'])
@pytest.mark.parametrize('settings', [dict(), dict(phases=2), dict(phases=3)], ids=str)
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


@pytest.mark.parametrize('target, phases', [
    ('25%', 3), (0.25, 3), (np.float32(0.5), 6), ('100%', 12), (1.0, 12), (1 / 3, 4), ('33%', 3), (1 / 12, 1),  # of the 12 blocks
    (1_000_000, 1), ('3M', 5), (np.int64(3_000_000), 5), ('5.7MB', 2), (10 ** 9, 12)])  # of the whole model
def test_the_most_blocks_that_fit(target, phases):
    model = timm.create_model('deit_tiny_patch16_224', device='meta')
    assert choose_size(model, target, OdeConfig(steps=24)) == OdeConfig(steps=24, phases=phases)


@pytest.mark.parametrize('target', [1_268_776, 1_268_775])
def test_a_size_that_is_just_met_is_met(target):
    model = timm.create_model('deit_tiny_patch16_224', device='meta')
    config = choose_size(model, target)
    assert predict_parameters(model, config) <= target < predict_parameters(model, OdeConfig(phases=config.phases + 1))


def test_a_share_of_a_part_or_of_stages_is_one_of_their_blocks():
    model = timm.create_model('deit_tiny_patch16_224', device='meta')
    part = choose_size(model, 1.0, OdeConfig(blocks=(2, 4)))
    assert part.phases == part.steps == 3 and [choose_size(model, share).steps for share in ('9%', '25%', '50%')] == [6, 6, 12]
    convert_(model, part).restore()
    sam = timm.create_model('samvit_base_patch16', device='meta')  # 12 blocks, of which four see all tokens
    assert [(c.phases, c.steps) for c in (choose_size(sam, share) for share in ('20%', '50%'))] == [(1, None), (3, None)]
    assert choose_size(model, '50%', OdeConfig(steps=4)).phases == 4  # each needs a step
    swin = timm.create_model('swin_tiny_patch4_window7_224', device='meta')
    assert [choose_size(swin, '100%', OdeConfig(steps=steps)).phases for steps in (None, (2, 2, 6, 2), (2, None, 6, 2), (2, 2, 3, 2))] == [6, 6, 6, 3]


@pytest.mark.parametrize('name, target, config, error, message', [
    ('deit_tiny_patch16_224', 570_000, {}, ValueError,
     "'570000' of 5,717,416 parameters is too little: phases=1 leaves 823,912. Write a share of the blocks as '25%'."),
    ('deit_tiny_patch16_224', '8%', {}, ValueError, "'8%' of 12 blocks is too little: phases=1 leaves 1."),
    ('swin_tiny_patch4_window7_224', '50%', {}, ValueError, 'phases=1 leaves 7'),  # shifted windows, and others, in each stage
    ('deit_tiny_patch16_224', 0.5, dict(field='lipschitz', method='euler'), ValueError,
     "choose_size works only for field='native'. Set phases yourself."),
    ('resnet18', 0.5, {}, TypeError, 'Cannot convert ResNet'),
    *[('deit_tiny_patch16_224', wrong, {}, ValueError, 'expected a number of parameters, such as 3M, a share')
      for wrong in (0, -1, True, 'a', None, 1.5, '1.5', '3.0', float('inf'))]])
def test_choose_size_refuses(name, target, config, error, message):
    with pytest.raises(error, match=re.escape(message)):
        choose_size(timm.create_model(name, device='meta'), target, OdeConfig(**config))


@pytest.mark.parametrize('text, expected', [
    ('3M', 3_000_000), ('250k', 250_000), ('1.5M', 1_500_000), ('25%', 0.25), ('0.25', 0.25), ('1e6', 1_000_000), ('2.5e6', 2_500_000), ('900_000', 900_000),
    ('10MB', 2_500_000), ('500 kB', 125_000), ('1GB', 250_000_000), ('2B', 2_000_000_000)])
def test_sizes_in_words(text, expected):
    found = parse_size(text)
    assert found == pytest.approx(expected) and type(found) is type(expected)


@pytest.mark.parametrize('text', ['', 'many', '-3', '101%', '0', '3Q', '1.2.3', '10 bytes', 'nan', '1MBB'])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=f"3M, a share up to 100%, such as 25%, or bytes, such as 10MB; got '{text}'"):
        parse_size(text)


@pytest.mark.parametrize('dtype, limit', [(torch.float32, 5.1), (torch.float16, 5.3)])  # 2 blocks, and 5
def test_bytes_are_those_of_the_file(dtype, limit, tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', depth=6).to(dtype)
    convert_(model, choose_size(model, f'{limit}MB'), keep_original=False)
    save_pretrained(model, tmp_path / 'model')
    assert 0.98 * limit < (tmp_path / 'model' / 'model.safetensors').stat().st_size / 1e6 <= limit
