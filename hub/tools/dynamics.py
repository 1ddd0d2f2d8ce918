r"""Measure what the states of published models do along the way, and which numbers go with a right answer.

    python hub/tools/dynamics.py cifar100.npz hub/dynamics --teacher deit_tiny_patch16_128.cifar100 \
        --students odevit_tiny_native_patch16_128.deit_tiny_cifar100 --images 300

Test images; one JSON file per model and measure, so that an interrupted run goes on where it was.
"""
import argparse
import json
import math
import time
from itertools import islice
from pathlib import Path

import numpy as np
import timm
import torch
from scipy.stats import mannwhitneyu, rankdata
from sklearn.metrics import roc_auc_score

import timm_odevit as odevit
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.dynamics.flow import follow, norms
from timm_odevit.files import to_json, write_text
from timm_odevit.ode.blocks import find_ode_blocks
from timm_odevit.ode.methods import METHODS

FEW, MANY = 16, 1000  # images for the errors of the discretisation, which take seconds each; for the agreement
BATCH = 4  # images of which the slowest decides how long the iteration of the exponents goes on


def spread(values):
    values = values[~values.isnan()].double()
    return {'mean': float(values.mean()), 'sd': float(values.std()) if len(values) > 1 else math.nan}


def exponents(model, images, tokens='all'):
    found = odevit.lyapunov_exponents(model, images, tokens=tokens, batch_size=BATCH)
    return {**spread(found.values[:, 0]), 'drift': float(found.drift.nanmean()),
            'residual': float(found.residual.max()), 'running': found.running[..., 0].nanmean(0).tolist(),
            'without': sum(reason is not None for reason in found.reasons),
            'values': [round(value, 5) for value in found.values[:, 0].tolist()]}


def lipschitz(model, images):
    found = odevit.lipschitz_constants(model, images, iterations=8)
    return {'along': found.values.mean(0).tolist(), 'largest': float(found.values.max()),
            **spread(found.values.mean(1))}


def softmax(model, images):
    found = odevit.attention_over_time(model, images).softmax_bound
    return {'along': found.mean((0, 2)).tolist(), **spread(found.mean((1, 2)))}


def discretisation(model, images):
    methods = dict.fromkeys([find_ode_blocks(model)[0].method, 'strang', 'rk4'])
    found = [odevit.discretisation_errors(model, images, methods=[method], fine=4) for method in methods]
    return [{'method': e.method, 'steps': e.steps, 'error': float(e.error.mean()),
             'reference': float(e.reference.mean()), 'local': e.local.mean(0).tolist(), 'order':  # the slope, in logs
             -float(np.polyfit(*np.log([(each.steps, float(each.error.mean())) for each in of]).T, 1)[0])}
            for of in found for e in of]


