"""timm: attention over t with timm.utils.AttentionExtract: the map of each evaluation is a graph node of its own.

Several shared blocks are a leaf of the graph; their maps are computed from the trajectory, as in the second half.
"""
import timm
import torch
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract

from timm_odevit.hooks import watch_blocks


def main():
    images = torch.randn(1, 3, 128, 128)    # yours, normalised for the model
    set_fused_attn(False)    # a fused kernel keeps no map
    try:
        model = timm.create_model('odevit_tiny_native_patch16_128.deit_tiny_cifar100', pretrained=True)
        maps = AttentionExtract(model, names=['*attn.softmax*'])(images)    # * at the end: softmax_1, softmax_2, ...
    finally:
        set_fused_attn(True)
    print(len(maps), 'maps of', list(next(iter(maps.values())).shape))

    model = timm.create_model('odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100', pretrained=True).eval()
    steps = list(model.blocks)
    with torch.no_grad(), watch_blocks([steps]) as seen:
        model(images)
        states = seen[0][0]    # before the first step and after each
        over_time = [model.blocks.shared.attention_map(step.t, x) for step, x in zip(steps, states, strict=False)]
    print(len(over_time), 'maps of', list(over_time[0].shape))
    return maps, over_time


if __name__ == '__main__':
    main()
