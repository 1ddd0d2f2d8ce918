"""torchvision, a dependency of this package: features by the names of graph nodes."""
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import timm_odevit  # noqa: F401  registers the models


def main(name='odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100'):
    model = timm.create_model(name, pretrained=True).eval()
    extract = create_feature_extractor(model, {'blocks.solver.5': 'half', 'norm': 'end'})
    features = extract(torch.randn(1, 3, 128, 128))
    print({name: list(value.shape) for name, value in features.items()})
    return features


if __name__ == '__main__':
    main()
