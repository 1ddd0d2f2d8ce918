import ipaddress
import os
import socket

os.environ['HF_HUB_OFFLINE'] = '1'  # before huggingface_hub reads it
os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch reads it: two workers on two cores, and their children

import pytest
import timm
import torch

_connect = socket.socket.connect


def _loopback_only(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        host = address[0]
        if host != 'localhost' and not (host.replace('.', '').isdigit() and ipaddress.ip_address(host).is_loopback):
            raise OSError(f'tests run without a network, and something asked for {host}')
    return _connect(self, address)


socket.socket.connect = _loopback_only

TINY = dict(img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=3, num_classes=5)


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
