"""10,000 images of CIFAR-100 without their labels, and a DeiT-tiny without its head, to be shrunk by its embeddings.

    python hub/runs/unlabelled.py cifar100.npz unlabelled.npz out/backbone --checkpoint deit_tiny.safetensors
    odevit shrink local-dir:out/backbone unlabelled.npz out/shrink_unlabelled --minutes 30 --threads 1
"""
import argparse

import numpy as np
import timm

from timm_odevit import save_pretrained

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('images')
    parser.add_argument('model')
    parser.add_argument('--checkpoint', required=True)
    args = parser.parse_args()
    images = np.load(args.data)['x_train']
    np.savez(args.images, x_train=images[np.random.default_rng(0).permutation(len(images))[:10_000]])
    model = timm.create_model('deit_tiny_patch16_224', pretrained=True, img_size=128, num_classes=0,
                              pretrained_cfg_overlay={'file': args.checkpoint})
    save_pretrained(model, args.model)
