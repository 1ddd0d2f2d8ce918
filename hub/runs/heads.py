"""Would a norm, a bias or a head of its own help a number of steps? Fitted to frozen class tokens; held-out top-1 %.

    python hub/runs/heads.py cifar100.npz odevit_tiny_native_patch16_128.deit_tiny_cifar100
"""
import copy
import sys

import timm
import torch
import torch.nn.functional as F

import timm_odevit  # noqa: F401
from timm_odevit import with_steps
from timm_odevit.data.arrays import array_loaders

FITTED, HELD = 12_000, 3_000  # images


def class_tokens(model, images):
    """The state at T [N, D], before the norm, of the class token."""
    found = []
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        for batch in images.split(100):
            found.append(model.blocks(model.norm_pre(model._pos_embed(model.patch_embed(batch))))[:, 0].float())
    return torch.cat(found)


def fitted(model, tokens, labels, kind):
    norm, head = copy.deepcopy(model.norm), copy.deepcopy(model.head)
    chosen = [*head.parameters()] if kind == 'head' else [*norm.parameters(), *([head.bias] if 'bias' in kind else [])]
    lr = 1e-3 if kind == 'head' else 3e-3
    optimizer = torch.optim.AdamW(chosen, lr)
    for epoch in range(40):
        optimizer.param_groups[0]['lr'] = lr * (1 - epoch / 40)
        for i in torch.randperm(len(tokens)).split(500):
            optimizer.zero_grad()
            F.cross_entropy(head(norm(tokens[i])), labels[i], label_smoothing=0.1).backward()
            optimizer.step()
    return torch.nn.Sequential(norm, head)


if __name__ == '__main__':
    torch.manual_seed(0)
    model = timm.create_model(sys.argv[2], pretrained=True).eval()
    train, val, _ = array_loaders(sys.argv[1], model)
    (x, y), (x_held, y_held) = (
        (of.prepare(of.images[:n]), of.labels[:n]) for of, n in ((train, FITTED), (val, HELD)))
    for steps in (1, 2, 3, 6):
        view = with_steps(model, steps)
        tokens, held = class_tokens(view, x), class_tokens(view, x_held)
        ends = {'as it is': torch.nn.Sequential(model.norm, model.head),
                **{kind: fitted(model, tokens, y, kind) for kind in ('norm', 'norm and bias', 'head')}}
        right = {kind: (end(held).argmax(1) == y_held).float().mean().item() for kind, end in ends.items()}
        print(steps, {kind: round(100 * share, 1) for kind, share in right.items()})
