"""Write torchvision's CIFAR as one .npz that `odevit distill` reads.

    python hub/tools/prepare.py cifar100.npz --name CIFAR100
"""
import argparse

import numpy as np
import torchvision

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('data')
parser.add_argument('--name', default='CIFAR100', choices=('CIFAR10', 'CIFAR100'))
args = parser.parse_args()
sets = {part: getattr(torchvision.datasets, args.name)('.', train=part == 'train', download=True)
        for part in ('train', 'test')}
np.savez(args.data, classes=np.asarray(sets['test'].classes),
         **{f'x_{part}': np.asarray(of.data) for part, of in sets.items()},
         **{f'y_{part}': np.asarray(of.targets) for part, of in sets.items()})
