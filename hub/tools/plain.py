"""Make the control, a plain ViT of a few of a teacher's blocks: python hub/tools/plain.py TEACHER OUT [PARAMETERS]."""
import sys

import timm

from timm_odevit import save_pretrained
from timm_odevit.shrinking.candidates import plain_student

teacher, out, parameters = (*sys.argv[1:], 1_500_000)[:3]
plain = plain_student(timm.create_model(teacher, pretrained=True), int(parameters))
print(plain.blocks)
save_pretrained(plain, out)
