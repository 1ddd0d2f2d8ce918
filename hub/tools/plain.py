"""Make a plain ViT of a few of a teacher's blocks, to be distilled by the same recipes as the ODE-ViTs: the control.

    python hub/tools/plain.py deit_tiny_patch16_128.cifar100 out/plain --parameters 1500000
"""
import argparse

import timm

from timm_odevit import save_pretrained
from timm_odevit.shrinking.candidates import plain_student

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('teacher', help='name of the teacher')
    parser.add_argument('out', help='folder')
    parser.add_argument('--parameters', type=int, default=1_500_000, help='about how many it has')
    args = parser.parse_args()
    plain = plain_student(timm.create_model(args.teacher, pretrained=True), args.parameters)
    print(plain.blocks)
    save_pretrained(plain, args.out)