def agreement(model, loader):
    """Top-1 and agreement with the answer after 100 of its own steps, in percent, by method and evaluations."""
    def answers(steps, method):
        (view := odevit.with_steps(model, steps)).blocks.method = method
        with torch.inference_mode():
            return torch.cat([view(images).argmax(1) for images, _ in loader])
    labels, own = torch.cat([each for _, each in loader]), model.blocks.method
    rows, last = [], answers(100, own)
    for method in dict.fromkeys(('euler', own, 'strang', 'rk4')):
        for nfe in (6, 12, 24, 48, 96):
            if (steps := nfe // METHODS[method].evaluations) >= model.blocks.config.phases:
                found = answers(steps, method)
                rows.append({'method': method, 'evaluations': nfe, **{
                    key: 100 * float((found == of).double().mean())
                    for key, of in (('top1', labels), ('agreement', last))}})
    return rows


def signals(model, loader, teacher=None):
    """By name, a number per image [B] that might tell whether the class is right; and whether it is [B].

    The distance is that of the last states from the teacher's, relative to them.
    """
    rows, correct = [], []
    for images, labels in loader:
        with follow(model, images) as flow:
            states = flow.states()
            logits = flow.logits(states[-1])
            top = logits.topk(2, dim=1)
            row = {'confidence': logits.softmax(dim=1).amax(dim=1), 'margin': top.values[:, 0] - top.values[:, 1]}
            if teacher is not None:
                with follow(teacher, images) as other:
                    theirs = other.states()[-1]
                row['distance'] = norms(states[-1] - theirs) / norms(theirs)
        rows.append(row)
        correct.append(top.indices[:, 0] == labels)
    return {name: torch.cat([row[name].double() for row in rows]) for name in rows[0]}, torch.cat(correct)


def relations(numbers, correct, comparisons, resamples=10_000, seed=0):
    """For each name, the AUROC of its numbers, the ends of a bootstrap interval, and how many images have one.

    Intervals and rank tests are of 0.05 / comparisons (Bonferroni). Images without a number (NaN) are left out.
    """
    rows = []
    for name, values in numbers.items():
        there = ~np.isnan(values := np.asarray(values, float))
        right, score = np.asarray(correct, bool)[there], values[there]
        index = np.random.default_rng(seed).integers(len(score), size=(resamples, len(score)))
        ranks, hits = rankdata(score[index], axis=1), right[index].sum(1)
        areas = ((ranks * right[index]).sum(1) - hits * (hits + 1) / 2) / (hits * (len(score) - hits))
        low, high = np.nanquantile(areas, (0.025 / comparisons, 1 - 0.025 / comparisons))
        p = float(mannwhitneyu(score[right], score[~right]).pvalue)
        rows.append({'name': name, 'auroc': float(roc_auc_score(right, score)), 'low': float(low), 'high': float(high),
                     'images': len(score), 'p': p, 'related': p < 0.05 / comparisons})
    return rows


def measure(model, teacher, loader, many, path, images, models, only):
    """Each measure of one model, or only some: a file of its own, or that of an earlier run."""
    def relate():
        found, correct = signals(model, loader, None if model is teacher else teacher)
        for name in ('exponents', 'class_token'):
            found[name] = json.loads((path / f'{name}.json').read_text())['found']['values']
        return relations(found, correct, 5 * models - 1)  # the teacher has no distance
    chosen = {
        'spectral_norms': lambda: odevit.spectral_norms(model), 'exponents': lambda: exponents(model, images),
        'class_token': lambda: exponents(model, images, 'class'), 'softmax': lambda: softmax(model, images),
        'relations': relate, 'lipschitz': lambda: lipschitz(model, images),
        'discretisation': lambda: discretisation(model, images[:FEW]), 'agreement': lambda: agreement(model, many)}
    for name, run in chosen.items() if not only else [(name, chosen[name]) for name in only]:
        file = path / f'{name}.json'
        count = {'discretisation': min(FEW, len(images)), 'agreement': MANY}.get(name, len(images))
        before = json.loads(file.read_text()) if file.exists() else {}
        same = before.get('images') == count and (name != 'relations' or before.get('models') == models)
        if same or (name in ('discretisation', 'agreement') and not find_ode_blocks(model)):
            continue
        start = time.process_time()
        found = run()
        each = 1000 * (time.process_time() - start) / count
        path.mkdir(parents=True, exist_ok=True)
        write_text(file, to_json({'images': count, 'models': models, 'ms per image': each, 'found': found}))
        print(f'{path.name}, {name}: {each:.1f} ms per image', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--teacher', required=True, help='name of the teacher')
    parser.add_argument('--students', nargs='+', default=[], help='names of its students')
    parser.add_argument('--measures', nargs='+', help='default: all')
    parser.add_argument('--images', type=int, default=MANY, help=f'number of test images, at most {MANY}')
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = timm.create_model(args.teacher, pretrained=True).eval()
    for name in (args.teacher, *args.students):
        model = teacher if name == args.teacher else timm.create_model(name, pretrained=True).eval()
        many = list(islice(read_data(args.data, model, DataConfig(batch_size=50)).test, MANY // 50))
        images, labels = (torch.cat(parts)[:args.images] for parts in zip(*many, strict=True))
        loader = list(zip(images.split(50), labels.split(50), strict=True))
        measure(model, teacher, loader, many, args.out / name.rpartition('/')[2], images,
                1 + len(args.students), args.measures)


if __name__ == '__main__':
    main()
