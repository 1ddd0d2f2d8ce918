"""Make the control, a plain ViT of a few of a teacher's blocks: python hub/tools/plain.py TEACHER OUT [PARAMETERS]."""
import sys

import timm

from timm_odevit import save_pretrained
from timm_odevit.saving.save import describe
from timm_odevit.shrinking.material import plain_student

teacher, out, parameters = (*sys.argv[1:], 1_500_000)[:3]
model = timm.create_model(teacher, pretrained=True)
plain = plain_student(model, describe(model)[:2], int(parameters))
print(plain.blocks)
save_pretrained(plain, out)
