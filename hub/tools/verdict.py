"""Measure published students as `odevit shrink` would, on the test images, beside their teachers, if published.

Writes hub/verdict.json:

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
from timm_odevit.ode.blocks import count_parameters, find_ode_blocks
from timm_odevit.shrinking.candidates import Candidate, measure
from timm_odevit.shrinking.images import Held, Images

HUB = Path(__file__).parent.parent


def chosen(tag):
    """Candidates by image size: each teacher, and its students with numbers of steps that they were trained with."""
    groups = {}
    for path in sorted(HUB.glob(f'*{tag}/results.json')):
        name, trained = path.parent.name, json.loads(path.read_text())['trained_at']
        model = timm.create_model(f'local-dir:{path.parent}', pretrained=True).eval()
        if 'deit_tiny' not in name:
            continue  # trained from scratch, without a teacher
        group = groups.setdefault(model.patch_embed.img_size[0], [])
        if not trained:
            group += [Candidate(name, model), Candidate(f'{name}, int8', model, True)]
        else:
            counts = {3, 6} & set(trained) | {find_ode_blocks(model)[0].steps}
            group += [Candidate(f'{name}, int8, K = {steps}', with_steps(model, steps), True, False)
                      for steps in sorted(counts, reverse=True)]
    return {size: group for size, group in groups.items() if group[0].name.startswith('deit_tiny')}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', nargs='+', type=Path, help='.npz')
    torch.set_num_threads(1)
    found = []
    for data in parser.parse_args().data:
        for size, group in chosen(data.stem).items():
            batches = list(array_loaders(data, group[0].model, batch_size=1000)[-1])
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            held = Held(images, labels, torch.zeros(len(images)))
            with tempfile.TemporaryDirectory() as folder:
                rows, notes = measure(
                    group, Images(None, 0, held, held, held, 'accuracy', ''), Path(folder), progress=print)
            assert not notes, notes
            found.append({'data': data.stem, 'size': size, 'images': len(images), 'rows': [
                {**asdict(row), 'parameters': count_parameters(candidate.model)}
                for row, candidate in zip(rows, group, strict=True)]})
    write_text(HUB / 'verdict.json', to_json({'machine': f'{processor()}, one thread', 'groups': found}))
