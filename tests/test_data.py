import io
import os
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import timm
import torch
from conftest import TINY
from PIL import Image
from timm.data import resolve_input_data_config
from timm.utils import random_seed

from timm_odevit import evaluate, save_pretrained
from timm_odevit.data.arrays import array_loaders
from timm_odevit.data.batches import MixupLoader, set_epoch
from timm_odevit.data.config import DataConfig
from timm_odevit.data.folders import folder_loader, folder_loaders, image_loaders
from timm_odevit.data.pictures import open_image, read_image
from timm_odevit.data.preprocessing import warn_of_other_classes
from timm_odevit.data.read import classes_of, pictures, read_data


@pytest.fixture
def folder(tmp_path):
    def build(root, classes=5, count=6):
        for label in range(classes):
            (root / f'class{label}').mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (20, 20), (40 * label, 9 * i, 0)).save(root / f'class{label}' / f'{i}.png')
        return root
    return build, tmp_path


@pytest.mark.parametrize('embed', [False, True])
def test_classes_that_a_model_knows_by_name_get_its_labels(vit, folder, embed):
    build, path = folder
    build(path / 'images')
    model = vit()
    names = [f'class{i}' for i in (3, 1, 4, 0, 2)]
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': names}
    loader = folder_loader(path / 'images', model, workers=0, any_classes=embed)
    seen = {(Path(file).parent.name, label) for file, label in loader.dataset.reader.samples}
    assert seen == {(name, i) for i, name in enumerate(sorted(names) if embed else names)}
    assert [loader.dataset.reader.class_to_idx[name] for name in (sorted(names) if embed else names)] == list(range(5))
    x, y = np.zeros((10, 16, 16, 3), np.uint8), np.arange(10) % 5
    np.savez(path / 'd.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=sorted(names))
    test = array_loaders(path / 'd.npz', model, any_classes=embed)[2]
    assert [test.label_names[label] for label in test.labels] == [f'class{i}' for i in y]
    assert test.label_names == (sorted(names) if embed else names)
    if embed:  # as many labels as the model has classes, of more names
        np.savez(path / 'e.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=[*names, 'other'])
        assert array_loaders(path / 'e.npz', model, any_classes=True)[2].labels.tolist() == y.tolist()


def test_other_classes_than_those_of_the_model_are_said(vit):
    model = vit()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warn_of_other_classes(model, list('abcde'), 'images')  # it knows no names
        model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': list('abcde')}
        warn_of_other_classes(model, list('abcde'), 'images')
        warn_of_other_classes(model, None, 'images')
    with pytest.warns(RuntimeWarning, match="of 'images' are not those of the model, .* 'x' counts as 'd'"):
        warn_of_other_classes(model, list('abcxe'), 'images')


def files(loader):
    return {name for name, _ in loader.dataset.reader.samples}


def all_files(loaders):
    return set().union(*map(files, loaders))


@pytest.mark.parametrize('cores, workers', [(1, 0), (2, 1), (64, 2)])
def test_a_core_is_left_to_the_model(vit, folder, monkeypatch, cores, workers):
    build, path = folder
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(cores)), raising=False)
    assert [part.num_workers for part in folder_loaders(build(path / 'images'), vit())] == [workers] * 2


def test_a_limit_takes_images_of_all_classes_in_turn(vit, folder):
    build, path = folder
    parts = folder_loaders(build(path / 'images'), vit(), held_out=0.3, workers=0, limit=7)
    assert [sorted(label for _, label in part.dataset.reader.samples) for part in parts] == [[0, 0, 1, 1, 2, 3, 4]] * 2
    assert not files(parts[0]) & files(parts[1])


@pytest.mark.parametrize('layout', ['images', 'images/train'])
def test_a_share_of_each_class_is_held_out_whatever_the_labels_of_the_model(vit, folder, layout):
    build, path = folder
    build(path / layout)
    found = []
    for names, embed in ((None, False), ([f'class{i}' for i in (3, 1, 4, 0, 2)], False), ([f'class{i}' for i in (3, 1, 4, 0, 2)], True)):
        model = vit()
        model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': names}
        options = dict(held_out=0.3, batch_size=4, workers=0, seed=3, any_classes=embed)
        train, val = folder_loaders(path / 'images', model, **options)
        found.append((files(train), files(val)))
        assert files(folder_loader(path / 'images', model, **options)) == files(val)
    assert found[0] == found[1] == found[2] and [len(part) for part in found[0]] == [20, 10] and not found[0][0] & found[0][1]
    assert sorted(label for _, label in val.dataset.reader.samples) == sorted(2 * list(range(5)))
    images, labels = next(iter(train))
    assert images.shape == (4, 3, 16, 16) and labels.shape == (4,) and sum(len(labels) for _, labels in val) == 10
    same = folder_loaders(path / 'images', vit(), held_out=0.3, workers=0)  # by other commands, without labels
    assert [files(part) for part in image_loaders(path / 'images', vit(), held_out=0.3, workers=0)] == [files(part) for part in same]


