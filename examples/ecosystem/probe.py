"""scikit-learn: a linear probe on the features of the model, for several step counts. Tested with 1.9.1."""
import timm
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import timm_odevit  # noqa: F401  registers the models


def main(name='odevit_tiny_native_patch16_128.deit_tiny_cifar100', images=600):
    model = timm.create_model(name, pretrained=True, num_classes=0).eval()
    digits = load_digits()
    x = torch.tensor(digits.images[:images], dtype=torch.float32)[:, None] / 8 - 1
    x = torch.nn.functional.interpolate(x, size=128, mode='bilinear').expand(-1, 3, -1, -1)
    half, scores = images // 2, {}
    for steps in (3, 6):
        model.blocks.steps = steps
        with torch.no_grad():
            features = torch.cat([model(batch) for batch in x.split(100)]).numpy()
        probe = LogisticRegression(max_iter=2000).fit(features[:half], digits.target[:half])
        scores[steps] = probe.score(features[half:], digits.target[half:images])
    print('accuracy on digits, by K:', scores)
    return scores


if __name__ == '__main__':
    main()
