"""Trajectories that violate the assumption of self-supervised training, by degrees."""
import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parent.parent / 'hub' / 'tools' / 'violations.py'


@pytest.fixture(scope='module')
def tool():
    spec = importlib.util.spec_from_file_location('violations', PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def states():
    return list(torch.randn(4, 6, 5, 32, generator=torch.Generator().manual_seed(0)))


def changed(tool, states, kind, degree, labels=None):
    labels = torch.arange(6) % 3 if labels is None else labels
    return tool.violate(states, labels, kind, degree, torch.Generator().manual_seed(0))


@pytest.mark.parametrize('kind', ['as they are', 'rotated', 'displaced', 'exchanged'])
def test_nothing_is_changed_by_degree_0_and_nothing_at_the_start(tool, states, kind):
    for ours, theirs in zip(changed(tool, states, kind, 0.), states):
        assert torch.allclose(ours, theirs, atol=1e-5)
    if kind != 'exchanged':
        assert torch.allclose(changed(tool, states, kind, 1.)[0], states[0], atol=1e-5)


def test_a_rotation_turns_each_token_by_the_angle(tool, states):
    found = changed(tool, states, 'rotated', 60.)
    assert torch.allclose(found[-1].norm(dim=-1), states[-1].norm(dim=-1), rtol=1e-5)
    assert torch.allclose(torch.cosine_similarity(found[-1], states[-1], dim=-1), torch.full((6, 5), 0.5), atol=1e-5)
    assert torch.allclose(torch.cosine_similarity(found[1], states[1], dim=-1),
                          torch.tensor(20.).deg2rad().cos().expand(6, 5), atol=1e-5)


def test_a_displacement_is_a_share_of_the_norm(tool, states):
    moved = changed(tool, states, 'displaced', 0.5)[-1] - states[-1]
    assert torch.allclose(moved.norm(dim=-1), 0.5 * states[-1].norm(dim=-1), rtol=1e-4)
    assert torch.allclose(torch.cosine_similarity(moved[0, 0], moved[3, 2], dim=0), torch.tensor(1.), atol=1e-5)


def test_trajectories_are_exchanged_whole_and_between_classes(tool, states):
    labels = torch.arange(6) % 3
    found = changed(tool, states, 'exchanged', 1., labels)
    for i in range(6):
        partner = next(j for j in range(6) if torch.equal(found[0][i], states[0][j]))
        assert labels[partner] != labels[i] and all(torch.equal(a[i], b[partner]) for a, b in zip(found, states))
    assert torch.equal(changed(tool, states, 'exchanged', 1., torch.zeros(6))[0], states[0])  # no other class


def test_training_fails_with_the_assumption(tool, vit):
    # four patterns, one per class; the teacher knows them
    torch.manual_seed(0)
    patterns = torch.randn(4, 3, 16, 16)
    labels = torch.arange(4).repeat(8)
    images = patterns[labels] + 0.1 * torch.randn(32, 3, 16, 16)
    teacher = vit(num_classes=4)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(teacher(images), labels).backward()
        optimizer.step()
    teacher.eval()
    loader = [(images, labels)]
    assert (teacher(images).argmax(-1) == labels).all()
    found = {kind: tool.run(teacher, loader, loader, kind, degree, 40, 3) for kind, degree in (
        ('as they are', 0.), ('exchanged', 1.))}
    assert found['as they are']['inside'] == 100 and found['exchanged']['inside'] == 0
    assert found['as they are']['top1'] > 90 > 40 > found['exchanged']['top1']