def test_a_test_folder_is_for_the_final_number_only(vit, folder):
    build, path = folder
    build(path / 'images' / 'training')
    build(path / 'images' / 'test', count=2)
    train, val = folder_loaders(path / 'images', vit(), workers=0)
    assert len(files(val)) == 5 and not any('/test/' in str(f) for f in files(train) | files(val))
    assert len(files(folder_loader(path / 'images', vit(), workers=0))) == 10
    assert files(folder_loader(path / 'images', vit(), workers=0, held_out=0.1)) == files(val)
    build(path / 'images' / 'validation', count=2)
    assert files(folder_loaders(path / 'images', vit(), workers=0)[1]) == files(folder_loader(path / 'images', vit(), workers=0))
    assert files(folder_loader(path / 'images', vit(), workers=0)).pop().split('/')[-3] == 'validation'


def test_halves_that_do_not_fit(vit, folder):
    build, path = folder
    build(path / 'a' / 'val')
    with pytest.raises(ValueError, match='has val/ but no train/'):
        folder_loaders(path / 'a', vit())
    build(path / 'a' / 'train')
    (path / 'a' / 'val' / 'class4').rename(path / 'a' / 'val' / 'class9')
    with pytest.raises(ValueError, match='have different classes. Only one of them has class4, class9'):
        folder_loaders(path / 'a', vit())
    shutil.rmtree(path / 'a' / 'val' / 'class9')
    with pytest.raises(ValueError, match='have different classes. Only one of them has class4'):
        folder_loaders(path / 'a', vit())
    for share in (1, -1, 1.5):
        with pytest.raises(ValueError, match='share held out must lie between 0 and 1'):
            folder_loaders(build(path / f'b{share}'), vit(), held_out=share)


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (20, 20)).save(path)


CLASSES = ['a', 'b', 'c', 'd']


@pytest.mark.parametrize('name', ['train', 'training', 'test', 'val', 'valid', 'Eval'])
def test_a_class_may_be_called_as_a_part_is(vit, tmp_path, name):
    for label in (*CLASSES, name):
        for i in range(4):
            picture(tmp_path / label / f'{i}.png')
    train, val = folder_loaders(tmp_path, vit(), workers=0, held_out=0.25)
    assert (len(files(train)), len(files(val))) == (15, 5) and any(f'/{name}/' in str(f) for f in files(val))
    assert files(folder_loader(tmp_path, vit(), workers=0, held_out=0.25)) == files(val)
    assert all_files(image_loaders(tmp_path, vit(), workers=0)) == files(train) | files(val)
    assert files(folder_loader(tmp_path, vit(), workers=0)) == files(train) | files(val)


