"""Make a plain ViT of a few of a teacher's blocks, to be distilled by the same recipes as the ODE-ViTs: the control.

    python hub/tools/plain.py deit_tiny_patch16_128.cifar100 out/plain3 --layers 0 5 11
    odevit distill hub/runs/plain.yaml cifar100.npz out/plain3_run --student local-dir:out/plain3 --teacher ...

It is converted with one block per layer, which changes nothing in what it computes, and lets the same task train it.
"""
import argparse
import copy

import timm
from torch import nn

from timm_odevit import convert_, save_pretrained


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('teacher', help='name of the teacher')
    parser.add_argument('out', help='folder')
    parser.add_argument('--layers', type=int, nargs='+', default=[0, 5, 11], help='layers whose blocks are taken')
    args = parser.parse_args()
    teacher = timm.create_model(args.teacher, pretrained=True)
    plain = timm.create_model(args.teacher, depth=len(args.layers))
    blocks = nn.Sequential(*(copy.deepcopy(teacher.blocks[i]) for i in args.layers))
    plain.load_state_dict({**teacher.state_dict(), **{f'blocks.{k}': v for k, v in blocks.state_dict().items()}}, False)
    print(convert_(plain, phases=len(args.layers), keep_original=False))
    save_pretrained(plain, args.out)


if __name__ == '__main__':
    main()
