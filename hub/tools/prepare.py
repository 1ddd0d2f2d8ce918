"""Write torchvision's CIFAR as one .npz that `odevit distill` reads: python hub/tools/prepare.py cifar100.npz."""
import sys
from pathlib import Path

import numpy as np
import torchvision

data = Path(sys.argv[1])
sets = {part: getattr(torchvision.datasets, data.stem.upper())('.', train=part == 'train', download=True)
        for part in ('train', 'test')}
np.savez(data, classes=np.asarray(sets['test'].classes),
         **{f'x_{part}': np.asarray(of.data) for part, of in sets.items()},
         **{f'y_{part}': np.asarray(of.targets) for part, of in sets.items()})
