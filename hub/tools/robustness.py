"""Measure published models on corrupted and on attacked images, how sure they are of their answers, and what transfers.

    python hub/tools/robustness.py cifar100.npz cifar10.npz --also hub/runs/plain3

The corruptions are those of CIFAR-C (arXiv 1903.12261) by the package imagecorruptions-imaug, at the size of the model;
each has test images of its own. The temperature (arXiv 1706.04599) is fitted on training images that no published model
was trained on. The attacks are torchattacks' (arXiv 2010.01950) on pixels from 0 to 1. Writes hub/robustness.json after
each part, and goes on from there.
"""
import argparse
import json
import math
from itertools import islice, product
from pathlib import Path
from statistics import mean

import numpy as np
import timm
import torch
import torchattacks
from imagecorruptions import corrupt, get_corruption_names
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import Normalize
from tqdm import tqdm

from timm_odevit import with_steps
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.preprocessing import data_config
from timm_odevit.data.read import read_data
from timm_odevit.dynamics.flow import follow
from timm_odevit.evaluation.embeddings import knn_accuracy, probe_accuracy
from timm_odevit.files import to_json, write_text

HUB = Path(__file__).parent.parent
CORRUPTIONS = [f'{name}, {severity}' for name in get_corruption_names() for severity in range(1, 6)]
IMAGES = 300  # of each
RADII = (0.5, 1., 0.25)  # of the attacks, in 1/255
LEARN, ASK = 2000, 1000  # images of the other classes


def contenders(tag, also=()):
    """By name, with the number of steps of published students: a teacher, these students, and models in folders."""
    found = {}
    for path in sorted(HUB.glob(f'*deit_tiny*{tag}/results.json')):
        name, trained = path.parent.name, json.loads(path.read_text())['trained_at']
        model = timm.create_model(f'local-dir:{path.parent}', pretrained=True).eval()
        for steps in sorted({3, 6, 12} if len(trained) > 1 else trained):
            found[f'{name}, K = {steps}'] = with_steps(model, steps)
        found.update({} if trained else {name: model})
    return found | {path.name: timm.create_model(f'local-dir:{path}', pretrained=True).eval() for path in also}


def of_pixels(model):
    cfg = data_config(model)
    return nn.Sequential(Normalize(cfg['mean'], cfg['std']), model).eval()


def pixels(batches, model):
    """Images [N, C, H, W] of bytes, and labels [N]."""
    cfg = data_config(model)
    middle, std = (torch.tensor(cfg[key])[:, None, None] for key in ('mean', 'std'))
    parts = [((255 * (images * std + middle)).clamp(0, 255).round().byte(), labels) for images, labels in batches]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def corrupted(images, cell):
    name, severity = cell.split(', ')
    out = [corrupt(image, corruption_name=name, severity=int(severity)) for image in images.permute(0, 2, 3, 1).numpy()]
    return torch.from_numpy(np.stack(out)).byte().permute(0, 3, 1, 2)


@torch.inference_mode()
def logits(model, images):
    return torch.cat([of_pixels(model)(batch / 255) for batch in images.split(50)])


def temperature(found, labels):
    return math.exp(minimize_scalar(lambda t: float(cross_entropy(found / math.exp(t), labels)), (-1, 1)).x)


def calibration_error(found, labels, bins=15):
    """The expected calibration error in percent, over bins of equal width."""
    confidence, answer = found.softmax(1).max(1)
    at, gap = (confidence * bins).ceil().long(), (answer == labels).float() - confidence
    return 100 * float(torch.zeros(bins + 1).index_add_(0, at, gap).abs().sum()) / len(labels)


def percent(found, labels):
    return 100 * float((found.argmax(1) == labels).double().mean())


def attack(model, images, labels, kind, radius):
    """Top-1 in percent under PGD with 10 steps, or AutoAttack."""
    how = {'alpha': radius / 255 / 4, 'steps': 10} if kind == 'PGD' else {'n_classes': model.num_classes, 'seed': 0}
    torch.manual_seed(0)
    found = getattr(torchattacks, kind)(net := of_pixels(model), eps=radius / 255, **how)(images / 255, labels)
    with torch.inference_mode():
        return percent(net(found), labels)


