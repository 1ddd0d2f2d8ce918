"""Train a small ViT on scikit-learn's digits, convert a copy to an ODE-ViT, distil it, and see what it keeps.

    python examples/quickstart.py [folder]

Writes the distilled model to the folder (default: quickstart).
"""
import copy
import os
import sys
import time
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from timm.task import ClassificationTask
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import TrajectoryDistillationTask, convert_, evaluate, fit, save_pretrained

STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
EPOCHS = (25, 40)  # of the ViT, of the distillation


def loaders():
    """Digits as 8 x 8 images in [-1, 1]: 1 197 to train, 200 to choose the epoch, 400 to test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels, seed = torch.tensor(labels), torch.Generator().manual_seed(0)
    train, val, test = torch.utils.data.random_split(TensorDataset(images, labels), (1197, 200, 400), seed)
    return DataLoader(train, 64, shuffle=True, drop_last=True), DataLoader(val, 200), DataLoader(test, 200)


def main(folder):
    start = time.perf_counter()
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much if a core is busy
    folder = Path(folder)
    torch.manual_seed(0)
    train, val, test = loaders()

    vit = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, patch_size=2, in_chans=1, num_classes=10,
        embed_dim=64, num_heads=4, depth=8,
        pretrained_cfg_overlay=dict(input_size=(1, 8, 8), mean=(0.5,), std=(0.5,)))
    print('1. train a ViT with 8 blocks')
    fit(ClassificationTask(vit, torch.nn.CrossEntropyLoss()), train, val, epochs=EPOCHS[0], lr=2e-3, warmup_epochs=2)

    print('2. convert a copy')
    student = copy.deepcopy(vit)
    print(convert_(student))

    print('3. distil: the shared block learns to follow the ViT')
    fit(TrajectoryDistillationTask(student, vit), train, val, epochs=EPOCHS[1], lr=2e-3, warmup_epochs=2)

    print('4. evaluate on the test images')
    found = evaluate(student, test, steps=STEPS, teacher=vit)
    print(found.table())

    save_pretrained(student, folder / 'model')
    again = timm.create_model(f'local-dir:{folder / "model"}', pretrained=True).eval()
    images, _ = next(iter(test))
    assert torch.equal(again(images), student.eval()(images))
    print(f"saved {folder}/model, which timm.create_model('local-dir:{folder}/model', "
          f'pretrained=True) loads, with the same logits ({time.perf_counter() - start:.0f} s in all)')


if __name__ == '__main__':
    main(sys.argv[1] if len(sys.argv) > 1 else 'quickstart')
