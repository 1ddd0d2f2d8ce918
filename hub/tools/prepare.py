"""Write torchvision's CIFAR as one .npz that `odevit distill` reads.

    python hub/tools/prepare.py cifar100.npz --name CIFAR100
"""
import argparse

import numpy as np
import torchvision

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('--name', default='CIFAR100', choices=('CIFAR10', 'CIFAR100'))
    parser.add_argument('--root', default='.')
    args = parser.parse_args()
    arrays = {}
    for name, train in (('train', True), ('test', False)):
        data = getattr(torchvision.datasets, args.name)(args.root, train=train, download=True)
        arrays[f'x_{name}'], arrays[f'y_{name}'] = np.asarray(data.data), np.asarray(data.targets)
    np.savez(args.data, classes=np.asarray(data.classes), **arrays)