def transfer(model, data):
    """k-NN and linear probe in percent, of the class token or mean at a third, two thirds and the end of the time."""
    def features(loader):
        rows = []
        for images, _ in loader:
            with follow(model, images) as flow:
                states = flow.states()
                at = [round(len(flow.maps) * share / 3) for share in (1, 2, 3)]
                rows.append(torch.stack([model.forward_head(model.norm(states[k]), pre_logits=True) for k in at]))
        return torch.cat(rows, 1), torch.cat([labels for _, labels in loader])
    both = read_data(data, model, DataConfig(batch_size=50), held_out=0, any_classes=True)
    (known, theirs), (asked, ours) = (features(list(islice(part, count // 50))) for part, count in (
        (both.plain(), LEARN), (both.test, ASK)))
    return {kind.__name__[:-9]: [kind(asked[at], ours, known[at], theirs) for at in range(3)]
            for kind in (knn_accuracy, probe_accuracy)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='.npz of the classes of the models')
    parser.add_argument('other', type=Path, help='.npz of other classes')
    parser.add_argument('--also', type=Path, nargs='+', default=[], help='folders of other students')
    parser.add_argument('--auto', type=int, metavar='N', default=0, help='AutoAttack on N images: hours of a CPU')
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(out.read_text()) if (out := HUB / 'robustness.json').exists() else {'images': IMAGES}
    models = contenders(args.data.stem, args.also)
    first = next(iter(models.values()))
    data = read_data(args.data, first, DataConfig(batch_size=1000), held_out=0)

    def part(name, run):
        for label, model in models.items():
            if label not in done.setdefault(name, {}):
                done[name][label] = run(label, model)
                write_text(out, to_json(done))
    images, labels = pixels(data.test, first)
    unseen = pixels([list(islice(data.plain(), 49, None))[-1]], first)  # the last thousand
    part('temperature', lambda _, model: temperature(logits(model, unseen[0]), unseen[1]))

    def judged(label, model):
        found = logits(model, x)
        return {'top1': percent(found, y), 'ece': calibration_error(found, y),
                'ece at temperature': calibration_error(found / done['temperature'][label], y)}
    x, y = images[:2000], labels[:2000]
    part('clean', judged)
    for index, cell in enumerate(tqdm(CORRUPTIONS)):
        if not models.keys() <= done.get(cell, {}).keys():
            np.random.seed(index)
            chosen = torch.from_numpy(np.random.permutation(len(labels))[:IMAGES])
            x, y = corrupted(images[chosen], cell), labels[chosen]
            part(cell, judged)
    for (kind, count), radius in product((('PGD', 100), ('AutoAttack', args.auto)), RADII):
        how = images[:count], labels[:count], kind, radius
        part(f'{kind}, {radius:g}', lambda _, model, how=how: attack(model, *how)) if count else None
    part(f'to {args.other.stem}', lambda _, model: transfer(model, args.other))
    models = contenders(args.other.stem)
    part(f'to {args.data.stem}', lambda _, model: transfer(model, args.data))
    kinds = {'lost': CORRUPTIONS, 'noise': CORRUPTIONS[:15], 'blur': CORRUPTIONS[15:35], 'weather': CORRUPTIONS[35:55],
             'digital': CORRUPTIONS[55:], 'not in training': CORRUPTIONS[35:55] + CORRUPTIONS[60:]}
    done['summary'] = {label: {**{kind: mean(done[cell][label][kind] for cell in CORRUPTIONS) for kind in clean}, **{
        kind: clean['top1'] - mean(done[cell][label]['top1'] for cell in cells) for kind, cells in kinds.items()}}
        for label, clean in done['clean'].items()}
    write_text(out, to_json(done))


if __name__ == '__main__':
    main()
