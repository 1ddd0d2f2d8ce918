r"""When does self-supervised training fail? Students follow trajectories that violate its assumption on purpose.

    python hub/tools/violations.py cifar10.npz out/violations.json --teacher deit_tiny_patch16_64.cifar10 --updates 200

Training on trajectories alone, with the teacher's head and without labels, assumes that the trajectories end where the
head gives the right class. Here the teacher's trajectories are changed by degrees: rotated, displaced, or exchanged
between images of different classes. For each, the table has the share of images whose changed end still gets the
teacher's class from the teacher's head (the assumption), and the student's top-1 on images held out. A run that was
interrupted goes on where it was.
"""
import argparse
import copy
import json
from pathlib import Path

import timm
import torch

from timm_odevit import TrajectoryDistillationTask, convert_, evaluate, fit
from timm_odevit.data.arrays import array_loaders
from timm_odevit.files import to_json, write_text
from timm_odevit.recording import watch_blocks
from timm_odevit.training.cache import Recorded

DEGREES = {
    'as they are': (0.,),
    'rotated': (15., 30., 60., 90.),  # degrees of arc
    'displaced': (0.25, 0.5, 1., 2.),  # of the norm of the state
    'exchanged': (0.1, 0.25, 0.5, 1.),  # share of the images
}


def violate(states, labels, kind, degree, generator):
    """The states [B, N, D] of a trajectory, changed more and more along the way, fully at the end.

    'rotated' turns D / 2 fixed planes by an angle; 'displaced' adds one fixed direction; 'exchanged' gives an image
    the trajectory of one of another class, where the batch has one.
    """
    D, last = states[0].shape[-1], len(states) - 1
    basis = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(1)))[0].to(states[0])
    if kind == 'rotated':
        first, second = basis[:, 0:D - 1:2], basis[:, 1:D:2]

        def turn(x, angle):
            a, b = x @ first, x @ second
            angle = torch.as_tensor(angle).deg2rad()
            return x + (a * (angle.cos() - 1) - b * angle.sin()) @ first.T + (
                a * angle.sin() + b * (angle.cos() - 1)) @ second.T
        return [turn(x, degree * i / last) for i, x in enumerate(states)]
    if kind == 'displaced':
        return [x + degree * i / last * x.norm(dim=-1, keepdim=True) * basis[:, 0] for i, x in enumerate(states)]
    if kind == 'exchanged':
        B = len(labels)
        partner = torch.arange(B)
        for i in range(B):
            others = (labels != labels[i]).nonzero()[:, 0]
            if torch.rand((), generator=generator) < degree and len(others):
                partner[i] = others[torch.randint(len(others), (), generator=generator)]
        return [x[partner] for x in states]
    return list(states)


class Violated:
    """Batches (images, the teacher's changed states) of a loader, and whether the ends still give its class."""

    def __init__(self, loader, teacher, kind, degree):
        self.loader, self.teacher, self.kind, self.degree = loader, teacher, kind, degree
        self.generator = torch.Generator().manual_seed(0)
        self.inside = self.seen = 0

    def __len__(self):
        return len(self.loader)

    @torch.no_grad()
    def __iter__(self):
        for images, labels in self.loader:
            with watch_blocks([list(self.teacher.blocks)]) as found:
                logits = self.teacher(images)
            states = violate(found[0][0], labels, self.kind, self.degree, self.generator)
            ends = self.teacher.forward_head(self.teacher.norm(states[-1]))
            self.inside += int((ends.argmax(-1) == logits.argmax(-1)).sum())
            self.seen += len(images)
            yield images, Recorded(labels, logits, states)


def run(teacher, loader, held, kind, degree, updates, steps):
    """Train one student on changed trajectories alone; its head is the teacher's, and no label is used."""
    student = copy.deepcopy(teacher)
    convert_(student, steps=steps, keep_original=False)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name.startswith('blocks.'))
    changed = Violated(loader, teacher, kind, degree)
    task = TrajectoryDistillationTask(student, teacher, kd_weight=0., verbose=False)
    epochs = max(1, round(updates / len(loader)))
    fit(task, changed, epochs=epochs, opt='muon', lr=2e-3, weight_decay=0., progress=False)
    found = evaluate(student.eval(), held, teacher=teacher).results[-1]
    return {'kind': kind, 'degree': degree, 'inside': 100 * changed.inside / changed.seen, 'top1': found.top1,
            'agreement': found.agreement}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--teacher', default='deit_tiny_patch16_64.cifar10')
    parser.add_argument('--updates', type=int, default=200)
    parser.add_argument('--images', type=int, default=3200, help='training images')
    parser.add_argument('--steps', type=int, default=6, help='steps of the students')
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = timm.create_model(args.teacher, pretrained=True).eval()
    loader, held, _ = array_loaders(args.data, teacher, batch_size=32, limit=args.images, held_out=0.1)
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for kind, degrees in DEGREES.items():
        for degree in degrees:
            if not any(row['kind'] == kind and row['degree'] == degree for row in rows):
                rows.append(run(teacher, loader, held, kind, degree, args.updates, args.steps))
                print(rows[-1], flush=True)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                write_text(args.out, to_json(rows))


if __name__ == '__main__':
    main()
