"""Twelve classes of CIFAR-100, 220 images each: the data of the verdict in examples/your-images.md.

    python hub/runs/twelve.py cifar100.npz twelve.npz
    odevit finetune deit_tiny_patch16_224 twelve.npz out/teacher12 --checkpoint deit_tiny.safetensors --img-size 96 \\
        --set fit.epochs=6 --set fit.lr=2e-4 --threads 1
    odevit shrink local-dir:out/teacher12/best twelve.npz out/shrink12 --minutes 15 --size 25% --threads 1
    python examples/exported.py out/shrink12/files/original.onnx twelve.npz
"""
import sys

import numpy as np

CLASSES = (3, 11, 20, 34, 45, 53, 59, 66, 74, 82, 88, 97)


def some(images, labels, each):
    chosen = np.concatenate([np.where(labels == c)[0][:each] for c in CLASSES])
    order = np.random.default_rng(0).permutation(len(chosen))
    return images[chosen][order], labels[chosen][order]


if __name__ == '__main__':
    data = np.load(sys.argv[1])
    (x, y), (x_test, y_test) = (some(data[f'x_{part}'], data[f'y_{part}'], each)
                                for part, each in (('train', 220), ('test', 100)))
    np.savez(sys.argv[2], x_train=x, y_train=y, x_test=x_test, y_test=y_test)