LAYOUTS = {  # images, and what is trained on and evaluated on: a part, or what the message holds
    'train and test': (['train/C/0', 'train/C/1', 'test/C/0'], 'train', 'test'),
    'any case, and others': (['Train/C/0', 'VAL/C/0', 'devkit/0'], 'Train', 'VAL'),
    'train alone': (['train/C/0', 'train/C/1'], 'train', 'has train/ but no val/ or test/'),
    'val alone': (['val/C/0'], 'has val/ but no train/', 'val'),
    'test alone': (['test/C/0'], 'has test/ but no train/', 'test'),
    'test without classes': (['train/C/0', 'train/C/1', 'test/0'], 'train', 'images that are in no class'),
    'val without classes': (['train/C/0', 'val/0'], 'images that are in no class', 'images that are in no class'),
    'val with an image too many': (['train/C/0', 'val/C/0', 'val/0'], 'such as 0.png', 'such as 0.png'),
    'train of folders beside a class': (['apple/0', 'train/C/0'], 'has train/, which holds folders, next to apple/',
                                        "give '{root}/train'; if it is a class"),
    'val of folders beside classes': (['train/0', 'apple/0', 'val/C/0'], 'has val/, which holds folders', "give '{root}/val'"),
    'parts or classes': (['train/0', 'val/0'], 'has train/ and val/, which hold images', "such as '{root}/train'; if they are classes"),
    'two names of one part': (['train/C/0', 'training/C/0'], 'has train/ and training/, two names for the same part', 'two names'),
    'an image beside the classes': (['C/0', '0'], 'images that are in no class', 'such as 0.png'),
    'no class': (['0', '1'], 'images that are in no class', 'images that are in no class'),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('stray', [False, True])
def test_layouts_of_folders(vit, tmp_path, layout, stray):
    images, *expected = LAYOUTS[layout]
    for path in images:
        for label in (*CLASSES, 'e') if 'C' in path else ['']:
            picture(tmp_path / f"{path.replace('C', label)}.png")
    if stray:  # none of this is of any account
        for place in [p for p in tmp_path.rglob('*') if p.is_dir()] + [tmp_path]:
            (place / 'README.txt').write_text('stray')
            (place / '.hidden.png').write_text('stray')
            (place / '.cache').mkdir()
            picture(place / '.cache' / 'f' / '0.png')
        (tmp_path / 'empty').mkdir()
    makes = (lambda: folder_loaders(tmp_path, vit(), workers=0, held_out=0.5)[0], lambda: folder_loader(tmp_path, vit(), workers=0))
    for make, found in zip(makes, expected):
        if (tmp_path / found).is_dir():
            loader = make()
            assert {str(f.relative_to(tmp_path)).split('/')[0] for f in map(type(tmp_path), files(loader))} == {found}
            assert loader.dataset.reader.class_to_idx == {label: i for i, label in enumerate((*CLASSES, 'e'))}
        else:
            with pytest.raises(ValueError) as e:
                make()
            assert found.format(root=tmp_path) in str(e.value) and '\n' not in str(e.value)
    ambiguous = 'parts or classes' in layout or 'beside a class' in layout or 'beside classes' in layout or 'two names' in layout
    if ambiguous:
        with pytest.raises(ValueError, match='holds? (images but no )?folders|two names'):
            image_loaders(tmp_path, vit())
    else:
        found = {str(f)[len(str(tmp_path)) + 1:].split('/')[0].lower() for f in all_files(image_loaders(tmp_path, vit(), workers=0))}
        assert (found == {'train'}) is any(path.lower().startswith('train') for path in images)


def test_classes_of_one_image_stay_in_training(vit, folder):
    build, path = folder
    root = build(path / 'images', count=1)
    for make in (folder_loaders, folder_loader):
        with pytest.raises(ValueError, match="Each class of '.*images' has one image, so none can be held out. Give more"):
            make(root, vit(), held_out=0.1, workers=0)
    picture(root / 'class2' / '1.png')
    train, val = folder_loaders(root, vit(), held_out=0.9, workers=0)
    assert (len(files(train)), len(files(val))) == (5, 1) and 'class2' in files(val).pop()
    assert {label for _, label in train.dataset.reader.samples} == set(range(5))
    assert files(folder_loader(root, vit(), held_out=0.9, workers=0)) == files(val)
    assert val.dataset.reader.class_to_idx == train.dataset.reader.class_to_idx


@pytest.mark.parametrize('channels', [1, 3, 4])
@pytest.mark.parametrize('overlay', [{}, dict(mean=(0.1, 0.2, 0.6), std=(0.3, 0.2, 0.1)), dict(mean=(0.4,), std=(0.3,))],
                         ids=['as timm makes it', 'three values', 'one value'])
def test_channels(vit, folder, tmp_path, channels, overlay):
    build, path = folder
    model = vit(in_chans=channels, pretrained_cfg_overlay=overlay)
    root = build(path / 'images')
    Image.new('RGB', (16, 16), (0, 45, 90)).save(root / 'class0' / '0.png')
    images, _ = next(iter(folder_loader(root, model, batch_size=4, workers=0)))
    mean, std = (resolve_input_data_config(model)[key] for key in ('mean', 'std'))
    assert images.shape == (4, channels, 16, 16) and model(images).shape == (4, 5) and len(mean) == len(std) == channels
    if overlay:
        own = len(overlay['mean']) == channels
        assert mean == pytest.approx(overlay['mean'] if own else [sum(overlay['mean']) / len(overlay['mean'])] * channels)
        assert std == pytest.approx(overlay['std'] if own else [sum(overlay['std']) / len(overlay['std'])] * channels)
    pixels = {1: [37], 3: [0, 45, 90], 4: [0, 45, 90, 255]}[channels]  # grey by Pillow's weights; opaque
    expected = (torch.tensor(pixels) / 255 - torch.tensor(mean)) / torch.tensor(std)
    torch.testing.assert_close(images[0, :, 8, 8], expected, atol=0.02, rtol=0)
    train, _ = folder_loaders(root, model, batch_size=4, workers=0)
    assert next(iter(train))[0].shape == (4, channels, 16, 16)
    x = np.array(pixels, np.uint8) * np.ones((10, 16, 16, 1), np.uint8)
    np.savez(tmp_path / 'a.npz', x_train=x, y_train=np.arange(10) % 5, x_test=x, y_test=np.arange(10) % 5)
    images, _ = next(iter(array_loaders(tmp_path / 'a.npz', model)[2]))
    torch.testing.assert_close(images, expected.view(1, -1, 1, 1).expand(10, channels, 16, 16))


def test_channels_that_files_of_images_cannot_have(vit, folder):
    build, path = folder
    root = build(path / 'images')
    with pytest.raises(ValueError, match='1, 3 or 4 channels.*the model takes 2. Use an .npz'):
        folder_loader(root, vit(in_chans=2))
    with pytest.raises(ValueError, match='auto_augment cannot handle an alpha channel'):
        folder_loaders(root, vit(in_chans=4), auto_augment='rand-m9-mstd0.5-inc1', workers=0)


def test_grey_arrays_need_no_axis_of_channels(arrays, vit, tmp_path):
    data = dict(np.load(arrays))
    flat = {key: data[key][..., 0] for key in ('x_train', 'x_test')}
    np.savez(tmp_path / 'flat.npz', **{**data, **flat})
    np.savez(tmp_path / 'one.npz', **{**data, **{key: x[..., None] for key, x in flat.items()}})
    model = vit(in_chans=1)
    for a, b in zip(array_loaders(tmp_path / 'flat.npz', model), array_loaders(tmp_path / 'one.npz', model)):
        assert a.images.shape[1:] == (1, 5, 5) and torch.equal(a.images, b.images)
    images, _ = next(iter(array_loaders(tmp_path / 'flat.npz', model, batch_size=8, reprob=1.)[0]))
    assert images.shape == (8, 1, 16, 16)
    with pytest.raises(ValueError, match=r'got uint8 \[100, 5, 5, 1\] and 100 labels. Give such images, or create the model with in_chans=1'):
        array_loaders(tmp_path / 'flat.npz', vit())


def test_classes_that_sort_alike_have_an_order(tmp_path):
    for name in ('Cat', 'cat', '1', '01', 'CAT', '001'):
        picture(tmp_path / name / 'A1.png')
        picture(tmp_path / name / 'a01.png')
    code = ("import sys\nfrom timm_odevit.data.folders import folder_classes, image_loaders\nimport timm\n"
            "model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, depth=1, embed_dim=8, num_heads=2)\n"
            f"print(folder_classes({str(tmp_path)!r}), [s[0] for s in image_loaders({str(tmp_path)!r}, model)[1].dataset.reader.samples])")
    found = {subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': str(seed)}, check=True,
                            capture_output=True, text=True).stdout for seed in range(2)}
    assert len(found) == 1 and "['001', '01', '1', 'CAT', 'Cat', 'cat']" in found.pop()


