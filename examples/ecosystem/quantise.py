"""torchao: int8 weights. Tried with 0.18.0.

A block that does not depend on time only: the weights of a time-dependent one are merged anew for each t, so int8
weights would have to be unpacked for each evaluation, and torchao has no such product (`aten.addmm`).
"""
import timm
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import timm_odevit  # noqa: F401  registers the models


def size(model):
    return sum(p.numel() * p.element_size() if type(p) is torch.nn.Parameter else
               sum(getattr(p, name).numel() * getattr(p, name).element_size() for name in p.tensor_data_names)
               for p in model.parameters())


def main(name='odevit_tiny_native_patch16_64.deit_tiny_cifar10'):
    model = timm.create_model(name, pretrained=True).eval()
    images = torch.randn(32, 3, 64, 64)
    with torch.no_grad():
        before, megabytes = model(images), size(model) / 1e6
        quantize_(model, Int8WeightOnlyConfig())
        agreement = (model(images).argmax(1) == before.argmax(1)).float().mean().item()
    print(f'{megabytes:.2f} MB -> {size(model) / 1e6:.2f} MB; {100 * agreement:.0f} % of the classes are the same')
    return megabytes, size(model) / 1e6, agreement


if __name__ == '__main__':
    main()
