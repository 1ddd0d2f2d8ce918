"""A student to start from for another teacher: python hub/runs/other_head.py STUDENT TEACHER OUT."""
import sys

import timm

from timm_odevit import save_pretrained

student, teacher, out = sys.argv[1:]
theirs = timm.create_model(teacher, pretrained=True)
ours = timm.create_model(
    student, pretrained=True, num_classes=theirs.num_classes, img_size=theirs.patch_embed.img_size).float()
ours.get_classifier().load_state_dict(theirs.get_classifier().state_dict())
cfg = {key: value for key, value in theirs.pretrained_cfg.items() if key in ('num_classes', 'label_names')}
ours.pretrained_cfg = ours.default_cfg = {**ours.pretrained_cfg, **cfg}
save_pretrained(ours, out)
