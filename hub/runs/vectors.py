"""A student of one block, with vectors (norms, biases) for each layer that start at 0.

    python hub/runs/vectors.py local-dir:hub/runs/c100_128_one out/vectors
"""
import sys

import timm

from timm_odevit import save_pretrained


def main(student, out):
    state = timm.create_model(student, pretrained=True).float().state_dict()
    ours = timm.create_model(student, ode_time='vectors', ode_averaged=True)
    ours.load_state_dict({
        name: tensor.zero_() if '.vectors.' in name else state[name.replace('.base.', '.')]
        for name, tensor in ours.state_dict().items()})
    save_pretrained(ours, out)


if __name__ == '__main__':
    main(*sys.argv[1:])
