"""A DeiT-tiny without its head as the teacher of embeddings: k-NN accuracy, with and without the relation term.

    python hub/tools/embeddings.py cifar100.npz hub/embeddings.json

The teacher is the published one of CIFAR-100; its embedding is the class token after the final norm. The students are
trained without labels, on the training images, for the same number of updates: half of them step by step, half
unrolled. Embeddings of 2,000 training images that were held out are classified by 10,000 others. Rows that are already
in the file are not repeated.
"""
import argparse
import copy
import json
import time
from pathlib import Path

import timm
import torch

from timm_odevit import StepwiseTask, TrajectoryDistillationTask, convert_, evaluate_embeddings, fit
from timm_odevit.data.arrays import array_loaders
from timm_odevit.training.budget import Stream

STUDENTS = {'one block': {}, 'rank 23': {'time': 'low_rank', 'rank': 23, 'init': 'svd_data'}}
LEARNED, HELD_OUT, MOMENT_IMAGES = 10_000, 2000, 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--updates', type=int, default=300)
    parser.add_argument('--weights', type=float, nargs='+', default=[0., 0.1], help='of the relation term')
    parser.add_argument('--kd-weight', type=float, default=0.1, help='of direction and value of the embedding')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = timm.create_model('deit_tiny_patch16_64.cifar100', pretrained=True, num_classes=0).eval()
    train, val, _ = array_loaders(args.data, teacher, batch_size=64, held_out=.1, padding=4, seed=args.seed)
    known = copy.copy(val)
    known.images, known.labels = train.images[:LEARNED], train.labels[:LEARNED]
    val.images, val.labels = val.images[:HELD_OUT], val.labels[:HELD_OUT]
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for name, how in STUDENTS.items():
        for weight in args.weights:
            if any((row['student'], row['relation_weight']) == (name, weight) for row in rows):
                continue
            student, minutes = learn(teacher, train, how, weight, args)
            theirs, ours = evaluate_embeddings(student, val, labelled=known, teacher=teacher).results
            rows.append({
                'student': name, 'kd_weight': args.kd_weight, 'relation_weight': weight, 'updates': args.updates,
                'minutes': minutes, 'parameters': ours.parameters, 'cosine': ours.cosine, 'neighbours': ours.neighbours,
                'knn': ours.knn, 'probe': ours.probe, 'teacher knn': theirs.knn, 'teacher probe': theirs.probe,
                'teacher parameters': theirs.parameters})
            args.out.write_text(json.dumps(rows, indent=2) + '\n')
            print(rows[-1], flush=True)


def learn(teacher, train, how, weight, args):
    started = time.process_time()
    images = train.prepare(train.images[:MOMENT_IMAGES])
    student = copy.deepcopy(teacher).requires_grad_(True)
    torch.manual_seed(args.seed)
    convert_(student, **how, images=images if how else None, keep_original=False)
    common = dict(epochs=1, weight_decay=0., seed=args.seed, progress=False)
    half = Stream(train, args.updates // 2)
    fit(StepwiseTask(student, teacher, verbose=False), half, opt='adamw', lr=3e-3, **common)
    task = TrajectoryDistillationTask(student, teacher, kd_weight=args.kd_weight, relation_weight=weight, verbose=False)
    fit(task, half, opt='muon', lr=1e-3, **common)
    return student.eval(), (time.process_time() - started) / 60


if __name__ == '__main__':
    main()
