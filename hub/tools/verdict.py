"""Measure the published students of a dataset as `odevit shrink` would, beside their teachers; writes hub/verdict.json.

    OMP_NUM_THREADS=1 python hub/tools/verdict.py cifar100.npz
"""
import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import timm
import torch

from timm_odevit import with_steps
from timm_odevit.benchmark import processor
from timm_odevit.data.arrays import array_loaders
from timm_odevit.files import to_json, write_text
from timm_odevit.ode.blocks import count_parameters
from timm_odevit.shrinking.candidates import Candidate, measure
from timm_odevit.shrinking.images import Held, Images

HUB = Path(__file__).parent.parent
IMAGES = 2000  # test images


def chosen(tag):
    """Candidates by input size: each teacher, and each of its students with the numbers of steps that it trained."""
    groups = {}
    for path in sorted(HUB.glob(f'*{tag}/results.json')):
        record, name = json.loads(path.read_text()), path.parent.name.split('.')[0]
        if 'patch4' in name:
            continue  # it has no teacher
        model = timm.create_model(f'local-dir:{path.parent}', pretrained=True).eval()
        group = groups.setdefault(model.patch_embed.img_size[0], [])
        if not record['trained_at']:
            group += [Candidate(name, model), Candidate(f'{name}, int8', model, True)]
            continue
        for steps in sorted({3, 6, 12} & set(record['trained_at']), reverse=True):
            group.append(Candidate(f'{name}, K = {steps}, int8', with_steps(model, steps), True, False))
    return groups


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', help='.npz')
    data = Path(parser.parse_args().data)
    torch.set_num_threads(1)
    found = {}
    for size, group in chosen(data.stem).items():
        test = array_loaders(data, group[0].model, batch_size=IMAGES)[-1]
        images, labels = next(iter(test))
        held = Held(images[:IMAGES], labels[:IMAGES], torch.zeros(IMAGES))
        with tempfile.TemporaryDirectory() as folder:
            rows, notes = measure(
                group, Images(None, 0, held, held, held, 'accuracy', ''), Path(folder), progress=print)
        assert not notes, notes
        found[size] = [{**asdict(row), 'parameters': count_parameters(candidate.model)}
                       for row, candidate in zip(rows, group, strict=True)]
    write_text(HUB / 'verdict.json', to_json(
        {'data': data.stem, 'images': IMAGES, 'machine': f'{processor()}, one thread', 'sizes': found}))
