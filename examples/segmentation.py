"""Segmentation with frozen features: a linear head on the states at three times, for a teacher and its students.

    python examples/segmentation.py out

Scenes are photos that scikit-learn ships, with handwritten digits on them; a pixel belongs to a digit or to the photo.
Each model's features are computed once, and a linear layer learns to classify pixels from them, in less than a minute
per model on one core. Prints the intersection over union of the digits on other scenes, with other digits and the other
halves of the photos, and draws out/segmentation.png.
"""
import sys
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images

import timm_odevit  # noqa: F401  (registers the models)

TEACHER = 'deit_tiny_patch16_128.cifar100'
STUDENTS = ('odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100',
            'odevit_tiny_native_patch16_128.deit_tiny_cifar100')
TIMES = (0.25, 0.5, 1.0)
SIZE, DIGIT, DIGITS = 128, 48, 3  # pixels of a scene and of a digit; digits per scene
TRAIN, TEST = 400, 100
UPDATES, BATCH, CELLS = 400, 16, 4  # a patch has 4 x 4 predictions, bilinear between them


def scenes(count, train, seed):
    """Images [N, 3, S, S] in 0 ... 1, and which pixels belong to a digit [N, S, S]."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    chosen = np.arange(len(digits.target)) < 1400
    chosen = np.flatnonzero(chosen if train else ~chosen)
    photos = [torch.tensor(photo).permute(2, 0, 1) / 255 for photo in load_sample_images().images]
    images, masks = torch.empty(count, 3, SIZE, SIZE), torch.zeros(count, SIZE, SIZE)
    for image, mask in zip(images, masks, strict=True):
        photo = photos[rng.integers(len(photos))]
        half = photo.shape[2] // 2  # one half of each photo to train on, the other to test on
        top, left = rng.integers(photo.shape[1] - SIZE), rng.integers(half - SIZE)
        left += 0 if train else half
        image.copy_(photo[:, top:top + SIZE, left:left + SIZE])
        for index in rng.choice(chosen, DIGITS):
            ink = torch.tensor(digits.images[index] / 16, dtype=torch.float32)[None, None]
            ink = F.interpolate(ink, size=DIGIT, mode='bilinear')[0, 0]
            y, x = rng.integers(SIZE - DIGIT, size=2)
            where = image[:, y:y + DIGIT, x:x + DIGIT]
            colour = torch.tensor(rng.choice([0., 1.]) + rng.uniform(-.2, .2, 3), dtype=torch.float32).clamp(0, 1)
            where += ink * (colour[:, None, None] - where)
            mask[y:y + DIGIT, x:x + DIGIT][ink > 0.4] = 1.
    return images, masks


@torch.no_grad()
def features(name, images):
    """The states at TIMES, with the final norm, as maps [N, 3 D, S / 16, S / 16]."""
    layers = len(timm.create_model(name).blocks)  # or steps
    model = timm.create_model(name, pretrained=True, img_size=SIZE, features_only=True,
                              out_indices=[round(layers * t) - 1 for t in TIMES]).eval()
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ('mean', 'std'))
    maps = [torch.cat(model((batch - mean) / std), dim=1) for batch in images.split(BATCH)]
    return torch.cat(maps)


def learn(maps, masks):
    """A linear layer from the features of a patch to its pixels."""
    torch.manual_seed(0)
    mean, std = maps.mean(dim=(0, 2, 3), keepdim=True), maps.std(dim=(0, 2, 3), keepdim=True)
    head = torch.nn.Conv2d(maps.shape[1], CELLS ** 2, 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=UPDATES)

    def predict(x):
        cells = F.pixel_shuffle(head((x - mean) / std), CELLS)
        return F.interpolate(cells, size=SIZE, mode='bilinear')[:, 0]
    for _ in range(UPDATES):
        index = torch.randint(len(maps), (BATCH,))
        loss = F.binary_cross_entropy_with_logits(predict(maps[index]), masks[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return predict


@torch.no_grad()
def answers(predict, maps):
    return torch.cat([predict(batch) > 0 for batch in maps.split(BATCH)])


def iou(found, truth):
    """Intersection over union of all scenes' digits, in percent."""
    truth = truth.bool()
    return 100 * (found & truth).sum().item() / (found | truth).sum().item()


def main(out='.', names=(TEACHER, *STUDENTS)):
    train, test = scenes(TRAIN, True, seed=0), scenes(TEST, False, seed=1)
    shown, scores = {}, {}
    for name in names:
        predict = learn(features(name, train[0]), train[1])
        shown[name] = answers(predict, features(name, test[0]))
        scores[name] = iou(shown[name], test[1])
        print(f'{name}: IoU {scores[name]:.1f} %', flush=True)
    draw(Path(out) / 'segmentation.png', test, shown, scores)
    return scores


def draw(path, test, shown, scores):
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {'scene': test[0].permute(0, 2, 3, 1), 'truth': test[1]}
    for name, found in shown.items():
        kind = 'teacher' if name == TEACHER else 'student, three blocks' if '_three_' in name else 'student, one block'
        columns[f'{kind}\nIoU {scores[name]:.1f} %'] = found
    figure, axes = plt.subplots(4, len(columns), figsize=(2 * len(columns), 8.4), layout='constrained')
    for row in range(4):
        for axis, (title, found) in zip(axes[row], columns.items(), strict=True):
            axis.imshow(found[row], cmap='gray', interpolation='nearest')
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == '__main__':
    main(*sys.argv[1:2])
