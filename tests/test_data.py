import pytest
from PIL import Image

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


def test_refuses(vit, folder):
    build, path = folder
    with pytest.raises(ValueError, match="There is no folder '.*nowhere'"):
        folder_loader(path / 'nowhere', vit())
    (path / 'empty').mkdir()
    with pytest.raises(ValueError, match="There are no images in '.*empty'"):
        folder_loader(path / 'empty', vit())
    with pytest.raises(ValueError, match=r'has 3 classes \(sub-folders\), the model has 5'):
        folder_loader(build(path / 'three', classes=3), vit())
