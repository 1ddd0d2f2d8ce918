import pytest
import torch
from PIL import Image
from timm.utils import random_seed

from timm_odevit.data import folder_loader, folder_loaders


@pytest.fixture
def folder(tmp_path):
    def build(root, classes=5, count=6):
        for label in range(classes):
            (root / f'class{label}').mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (20, 20), (40 * label, 9 * i, 0)).save(root / f'class{label}' / f'{i}.png')
        return root
    return build, tmp_path


def files(loader):
    return {name for name, _ in loader.dataset.reader.samples}


def test_holds_a_share_of_each_class_out(vit, folder):
    build, path = folder
    root = build(path / 'images')
    train, val = folder_loaders(root, vit(), held_out=0.3, batch_size=4, workers=0)
    assert len(files(val)) == 10 and len(files(train)) == 20 and not files(train) & files(val)
    assert sorted(label for _, label in val.dataset.reader.samples) == sorted(2 * list(range(5)))
    again = folder_loaders(root, vit(), held_out=0.3, batch_size=4, workers=0)[1]
    assert files(again) == files(val)
    images, labels = next(iter(train))
    assert images.shape == (4, 3, 16, 16) and labels.shape == (4,)
    assert len(folder_loader(root, vit(), batch_size=4, workers=0).dataset) == 30
    assert sum(len(labels) for _, labels in val) == 10


def test_uses_the_folders_own_split(vit, folder):
    build, path = folder
    build(path / 'images' / 'train')
    build(path / 'images' / 'val', count=2)
    train, val = folder_loaders(path / 'images', vit(), batch_size=4, workers=0)
    assert (len(files(train)), len(files(val))) == (30, 10)


@pytest.mark.parametrize('name', ['test', 'validation'])
def test_evaluates_on_any_usual_name(vit, folder, name):
    build, path = folder
    build(path / 'images' / 'training')
    build(path / 'images' / name, count=2)
    train, val = folder_loaders(path / 'images', vit(), batch_size=4, workers=0)
    assert (len(files(train)), len(files(val))) == (30, 10) and not files(train) & files(val)
    assert files(folder_loader(path / 'images', vit(), workers=0)) == files(val)


def test_train_alone_is_split_and_not_evaluated_on_whole(vit, folder):
    build, path = folder
    build(path / 'images' / 'train')
    train, val = folder_loaders(path / 'images', vit(), held_out=0.2, batch_size=4, workers=0, seed=3)
    assert len(files(train)) == 25 and len(files(val)) == 5 and not files(train) & files(val)
    again = folder_loader(path / 'images', vit(), held_out=0.2, workers=0, seed=3)
    assert files(again) == files(val)
    with pytest.raises(ValueError, match='has train/ and no val/'):
        folder_loader(path / 'images', vit())


def test_halves_that_do_not_fit(vit, folder):
    build, path = folder
    build(path / 'a' / 'val')
    with pytest.raises(ValueError, match='has val/ and no train/'):
        folder_loaders(path / 'a', vit())
    build(path / 'a' / 'train')
    (path / 'a' / 'val' / 'class4').rename(path / 'a' / 'val' / 'class9')
    with pytest.raises(ValueError, match='have other classes: class4, class9 is in one only'):
        folder_loaders(path / 'a', vit())
    for share in (0, 1, -1, 1.5):
        with pytest.raises(ValueError, match='share held out must lie between 0 and 1'):
            folder_loaders(build(path / f'b{share}'), vit(), held_out=share)


def test_one_channel(vit, folder):
    build, path = folder
    model = vit(in_chans=1, pretrained_cfg_overlay=dict(mean=(0.5,), std=(0.5,), input_size=(1, 16, 16)))
    images, _ = next(iter(folder_loader(build(path / 'images'), model, batch_size=4, workers=0)))
    assert images.shape == (4, 1, 16, 16)


@pytest.mark.parametrize('workers', [0, 1])
def test_an_epoch_depends_on_its_seed_alone(vit, folder, workers):
    build, path = folder
    root, found = build(path / 'images'), []
    for before in (0, 1):
        train, _ = folder_loaders(root, vit(), batch_size=4, workers=workers)
        for _ in range(before):
            list(train)
        random_seed(5)
        found.append([images for images, _ in train])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_refuses(vit, folder):
    build, path = folder
    with pytest.raises(ValueError, match="There is no folder '.*nowhere'"):
        folder_loader(path / 'nowhere', vit())
    (path / 'empty').mkdir()
    with pytest.raises(ValueError, match="There are no images in '.*empty'"):
        folder_loader(path / 'empty', vit())
    with pytest.raises(ValueError, match=r'has 3 classes \(sub-folders\), the model has 5'):
        folder_loader(build(path / 'three', classes=3), vit())
