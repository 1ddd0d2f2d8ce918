"""torchao: int8 weights. Tested with 0.18.0."""
import timm
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import timm_odevit  # noqa: F401  registers the models


def size(model):
    return sum(p.numel() * p.element_size() if type(p) is torch.nn.Parameter else
               sum(getattr(p, name).numel() * getattr(p, name).element_size() for name in p.tensor_data_names)
               for p in model.parameters())


def main(name='odevit_tiny_native_patch16_128.deit_tiny_cifar100'):
    model = timm.create_model(name, pretrained=True).eval()
    images = torch.randn(32, 3, 128, 128)
    with torch.no_grad():
        before = model(images)
        megabytes = size(model) / 1e6
        quantize_(model, Int8WeightOnlyConfig())
        agreement = (model(images).argmax(1) == before.argmax(1)).float().mean().item()
    print(f'{megabytes:.2f} MB -> {size(model) / 1e6:.2f} MB; {100 * agreement:.0f} % of the predictions agree')
    return megabytes, size(model) / 1e6, agreement


if __name__ == '__main__':
    main()
    main('odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100')
