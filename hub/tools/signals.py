"""Measure numbers that might tell whether a model is right about an image, for relations.py.

    python hub/tools/signals.py cifar100.npz odevit_tiny_native_patch16_128.deit_tiny_cifar100 out.json \
        --teacher deit_tiny_patch16_128.cifar100 --images 1000

For each test image: confidence, the largest probability; entropy of the probabilities, in nats; margin between the two
largest logits; exponent, the largest one; radius of the region of the class in its worst direction, relative to the
norm of the state; acceleration, how much the last step differs from the one before it, relative to it; and with a
teacher distance of the last states, relative to the teacher's. And whether the image is classified correctly.
"""
import argparse
import json

import timm
import torch

from timm_odevit import contraction_regions, lyapunov_exponents
from timm_odevit.data.arrays import array_loaders
from timm_odevit.dynamics.flow import follow, norms


def signals(model, loader, teacher=None):
    """By name, one number per image [B] of a loader of (images, labels); and whether the class is right [B]."""
    rows, correct = [], []
    for images, labels in loader:
        with follow(model, images) as flow:
            states = flow.states()
            logits = flow.logits(states[-1])
            probabilities, top = logits.softmax(dim=1), logits.topk(2, dim=1)
            last, before = states[-1] - states[-2], states[-2] - states[-3]
            region = contraction_regions(flow, directions=1)
            row = {'confidence': probabilities.amax(dim=1),
                   'entropy': torch.special.entr(probabilities).sum(dim=1),
                   'margin': top.values[:, 0] - top.values[:, 1],
                   'exponent': lyapunov_exponents(flow).values[:, 0],
                   'radius': region.worst / region.norm,
                   'acceleration': norms(last - before) / norms(before)}
            if teacher is not None:
                with follow(teacher, images) as other:
                    theirs = other.states()[-1]
                row['distance'] = norms(states[-1] - theirs) / norms(theirs)
        rows.append(row)
        correct.append(top.indices[:, 0] == labels)
    return {name: torch.cat([row[name].double() for row in rows]) for name in rows[0]}, torch.cat(correct)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('model', help='name of a model')
    parser.add_argument('out', help='JSON file to write')
    parser.add_argument('--teacher', help='name of its teacher')
    parser.add_argument('--images', type=int, default=1000, help='number of test images')
    args = parser.parse_args()
    model, teacher = (timm.create_model(name, pretrained=True).eval() if name else None
                      for name in (args.model, args.teacher))
    found, correct = signals(model, array_loaders(args.data, model, batch_size=50, limit=args.images)[2], teacher)
    with open(args.out, 'w') as file:
        json.dump({'correct': correct.tolist(), **{name: values.tolist() for name, values in found.items()}}, file)


if __name__ == '__main__':
    main()
