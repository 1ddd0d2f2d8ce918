"""Controls of the published students, with their teacher on CIFAR-100.

    python hub/tools/controls.py plain out/plain3_start 1500000    make a plain ViT of a few of the teacher's blocks
    python hub/tools/controls.py wrn held.npz wrn.json 30          train a WRN-16-2 at 32 px by its logits, 30 minutes
    python hub/tools/controls.py narrow held.npz narrow.json 30 1  a ViT with 64 channels, of 0.61 M parameters; seed 1
"""
import json
import sys
from pathlib import Path

import timm
import torch
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.task import LogitDistillationTask

from timm_odevit import evaluate, fit, save_pretrained
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.files import to_json, write_text
from timm_odevit.saving.save import describe
from timm_odevit.shrinking.candidates import operations
from timm_odevit.shrinking.material import plain_student

name, *rest = sys.argv[1:]
teacher = timm.create_model('deit_tiny_patch16_128.cifar100', pretrained=True)
if name == 'plain':
    save_pretrained(plain_student(teacher, describe(teacher)[:2], int(rest[1])), rest[0])
else:
    data, out, minutes, seed = (*rest, 0)[:4]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    if name == 'wrn':
        stages = tuple(ByoBlockCfg('basic', d=2, c=c, s=s, gs=0, br=1.) for c, s in ((32, 1), (64, 2), (128, 2)))
        student = ByobNet(ByoModelCfg(stages, stem_type='3x3', stem_pool='', stem_chs=16), num_classes=100)
        student.stem = torch.nn.Sequential(torch.nn.AvgPool2d(2), student.stem)  # which halves it once more
        student.pretrained_cfg = teacher.pretrained_cfg
    else:
        student = timm.create_model('deit_tiny_patch16_128', embed_dim=64, depth=11, num_heads=2, num_classes=100)
    images = read_data(data, teacher, DataConfig(batch_size=64), held_out=0.)
    task = LogitDistillationTask(student, teacher, distill_loss_weight=1., task_loss_weight=0.1, verbose=False)
    fit(task, images.train, minutes=float(minutes), opt='adamw', lr=2e-3, warmup_epochs=0.5, seed=int(seed),
        amp='bfloat16')
    row, = json.loads(evaluate(student.eval(), images.test).to_json())
    row['operations'] = operations(student, next(iter(images.test))[0][:1])
    write_text(Path(out), to_json([row]))