@pytest.mark.parametrize('dtype', [np.uint16, '>u2'])
def test_16_bits_are_scaled_and_pixels_of_unknown_range_refused(vit, tmp_path, dtype):
    deep = np.arange(0, 65536, 164, dtype=dtype)[:400].reshape(20, 20)
    Image.fromarray(deep).save(tmp_path / 'deep.tiff')
    Image.fromarray(deep.astype(np.uint16)).save(tmp_path / 'deep.png')
    for name in ('deep.tiff', 'deep.png'):
        assert np.abs(np.asarray(read_image(tmp_path / name, 'RGB'))[..., 0] - deep / 257.).max() <= 0.5
    for kind in (np.int32, np.float32):
        Image.fromarray(deep.astype(kind)).save(tmp_path / 'x.tiff')
        with pytest.raises(ValueError, match="x.tiff' cannot be read as an image: pixels of mode '[IF]' have no known range"):
            open_image(tmp_path / 'x.tiff', vit())


def test_images_are_turned_upright(vit, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(np.arange(200, dtype=np.uint8).reshape(10, 20)).save(tmp_path / 'x.png', exif=exif)
    assert read_image(tmp_path / 'x.png', 'L').size == (10, 20)


def test_files_that_are_no_images_are_counted_and_left_out(vit, folder):
    build, path = folder
    root = build(path / 'images')
    image = io.BytesIO()
    Image.new('RGB', (64, 64), (9, 99, 200)).save(image, 'avif')
    (root / 'class1' / '0.png').write_bytes(image.getvalue()[:-20])  # Pillow raises SyntaxError
    (root / 'class1' / '1.png').write_bytes(b'')
    for file in (root / 'class4').iterdir():
        file.write_bytes(b'no image')
    with pytest.raises(ValueError, match=r"0.png' cannot be read as an image: Failed to decode"):
        open_image(root / 'class1' / '0.png', vit())
    for workers in (0, 1):
        loader = folder_loader(root, vit(), batch_size=4, workers=workers)
        with pytest.warns(RuntimeWarning, match=r"8 of 30 images cannot be read and are left out, such as '.*class1/0.png'"):
            labels = torch.cat([labels for _, labels in loader])
        assert labels.bincount(minlength=5).tolist() == [6, 4, 6, 6, 0]
    with pytest.warns(RuntimeWarning, match='8 of 30'):
        assert evaluate(vit(), folder_loader(root, vit(), batch_size=4, workers=0)).results[0].images == 22
    train, val = folder_loaders(root, vit(), held_out=0.2, batch_size=4, workers=0)
    assert all(label >= 0 for _, labels in train for label in labels)  # another image takes the place


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
    with pytest.raises(ValueError, match=r'has 3 classes \(sub-folders\), but the model has 5'):
        folder_loader(build(path / 'three', classes=3), vit())


# --- arrays

@pytest.fixture
def arrays(tmp_path):
    x = np.arange(1, 26, dtype=np.uint8).reshape(1, 5, 5, 1).repeat(100, 0).repeat(3, 3)
    np.savez(tmp_path / 'data.npz', x_train=x, y_train=np.arange(100) % 5, x_test=x[:10], y_test=np.arange(10) % 5)
    return tmp_path / 'data.npz'


def test_arrays_are_split_shuffled_and_augmented(arrays, vit):
    train, val, test = array_loaders(arrays, vit(), batch_size=8, padding=1)
    assert (len(train), len(val), len(test)) == (11, 2, 2)
    assert sum(len(y) for _, y in val) == 10 and sum(len(y) for _, y in test) == 10
    train.set_epoch(0)
    first = [i.tolist() for i in train.indices()]
    assert first == [i.tolist() for i in train.indices()] and len({i for b in first for i in b}) == 88
    train.set_epoch(1)
    assert first != [i.tolist() for i in train.indices()]
    images, labels = next(iter(train))
    assert images.shape == (8, 3, 16, 16) and labels.dtype == torch.int64
    plain = val.prepare(val.images)
    assert torch.equal(torch.cat([x for x, _ in val]), plain)
    raw = train.images[:1].repeat(300, 1, 1, 1)
    found = train.augment(raw)
    variants = {tuple(image[0].flatten().tolist()) for image in found}
    assert found.dtype == torch.uint8 and len(variants) == 18 and tuple(range(1, 26)) in variants  # 3 x 3 shifts, mirrored or not
    train.augment = partial(train.augment, reprob=1.)
    erased = train.augment(raw)
    assert (erased[:, 0] == 0).sum() > (found[:, 0] == 0).sum() and (erased[:, 0] == erased[:, 2]).all()


def test_processes_share_an_order_and_no_image(arrays, vit, monkeypatch):
    train = array_loaders(arrays, vit(), batch_size=8)[0]
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr('timm_odevit.data.arrays.rank_and_world', lambda rank=rank: (rank, 2))
        parts.append([i.tolist() for i in train.indices()])
    assert len(parts[0]) == len(train) == 5
    monkeypatch.setattr('timm_odevit.data.arrays.rank_and_world', lambda: (0, 1))
    train.batch_size = 16
    for one, a, b in zip(train.indices(), *parts):
        assert sorted(one.tolist()) == sorted(a + b)


@pytest.mark.parametrize('settings, total', [(dict(mixup=0.5), 1.), (dict(cutmix=1.), 1.), (dict(smoothing=0.1), 1.)])
def test_mixed_labels_are_probabilities(arrays, vit, settings, total):
    train = array_loaders(arrays, vit(), batch_size=8)[0]
    mixed = MixupLoader(train, 5, **settings)
    images, labels = next(iter(mixed))
    assert images.shape == (8, 3, 16, 16) and len(mixed) == len(train)
    torch.testing.assert_close(labels.sum(1), torch.full((8,), total))
    if 'smoothing' in settings:
        assert labels.max().item() == pytest.approx(0.92)
    with pytest.raises(ValueError, match='batch_size must be even; got 7'):
        MixupLoader(array_loaders(arrays, vit(), batch_size=7)[0], 5, mixup=1.)


def test_arrays_that_do_not_fit(arrays, vit, tmp_path):
    with pytest.raises(ValueError, match='has label 4, but the model has 3 classes'):
        array_loaders(arrays, vit(num_classes=3))
    with pytest.raises(ValueError, match=r'must hold uint8 images \[N, S, S, 1\] with a label each; got uint8 \[100, 5, 5, 3\]'):
        array_loaders(arrays, vit(in_chans=1))
    x, y = np.zeros((4, 5, 5, 3), np.uint8), np.arange(4)
    np.savez(tmp_path / 'bad.npz', x_train=x.transpose(0, 3, 1, 2), y_train=y, x_test=x, y_test=y)  # channels first
    with pytest.raises(ValueError, match=r'got uint8 \[4, 3, 5, 5\] and 4 labels.$'):
        array_loaders(tmp_path / 'bad.npz', vit())
    for labels, found in ((y[:, None], r'int64 \[4, 1\]'), (y - 1, r'int64 \[4\]'), (y / 2, r'float64 \[4\]')):
        np.savez(tmp_path / 'bad.npz', x_train=x, y_train=labels, x_test=x, y_test=y)
        with pytest.raises(ValueError, match=f'must hold labels .*got {found}'):
            array_loaders(tmp_path / 'bad.npz', vit())
    np.savez(tmp_path / 'good.npz', x_train=x, y_train=y.astype('>i8') // 2, x_test=x, y_test=y.astype('>i2'))
    assert array_loaders(tmp_path / 'good.npz', vit())[2].labels.tolist() == [0, 1, 2, 3]
    np.savez(tmp_path / 'bad.npz', x_train=x, y_train=y[0], x_test=x, y_test=y)
    with pytest.raises(ValueError, match=r'must hold labels .*got int64 \[\]'):
        array_loaders(tmp_path / 'bad.npz', vit())
    np.savez(tmp_path / 'bad.npz', x_train=x[:1], y_train=y[:1], x_test=x, y_test=y)
    with pytest.raises(ValueError, match='has one image to train on, so none can be held out'):
        array_loaders(tmp_path / 'bad.npz', vit())


def test_arrays_that_are_sorted_by_class_are_a_warning(vit, tmp_path):
    x, y = np.zeros((20, 5, 5, 3), np.uint8), np.arange(20) // 4
    np.savez(tmp_path / 'sorted.npz', x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.warns(UserWarning, match='classes only among its last images, which are held out, as if it were sorted'):
        array_loaders(tmp_path / 'sorted.npz', vit(), held_out=0.2)


class Pickled:
    def __reduce__(self):
        return open, ('ran', 'w')


def npy(header, data=b''):
    """A file of one array, whatever its header says."""
    text = header.encode('latin1') + b'\n'
    return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text + data


def saved(array, **kwargs):
    file = io.BytesIO()
    np.save(file, array, **kwargs)
    return file.getvalue()


def header(shape, descr="'|u1'"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


IMAGES = saved(np.zeros((4, 5, 5, 3), np.uint8))
STRANGE = {
    '10 ** 15 images': (npy(header((10 ** 15, 5, 5, 3)), bytes(300)), r'x_train.npy says .* uint8 \[1000000000000000, 5, 5, 3\], but it has 300'),
    'a product beyond 64 bits': (npy(header((2 ** 40, 2 ** 40, 5, 3))), 'x_train.npy says that it holds'),
    'a negative shape': (npy(header((-4, -5, 5, 3)), bytes(300)), r'says that it holds uint8 \[-4, -5, 5, 3\]'),
    'too little data': (IMAGES[:-1], 'it has 299 bytes'),
    'no images': (saved(np.zeros((4, 0, 5, 3), np.uint8)), r'must hold uint8 images .* \[4, 0, 5, 3\]'),
    'a shape that is computed': (npy(header("(open('ran', 'w'),)")), 'cannot be read as .npz'),
    'a deep header': (npy('-' * 9000 + '1'), 'cannot be read as .npz'),
    'a long header': (npy(header((4,)) + ' ' * 20000), 'cannot be read as .npz: Header info length'),
    'a header cut off': (IMAGES[:40], 'cannot be read as .npz'),
    'another version': (IMAGES[:6] + b'\x09' + IMAGES[7:], 'cannot be read as .npz'),
    'objects': (saved(np.array([Pickled()] * 4, dtype=object), allow_pickle=True), 'x_train.npy holds Python objects, which are not read'),
    'objects in a record': (saved(np.array([(1, Pickled())] * 4, dtype='i4,O'), allow_pickle=True), 'x_train.npy holds Python objects'),
}


@pytest.mark.parametrize('name', STRANGE)
def test_arrays_of_strangers_are_refused_before_they_get_memory(vit, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, message = STRANGE[name]
    labels = saved(np.arange(4))
    with ZipFile('a.npz', 'w') as archive:
        for key, data in dict(x_train=content, y_train=labels, x_test=IMAGES, y_test=labels).items():
            archive.writestr(f'{key}.npy', data)
    model = vit()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as e:
            array_loaders('a.npz', model)
        assert tracemalloc.get_traced_memory()[1] < 2 ** 24
    finally:
        tracemalloc.stop()
    assert '\n' not in str(e.value) and not (tmp_path / 'ran').exists()


def test_a_file_that_is_small_and_unpacks_to_much(vit, tmp_path):
    labels = saved(np.zeros(9, np.uint8))
    for count, message in ((6 * 10 ** 5, 'cannot be read as .npz: its [0-9,]+ bytes unpack to 18[0-9,]+, which images never do'),
                           (10 ** 4, 'must hold uint8')):
        with ZipFile(tmp_path / 'a.npz', 'w', ZIP_DEFLATED) as archive:
            with archive.open('x_train.npy', 'w') as f:
                f.write(npy(header((count, 10, 10, 3))))
                for _ in range(count // 10 ** 4):
                    f.write(bytes(3 * 10 ** 6))
            for key, data in dict(y_train=labels, x_test=IMAGES, y_test=labels).items():
                archive.writestr(f'{key}.npy', data)
        with pytest.raises(ValueError, match=message):
            array_loaders(tmp_path / 'a.npz', vit())


def test_a_file_of_arrays_that_is_damaged(arrays, vit, tmp_path):
    whole = arrays.read_bytes()
    for cut in (whole[:-1], whole[:1000], b'', whole[1000:]):
        (tmp_path / 'cut.npz').write_bytes(cut)
        with pytest.raises(ValueError, match="cut.npz' cannot be read as .npz: "):
            array_loaders(tmp_path / 'cut.npz', vit())
    spoiled = bytearray(whole)
    spoiled[whole.index(b'x_train.npy') + 3000] ^= 1
    (tmp_path / 'cut.npz').write_bytes(spoiled)
    with pytest.raises(ValueError, match='Bad CRC-32'):
        array_loaders(tmp_path / 'cut.npz', vit())
    np.save(tmp_path / 'one.npy', np.zeros(3))
    with pytest.raises(ValueError, match='cannot be read as .npz: File is not a zip file'):
        array_loaders(tmp_path / 'one.npy', vit())


def test_folders_may_be_some_of_the_models_classes(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 3})
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': ['zebra', 'apple', 'lion']}
    for name in ('lion', 'zebra'):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new('RGB', (16, 16), (10 * i, 90, 200)).save(tmp_path / name / f'{i}.png')
    loader, _ = folder_loaders(tmp_path, model, batch_size=20, workers=0)
    assert {int(label) for _, label in loader.dataset.reader.samples} == {0, 2}
    with pytest.raises(ValueError, match='2 classes .* but the model has 4. Give a folder whose classes are among'):
        folder_loaders(tmp_path, timm.create_model('vit_tiny_patch16_224', **{**TINY, 'num_classes': 4}))


# --- read_data

def named(model, names):
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': list(names)}
    return model


@pytest.mark.parametrize('name', ['گل\u200cسرخ', 'गुलाब\u200d', 'sweet\u00a0pea'])
def test_classes_may_have_joiners_and_no_break_spaces(vit, folder, tmp_path, name):
    build, path = folder
    (build(path / 'images') / 'class2').rename(path / 'images' / name)
    data = read_data(path / 'images', vit())
    assert name in data.classes and sorted(data.classes) == sorted(classes_of(path / 'images')[0])
    save_pretrained(named(vit(), data.classes), tmp_path / 'saved')
    assert timm.create_model(f"local-dir:{tmp_path / 'saved'}").pretrained_cfg['label_names'] == list(data.classes)


@pytest.mark.parametrize('name', ['a\tb', 'a\nb', '\x1b[2J', os.fsdecode(b'\xff')])
def test_classes_that_cannot_be_printed_are_refused_before_anything_runs(vit, folder, name):
    build, path = folder
    (build(path / 'images') / 'class2').rename(path / 'images' / name)
    for refused in (lambda: read_data(path / 'images', vit()), lambda: classes_of(path / 'images')):
        with pytest.raises(ValueError, match=r"images' has the class .*, whose name cannot be printed. Rename it") as e:
            refused()
        assert repr(name) in str(e.value) and str(e.value).isprintable()
    assert read_data(path / 'images', vit(), labels=False).count() > 0


def test_a_class_whose_name_the_model_has_twice_is_refused(vit, folder):
    build, path = folder
    model = named(vit(num_classes=6), ['class0', 'class3', 'class1', 'class2', 'class3', 'class4'])
    with pytest.raises(ValueError, match=r"has 2 classes called 'class3' \(1 and 4\), so the name does not say which. Leave it out"):
        read_data(build(path / 'images'), model)
    assert read_data(path / 'images', model, any_classes=True).num_classes == 5
    shutil.rmtree(path / 'images' / 'class3')
    assert {label for _, label in read_data(path / 'images', model).plain().files.samples} == {0, 2, 3, 5}


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float32])
def test_images_have_the_dtype_of_the_model(vit, folder, arrays, dtype):
    build, path = folder
    model = vit().to(dtype)
    tensors = torch.rand(20, 3, 16, 16), torch.arange(20) % 5
    for source in (build(path / 'images'), arrays, tensors):
        data = read_data(source, model, DataConfig(batch_size=4), labels=None)
        assert data.labelled
        for images in (next(iter(data.train))[0], next(iter(data.val))[0], data.sample('train', 3)[0]):
            assert images.dtype == dtype and model(images).dtype == dtype


def test_links_lead_to_no_folder_twice(vit, folder):
    build, path = folder
    root = build(path / 'images')
    for link in ('one', 'two', 'class0/three'):
        (root / link).symlink_to(root, target_is_directory=True)
    (root / 'again').symlink_to(root / 'class1', target_is_directory=True)
    (path / 'far').mkdir()
    (root / 'class2').rename(path / 'far' / 'two')
    (root / 'class2').symlink_to(path / 'far' / 'two', target_is_directory=True)
    data = read_data(root, vit(), held_out=0.)
    assert data.classes == tuple(f'class{i}' for i in range(5)) and data.count() == 30
    assert len(pictures(root, vit(), 100).names) == 30


LABELS = {
    'one-hot': (torch.eye(5).repeat(4, 1), r'must be whole numbers \[N\].* got torch.float32 \[20, 5\].* labels.argmax\(dim=1\)'),
    'whole one-hot': (torch.eye(5).repeat(4, 1).long(), r'got torch.int64 \[20, 5\]'),
    'floats': (torch.arange(20) % 5 / 1., r'got torch.float32 \[20\]'),
    'negative': (torch.arange(20) % 5 - 1, 'There is a label -1, but the 5 classes of the model are 0 to 4'),
    'too large': (torch.arange(20) % 6, 'There is a label 5, but the 5 classes of the model are 0 to 4'),
    'too few': (torch.arange(19) % 5, 'got 20 images and 19 labels'),
}


@pytest.mark.parametrize('kind', LABELS)
def test_labels_that_are_no_classes_are_refused(vit, kind):
    labels, message = LABELS[kind]
    for wanted in (True, None):
        with pytest.raises(ValueError, match=message):
            read_data((torch.rand(20, 3, 16, 16), labels), vit(), labels=wanted)
    assert not read_data((torch.rand(20, 3, 16, 16), labels), vit(), labels=False).labelled


def test_what_data_is_labelled_and_why_not(vit, folder, arrays):
    build, path = folder
    tensors, labels, model = torch.rand(20, 3, 16, 16), torch.arange(20) % 5, vit()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tensors, labels), 4)
    for source in (build(path / 'images'), arrays, (tensors, labels)):
        data = read_data(source, model, labels=None)
        assert data.labelled and data.num_classes == 5 and not data.why
    three = build(path / 'three', classes=3)
    for source, of, why in ((tensors, model, 'there are none'), (loader, model, 'what the labels of a loader mean is not known'),
                            (three, model, 'has 3 classes'), (arrays, vit(num_classes=0), 'outputs are embeddings')):
        data = read_data(source, of, labels=None)
        assert not data.labelled and why in data.why and data.num_classes == 0 and data.classes is None
        assert all(not label for _, labels in data.train for label in labels) or source is three
    with pytest.raises(ValueError, match='images without labels'):
        read_data(tensors, model)
    with pytest.raises(ValueError, match='a loader with a length; got generator'):
        read_data((batch for batch in loader), model)
    assert read_data(data, model) is data and read_data(loader, model).labelled


def test_data_is_divided_sampled_relabelled_and_hashed(vit, folder, arrays):
    build, path = folder
    tensors, model = (torch.rand(20, 3, 16, 16), torch.arange(20) % 5), vit()
    for source in (build(path / 'images'), arrays, tensors):
        data = read_data(source, model, DataConfig(batch_size=8), held_out=0.2)
        n, held = {'images': (30, 5), 'data.npz': (100, 20)}.get(getattr(source, 'name', ''), (20, 4))
        assert (data.count('train'), data.count('val')) == (n - held, held) and (data.test is not None) is (source is arrays)
        images, labels = data.sample('val', 3)
        again = data.sample('val', 3)
        assert images.shape == (3, 3, 16, 16) and torch.equal(images, again[0]) and torch.equal(labels, again[1])
        assert torch.equal(torch.cat([x for x, _ in data.plain()]), torch.cat([x for x, _ in data.plain('train')]))
        agreed = data.labelled_by(model)
        assert evaluate(model, agreed.val).results[0].top1 == 100 and len(agreed.train) == len(data.train)
        assert torch.equal(agreed.sample('val', 3)[1], model(images).argmax(1)) and agreed.labelled
        assert data.sha256() == read_data(source, model, held_out=0.2).sha256() != read_data(source, model, held_out=0.4).sha256()
        whole = read_data(source, model, held_out=0.)
        assert whole.val is None and whole.count() == n
        assert read_data(source, model, held_out=0.2, limit=3).count() == 3
    with pytest.raises(ValueError, match='has no test images'):
        data.sample('test', 1)
    other = tensors[1].clone()
    other[0] = 3
    assert read_data((tensors[0], other), model).sha256() != read_data(tensors, model).sha256()


def test_a_batch_has_no_more_images_than_there_are(vit, arrays):
    tensors = torch.rand(8, 3, 16, 16), torch.arange(8) % 5
    images, labels = next(iter(read_data(tensors, vit(), DataConfig(smoothing=0.1)).train))
    assert len(images) == 6 and labels.shape == (6, 5)  # seven are trained on, and pairs are mixed
    assert len(next(iter(read_data(tensors, vit()).train))[0]) == 7
    assert len(next(iter(read_data(tensors[0][:1], vit(), labels=False).val))[0]) == 1


def test_the_order_depends_on_seed_and_epoch_alone(vit, arrays):
    def orders(source, seed, epoch, **options):
        data = read_data(source, vit(), DataConfig(batch_size=8, **options), seed=seed)
        torch.rand(seed + epoch)
        set_epoch(data.train, epoch)
        random_seed(0)
        return torch.cat([images.mean((1, 2, 3)) for images, _ in data.train])
    tensors = torch.rand(40, 3, 16, 16), torch.arange(40) % 5
    for options in ({}, dict(mixup=0.5)):
        assert torch.equal(orders(tensors, 1, 2, **options), orders(tensors, 1, 2, **options))
        assert not torch.equal(orders(tensors, 1, 2, **options), orders(tensors, 1, 3, **options))
