r"""Does a norm that divides make the paper's block withstand contrast? Four variants, from the same weights, equal minutes.

    python hub/runs/contrast.py held.npz out/paper_g4 hub/runs/contrast.json 6    # the weights: hub/ of commit 2ba865c~1

Each learns with K = 6 from the published teacher; top-1 of 300 images that none was trained on, of clean ones, of those
with contrast 1 to 5, and of the 15 corruptions at severity 3.
"""
import json
import sys
from pathlib import Path
from statistics import mean

import timm
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / 'tools'))
from robustness import corrupted, get_corruption_names, logits, percent, pixels

from timm_odevit import TrajectoryDistillationTask, fit
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.dynamics.flow import follow
from timm_odevit.ode import fields

IMAGES = 300


class DividingNorm(fields.CenterNorm):
    """A LayerNorm that begins with the scale that the states have on average."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


def divide(student, images):
    """Replace both norms; each begins as near to the old one as a LayerNorm can."""
    block = student.blocks.shared
    with torch.no_grad(), follow(student, images) as flow:
        sd = mean(float(state.std(-1).mean()) for state in flow.states()[:-1])
    for norm in (block.norm1, block.norm2):
        norm.__class__ = DividingNorm
        norm.weight.data *= norm.scale * sd


own_fold = fields.LipschitzField.fold
fields.LipschitzField.fold = lambda self: None if isinstance(self.norm1, DividingNorm) else own_fold(self)


def measure(model, images, labels):
    clean = percent(logits(model, images), labels)
    at = {cell: percent(logits(model, corrupted(images, cell)), labels)
          for cell in (*(f'contrast, {i}' for i in range(1, 6)), *(f'{name}, 3' for name in get_corruption_names()))}
    return {'clean': clean, 'contrast': clean - mean(at[f'contrast, {i}'] for i in range(1, 6)),
            'lost at severity 3': clean - mean(at[f'{name}, 3'] for name in get_corruption_names()), 'top1': at}


def main():
    data, start, out, minutes = sys.argv[1:]
    torch.set_num_threads(1)
    teacher = timm.create_model('deit_tiny_patch16_128.cifar100', pretrained=True).eval()
    images, labels = pixels([next(iter(read_data(data, teacher, DataConfig(batch_size=IMAGES)).test))], teacher)
    found = json.loads(Path(out).read_text()) if Path(out).exists() else {}  # goes on from there
    for name, divides, corrupt, train in (
            ('teacher', False, 0, False), ('start', False, 0, False), ('as it is', False, 0, True),
            ('a norm that divides', True, 0, True), ('corrupted images', False, 0.5, True), ('both', True, 0.5, True)):
        if name in found:
            continue
        model = teacher if name == 'teacher' else timm.create_model(f'local-dir:{start}', pretrained=True)
        if train:
            source = read_data(data, model, DataConfig(batch_size=128, mixup=0.5, prob=0.5, held_out=0.0111))
            if divides:
                divide(model.eval(), source.sample('train', 64)[0])
            task = TrajectoryDistillationTask(model, teacher, kd_weight=0.6, corrupt=corrupt, verbose=False)
            fit(task, source.train, minutes=float(minutes), opt='adamw', lr=3e-4, weight_decay=0.05, amp='bfloat16',
                progress=False)
        found[name] = measure(model.eval(), images, labels)
        print(name, {k: round(v, 1) for k, v in found[name].items() if k != 'top1'}, flush=True)
        Path(out).write_text(json.dumps({**found, 'minutes': float(minutes)}, indent=1) + '\n')


if __name__ == '__main__':
    main()
