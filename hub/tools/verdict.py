"""Measure published students as `odevit shrink` would, on the test images, beside their teachers and a plain student.

Writes hub/verdict.json; hub/TRAINING.md has the commands of the plain student:

    OMP_NUM_THREADS=1 python hub/tools/verdict.py cifar100.npz --plain hub/runs/plain3
"""
import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import onnxruntime  # noqa: F401  # measure leaves int8 out without these two
import onnxscript  # noqa: F401
import timm
import torch

from timm_odevit import with_steps
from timm_odevit.benchmark import processor
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.files import to_json, write_text
from timm_odevit.ode.blocks import count_parameters, find_ode_blocks
from timm_odevit.shrinking.candidates import Candidate, measure
from timm_odevit.shrinking.material import Held

HUB = Path(__file__).parent.parent


def chosen(tag, plain):
    """Candidates by image size: each teacher, its students with numbers of steps of their training, and a plain one."""
    groups = {}
    for path in sorted(HUB.glob(f'*deit_tiny*{tag}/results.json')):  # others had no teacher
        name, trained = path.parent.name, json.loads(path.read_text())['trained_at']
        model = timm.create_model(f'local-dir:{path.parent}', pretrained=True).eval()
        group = groups.setdefault(model.patch_embed.img_size[0], [])
        counts = {3, 6} & set(trained) | {find_ode_blocks(model)[0].steps} if trained else {None}
        for steps in sorted(counts, reverse=True):
            kind, view = ('student', with_steps(model, steps)) if steps else ('original', model)
            for each in Candidate(kind, name, view).and_smaller()[bool(steps):]:
                group.append(each._replace(name=each.name + f', K = {steps}' * bool(steps)))
    if plain is not None:
        model = timm.create_model(f'local-dir:{plain}', pretrained=True).eval()
        groups.get(model.patch_embed.img_size[0], []).extend(Candidate('plain', 'plain', model).and_smaller()[1:])
    return {size: group for size, group in groups.items() if group[0].name.startswith('deit_tiny')}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='.npz')
    parser.add_argument('--plain', type=Path, help='folder of a plain ViT of a few blocks')
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    if not (groups := chosen(args.data.stem, args.plain)):
        parser.error('There is no published teacher for these images.')
    for size, group in groups.items():
        data = read_data(args.data, group[0].model, DataConfig(batch_size=1000))
        images, labels = (torch.cat(parts) for parts in zip(*data.test, strict=True))
        held = Held(images, labels, torch.zeros(len(images)), 'accuracy')
        with tempfile.TemporaryDirectory() as folder:
            rows, notes = measure(group, held, data.sample('train', 128)[0], Path(folder), progress=print)
        print(*notes, sep='\n')
        by_name = {each.name: each.model for each in group}  # what cannot be exported has no row
        found.append({'data': args.data.stem, 'size': size, 'images': len(images), 'rows': [
            {**asdict(row), 'parameters': count_parameters(by_name[row.name])} for row in rows]})
    write_text(HUB / 'verdict.json', to_json({'machine': f'{processor()}, one thread', 'groups': found}))
