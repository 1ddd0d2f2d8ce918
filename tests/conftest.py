import copy
import ipaddress
import os
import socket

os.environ['HF_HUB_OFFLINE'] = '1'  # before huggingface_hub reads it
os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch reads it: two workers on two cores, and their children

import pytest
import timm
import torch

from timm_odevit import convert_, save_pretrained

_connect = socket.socket.connect


def _loopback_only(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        host = address[0]
        if host != 'localhost' and not (host.replace('.', '').isdigit() and ipaddress.ip_address(host).is_loopback):
            raise OSError(f'tests run without a network, and something asked for {host}')
    return _connect(self, address)


socket.socket.connect = _loopback_only

TINY = dict(img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=3, num_classes=5)


def snapshot(model):
    """Everything of a model that a call could change, to be compared by ==."""
    return ({name: (t.dtype, t.shape, t.data_ptr(), t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in model.state_dict().items()},
            [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
            [(name, id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), getattr(m, 'config', None)) for name, m in model.named_modules()],
            repr(model), sorted(vars(model)), getattr(model, 'feature_info', None))


def reloaded(model, folder, **kwargs):
    """The model as timm builds it from the folder it was saved in."""
    save_pretrained(model, folder)
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs).eval()


def converted(vit, config=None, **kwargs):
    """A small ViT of the fixture below, converted."""
    return convert_(vit(**kwargs), config).model


def pair(vit, config=None, **kwargs):
    """A small ViT converted, and the ViT itself: student and teacher."""
    teacher = vit(**kwargs)
    return convert_(copy.deepcopy(teacher), config).model, teacher


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def vit():
    """Builds a small pretrained-like ViT: 3 blocks, 17 tokens of 32 channels, 5 classes."""
    def build(name='vit_tiny_patch16_224', **kwargs):
        model = timm.create_model(name, **{**TINY, **kwargs}).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model
    return build


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16)
