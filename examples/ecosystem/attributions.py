"""captum: integrated gradients through the solver. Tested with 0.9.0."""
import timm
import torch
from captum.attr import IntegratedGradients

import timm_odevit  # noqa: F401  registers the models


def main(name='odevit_tiny_native_patch16_128.deit_tiny_cifar100'):
    model = timm.create_model(name, pretrained=True).eval()
    image = torch.randn(1, 3, 128, 128)    # yours, normalised for the model
    target = model(image).argmax(1)
    attributions, error = IntegratedGradients(model).attribute(
        image, target=target, n_steps=50, return_convergence_delta=True)
    print(list(attributions.shape), 'how far their sum is from the change of the logit:', error.item())
    return attributions, error.item()


if __name__ == '__main__':
    main()
