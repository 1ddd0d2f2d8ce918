"""A student without gradient steps: each matrix by reduced-rank regression, layer after layer."""
import copy
import time

import torch
import torch.nn.functional as F

WEIGHT_OF_CLASS_TOKEN = 4.
DECOMPOSITIONS = 6.  # seconds


def merged_copy(student, teacher):
    """An ordinary ViT with the weights that each step of a student uses."""
    plain = copy.deepcopy(teacher)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if not name.startswith('blocks.'):
                p.copy_(student.get_parameter(name))
        for layer, block in enumerate(plain.blocks):
            for name, value in student.blocks.shared.at(float(layer)).items():
                block.get_parameter(name.removeprefix('block.')).copy_(value)
    return plain.requires_grad_(True)


@torch.no_grad()
def regress(student, teacher, loader, seconds):
    """Fit a low-rank student in about `seconds` of CPU time; returns how many images were used.

    Each matrix is fitted on the inputs that the student so far gives it. The targets of proj and fc2 include the error
    that has accumulated so far; biases are refitted.
    """
    started = time.process_time()
    vit = merged_copy(student, teacher)
    probe = time.process_time()
    _fit(student.blocks.shared, vit, teacher, _first(loader, 128), solve=False)
    per_image = (time.process_time() - probe) / 128
    left = seconds - (time.process_time() - started) - DECOMPOSITIONS
    count = max(256, int(left / per_image))
    _fit(student.blocks.shared, vit, teacher, _first(loader, count), solve=True)
    return count


def _first(loader, images):
    batches = []
    while sum(map(len, batches)) < images:
        for x, _ in loader:
            batches.append(x)
            if sum(map(len, batches)) >= images:
                break
    return batches


def _embed(vit, x):
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))


def _mix(attn, qkv):
    """What attention makes of queries, keys and values, before its last projection."""
    B, N, _ = qkv.shape
    q, k, v = qkv.reshape(B, N, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, -1)


def _fit(field, vit, teacher, batches, solve):
    ours, theirs = [_embed(vit, x) for x in batches], [_embed(teacher, x) for x in batches]
    for layer, (mine, block) in enumerate(zip(vit.blocks, teacher.blocks, strict=True)):
        def fit(name, inputs, targets, layer=layer, mine=mine):
            if solve:
                _fit_matrix(field, mine.get_submodule(name), name, layer, inputs, targets)
            else:
                for x, y in zip(inputs, targets, strict=True):
                    _moments(x, y)
        normed = [mine.norm1(x) for x in ours]
        targets = [block.attn.qkv(block.norm1(x)) for x in theirs]
        fit('attn.qkv', normed, targets)
        mixed = [_mix(mine.attn, mine.attn.qkv(x)) for x in normed]
        after = [x + block.attn.proj(_mix(block.attn, y)) for x, y in zip(theirs, targets, strict=True)]
        fit('attn.proj', mixed, [y - x for x, y in zip(ours, after, strict=True)])
        ours = [x + mine.attn.proj(m) for x, m in zip(ours, mixed, strict=True)]
        normed = [mine.norm2(x) for x in ours]
        targets = [block.mlp.fc1(block.norm2(x)) for x in after]
        fit('mlp.fc1', normed, targets)
        hidden = [mine.mlp.act(mine.mlp.fc1(x)) for x in normed]
        theirs = [x + block.mlp.fc2(block.mlp.act(y)) for x, y in zip(after, targets, strict=True)]
        fit('mlp.fc2', hidden, [y - x for x, y in zip(ours, theirs, strict=True)])
        ours = [x + mine.mlp.fc2(h) for x, h in zip(ours, hidden, strict=True)]


def _moments(x, y):
    """Weighted second moments of (x, 1) with itself and with y, over images and tokens."""
    weight = torch.ones(x.shape[1], 1)
    weight[0] = WEIGHT_OF_CLASS_TOKEN
    one = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    weighted = (one * weight).flatten(0, 1)
    return weighted.T @ one.flatten(0, 1), weighted.T @ y.flatten(0, 1)


def _fit_matrix(field, linear, name, layer, inputs, targets):
    """Reduced-rank regression of what the shared matrix leaves, with a free bias."""
    key = f'block.{name}.weight'
    shared = field.base.get_parameter(key)
    found = [_moments(x, y - x @ shared.T) for x, y in zip(inputs, targets, strict=True)]
    xx, xy = (sum(parts) for parts in zip(*found, strict=True))
    n = xx[-1, -1]
    mean_x, mean_y = xx[:-1, -1] / n, xy[-1] / n
    values, vectors = torch.linalg.eigh(xx[:-1, :-1] / n - mean_x[:, None] * mean_x)
    values = values.clamp_min(1e-4 * values.mean())
    whitened = (vectors / values.sqrt()).T @ (xy[:-1] / n - mean_x[:, None] * mean_y)
    u, s, v = torch.linalg.svd(whitened, full_matrices=False)
    rank = field.up[key.replace('.', '-')].shape[-1]
    down = ((vectors / values.sqrt()) @ u[:, :rank] * s[:rank].sqrt()).T
    up = v[:rank].T * s[:rank].sqrt()
    bias = mean_y - (up @ down) @ mean_x
    field.down[key.replace('.', '-')][layer], field.up[key.replace('.', '-')][layer] = down, up
    of_bias = f'block.{name}.bias'
    field.vectors[of_bias.replace('.', '-')][layer] = bias - field.base.get_parameter(of_bias)
    linear.weight.copy_(shared + up @ down)
    linear.bias.copy_(bias)
