import io
import os
import runpy
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import resolve_input_data_config
from timm.utils import random_seed
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit.data.batches import DataConfig, set_epoch
from timm_odevit.data.preprocessing import data_config, open_image, read_image, warn_of_other_classes
from timm_odevit.data.read import classes_of, read_data, with_test
from timm_odevit.data.sources import _hash, files_in
from timm_odevit.export.files import metadata


def read(source, model, **options):
    """read_data, with the settings of the data as keywords."""
    if isinstance(source, Path) and source.suffix != '.npz':
        options.setdefault('workers', 0)
    config = {name: options.pop(name) for name in DataConfig.names() if name in options and name != 'held_out'}
    return read_data(source, model, DataConfig(**config), **options)


def files(loader):
    return {name for name, _ in loader.dataset.samples}


def named(model, names):
    model.pretrained_cfg = {**model.pretrained_cfg, 'label_names': names and list(names)}
    return model


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (20, 20)).save(path)


@pytest.fixture
def images(tmp_path):
    """Builds a folder with folders class0, class1, ... of images."""
    def build(root='images', classes=5, count=6):
        for label in range(classes):
            (tmp_path / root / f'class{label}').mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (20, 20), (40 * label, 9 * i, 0)).save(tmp_path / root / f'class{label}' / f'{i}.png')
        return tmp_path / root
    return build


@pytest.fixture
def arrays(tmp_path):
    x = (np.arange(1, 26).reshape(1, 5, 5, 1) + 25 * (np.arange(100) % 10).reshape(-1, 1, 1, 1)).astype(np.uint8).repeat(3, 3)
    np.savez(tmp_path / 'data.npz', x_train=x, y_train=np.arange(100) % 5, x_test=x[:10], y_test=np.arange(10) % 5)
    return tmp_path / 'data.npz'


# --- any data

@pytest.mark.parametrize('embed', [False, True])
def test_classes_that_a_model_knows_by_name_get_its_labels(vit, images, tmp_path, embed):
    names = [f'class{i}' for i in (3, 1, 4, 0, 2)]
    model, expected = named(vit(), names), tuple(sorted(names) if embed else names)
    data = read(images(), model, any_classes=embed)
    assert {(Path(file).parent.name, label) for file, label in data.plain().dataset.samples} == {(name, i) for i, name in enumerate(expected)}
    x, y = np.zeros((10, 16, 16, 3), np.uint8), np.arange(10) % 5
    np.savez(tmp_path / 'd.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=sorted(names))
    packed = read(tmp_path / 'd.npz', model, any_classes=embed)
    assert [packed.classes[label] for label in packed.test.labels] == [f'class{i}' for i in y]
    assert data.classes == packed.classes == expected and data.labelled is not embed and data.num_classes == 5
    if embed:  # as many labels as the model has classes, of more names
        np.savez(tmp_path / 'e.npz', x_train=x, y_train=y, x_test=x, y_test=y, classes=[*names, 'other'])
        assert read(tmp_path / 'e.npz', model, any_classes=True).test.labels.tolist() == y.tolist()


def test_data_may_have_some_of_the_models_classes(vit, images):
    root = images(classes=3)
    data = read(root, named(vit(num_classes=4), ['class2', 'other', 'class0', 'class1']))
    assert {label for _, label in data.plain().dataset.samples} == {0, 2, 3} and data.num_classes == len(data.classes) == 4
    with pytest.raises(ValueError, match='has 3 classes, but the model has 4. Give data with classes of the model'):
        read(root, vit(num_classes=4))


def test_folders_with_wordnet_ids_are_classes_of_imagenet(vit, images):
    model, root = vit(num_classes=1000), images(classes=2)
    (root / 'class0').rename(root / 'n01443537')
    (root / 'class1').rename(root / 'n01440764')
    cfg = model.pretrained_cfg
    model.pretrained_cfg = {**cfg, 'tag': None}
    with pytest.raises(ValueError, match='has 2 classes, but the model has 1000'):
        read(root, model)  # they may be others
    model.pretrained_cfg = {**cfg, 'tag': 'fb_in1k'}
    data = read(root, model)
    assert {(Path(file).parent.name, label) for file, label in data.plain().dataset.samples} == {('n01443537', 1), ('n01440764', 0)}
    assert data.num_classes == 1000 and metadata(model)['classes'][:2] == ['tench, Tinca tinca', 'goldfish, Carassius auratus']


def test_other_classes_than_those_of_the_model_are_said(vit):
    model = vit()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warn_of_other_classes(model, list('abcde'), 'images')  # it knows no names
        warn_of_other_classes(named(model, 'abcde'), list('abcde'), 'images')
        warn_of_other_classes(model, None, 'images')
    with pytest.warns(RuntimeWarning, match="of 'images' are not those of the model, so labels are compared by number"):
        warn_of_other_classes(model, list('abcxe'), 'images')


@pytest.mark.parametrize('name', ['a\tb', 'a\nb', '\x1b[2J', os.fsdecode(b'\xff')])
def test_classes_that_cannot_be_printed_are_refused_before_anything_runs(vit, images, name):
    root = images()
    (root / 'class2').rename(root / name)
    for refused in (lambda: read(root, vit()), lambda: classes_of(root)):
        with pytest.raises(ValueError, match=r"images' has the class .*, whose name cannot be printed. Rename it") as e:
            refused()
        assert repr(name) in str(e.value) and str(e.value).isprintable()
    assert read(root, vit(), labels=False).count() == 25


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float32])
def test_images_have_the_dtype_of_the_model(vit, images, arrays, dtype):
    model = vit().to(dtype)
    for source in (images(), arrays, (torch.rand(20, 3, 16, 16), torch.arange(20) % 5)):
        data = read(source, model, batch_size=4, labels=None)
        assert data.labelled
        for batch in (next(iter(data.train))[0], next(iter(data.val))[0], data.sample('train', 3)[0]):
            assert batch.dtype == dtype and model(batch).dtype == dtype


LABELS = {
    'one-hot': (torch.eye(5).repeat(4, 1), r'must be whole numbers \[N\].* labels.argmax\(dim=1\).* torch.float32 \[20, 5\]'),
    'a mask': (torch.ones(20) > 0, r'must be whole numbers \[N\].* torch.bool'),
    'whole one-hot': (torch.eye(5).repeat(4, 1).long(), r'torch.int64 \[20, 5\]'),
    'floats': (torch.arange(20) % 5 / 1., r'torch.float32 \[20\]'),
    'negative': (torch.arange(20) % 5 - 1, 'whole numbers from 0.*; got torch.int64 from -1 to 3'),
    'too large': (torch.arange(20) % 6, 'from 0 to 4, the classes of the model; got torch.int64 from 0 to 5'),
    'too few': (torch.arange(19) % 5, r'got 20 images and torch.int64 \[19\]'),
}


@pytest.mark.parametrize('kind', LABELS)
def test_labels_that_are_no_classes_are_refused(vit, kind):
    labels, message = LABELS[kind]
    for wanted in (True, None) if kind != 'too large' else (True,):  # they may be of other classes, to be ignored
        with pytest.raises(ValueError, match=message):
            read((torch.rand(20, 3, 16, 16), labels), vit(), labels=wanted)
    assert not read((torch.rand(20, 3, 16, 16), labels), vit(), labels=False).labelled


def test_what_data_is_labelled_and_why_not(vit, images, arrays):
    tensors, labels, model = torch.rand(20, 3, 16, 16), torch.arange(20) % 5, vit()
    loader = DataLoader(TensorDataset(tensors, labels), 4)
    for source in (images(), arrays, (tensors, labels)):
        data = read(source, model, labels=None)
        assert data.labelled and data.num_classes == 5 and not data.why
    for source, of, why in ((images('three', classes=3), model, 'has 3 classes'), (tensors, model, 'there are none'),
                            (arrays, vit(num_classes=0), '')):
        data = read(source, of, labels=None)
        assert not data.labelled and why in data.why and data.num_classes == 0 and data.classes is None
    with pytest.raises(ValueError, match='got 20 images and NoneType'):
        read(tensors, model)
    with pytest.raises(ValueError, match='a loader with a length; got generator'):
        read((batch for batch in loader), model)
    assert read(data, model) is data and read(loader, model).labelled and read(loader, model).sample('train', 9)[0].shape[0] == 9
    assert next(iter(read(loader, model, labels=False).train))[1].tolist() == [0] * 4


def test_data_is_divided_sampled_and_hashed(vit, images, arrays):
    tensors, model = (torch.rand(20, 3, 16, 16), torch.arange(20) % 5), vit()
    for source, n in ((images(), 30), (arrays, 100), (tensors, 20)):
        data = read(source, model, batch_size=8, held_out=0.2)
        held = data.count('val')
        assert data.count('train') == n - held < n and (data.test is not None) is (source is arrays)
        batch, labels = data.sample('val', 3)
        assert batch.shape == (3, 3, 16, 16) and all(map(torch.equal, data.sample('val', 3), (batch, labels)))
        assert sum(len(y) for _, y in data.plain()) == n - held
        assert data.sha256() == read(source, model, held_out=0.2).sha256() != read(source, model, held_out=0.4).sha256()
        whole = read(source, model, held_out=0.)
        part, size = ('test', 10) if source is arrays else ('train', n)  # x_train is not read
        assert whole.val is None and whole.count(part) == size and read(source, model, limit=3).count() == 3
    assert read((tensors[0], tensors[1].flip(0)), model).sha256() != read(tensors, model).sha256()


def test_a_batch_has_no_more_images_than_there_are(vit):
    tensors = torch.rand(8, 3, 16, 16), torch.arange(8) % 5
    batch, labels = next(iter(read(tensors, vit(), smoothing=0.1).train))
    count = read(tensors, vit()).count()
    assert labels.shape == (len(batch), 5) and len(batch) == count - count % 2  # pairs are mixed
    assert len(next(iter(read(tensors, vit()).train))[0]) == count
    assert len(next(iter(read(tensors[0][:1], vit(), labels=False).val))[0]) == 1


@pytest.mark.parametrize('settings', [{}, dict(mixup=0.5), dict(cutmix=1.), dict(smoothing=0.1)])
def test_order_and_mixing_depend_on_seed_and_epoch_alone(vit, settings):
    tensors = torch.rand(40, 3, 16, 16), torch.arange(40) % 5

    def epoch(seed, epoch):
        data = read(tensors, vit(), batch_size=8, seed=seed, **settings)
        set_epoch(data.train, epoch)
        random_seed(0)
        return list(data.train)
    first, again = epoch(1, 2), epoch(1, 2)
    assert all(torch.equal(a, b) for one, other in zip(first, again) for a, b in zip(one, other)) and len(first) == 4
    assert not any(torch.equal(first[0][0], other[0][0]) for other in (epoch(1, 3), epoch(2, 2)))
    if settings:
        torch.testing.assert_close(first[0][1].sum(1), torch.ones(8))
        with pytest.raises(ValueError, match='batch_size must be even; got 7'):
            read(tensors, vit(), batch_size=7, **settings)


@pytest.mark.parametrize('setting', [dict(padding=2), dict(flip=0.), dict(workers=0), dict(mixup=0.5), dict(smoothing=0.1), dict(reprob=0.25)])
def test_settings_of_other_data(vit, images, arrays, setting):
    pair, name = (torch.rand(8, 3, 16, 16), torch.arange(8) % 5), next(iter(setting))
    for of in {'padding': (images(), pair), 'flip': (images('other'), pair), 'workers': (arrays, pair)}.get(name, ([pair],)):
        with pytest.raises(ValueError, match=f'data.{name} does not apply to this source, a .*Leave it out'):
            read_data(of, vit(), DataConfig(**setting))


def test_images_without_labels_are_mixed_too(vit, images):
    tensors, options = torch.rand(8, 3, 16, 16), dict(labels=False, held_out=0., batch_size=8, mixup=0.5)
    (mixed, labels), = read(tensors, vit(), **options).train
    assert labels.shape == (8, 1) and not any((image == mixed).flatten(1).all(1).any() for image in tensors)
    assert all(labels.shape == (len(batch), 1) for batch, labels in read(images(), vit(), **options).train)


# --- folders

@pytest.mark.parametrize('cores, workers', [(1, 0), (2, 1), (64, 2)])
def test_a_core_is_left_to_the_model(vit, images, monkeypatch, cores, workers):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(cores)), raising=False)
    data = read_data(root := images(), vit())
    assert [loader.num_workers for loader in (data.train, data.val)] == [workers] * 2
    monkeypatch.setattr('timm_odevit.data.batches.get_all_start_methods', lambda: ['spawn', 'fork'])
    assert read_data(root, vit()).train.num_workers == 0  # each would import everything, in each epoch
    monkeypatch.setattr(torch.nn.Parameter, 'is_cuda', True, raising=False)
    assert read_data(root, vit()).train.pin_memory and not data.train.pin_memory


def test_a_limit_takes_images_of_all_classes(vit, images, tmp_path):
    data = read(images(count=20), vit(), held_out=0.5, limit=15)
    assert [{label for _, label in part.dataset.samples} for part in (data.train, data.val)] == [set(range(5))] * 2
    assert data.count() == data.count('val') == 15
    assert not files(data.train) & files(data.val)
    np.savez(tmp_path / 'a.npz', **{f'{x}_{part}': of for part in ('train', 'test') for x, of in (('x', np.zeros((20, 16, 16, 3), np.uint8)), ('y', np.arange(20) // 4))})
    assert {*next(iter(read(tmp_path / 'a.npz', vit(), limit=5).test))[1].tolist()} == {*range(5)}


@pytest.mark.parametrize('layout', ['images', 'images/train'])
def test_a_share_of_each_class_is_held_out_whatever_the_labels_of_the_model(vit, images, tmp_path, layout):
    images(layout)
    names = [f'class{i}' for i in (3, 1, 4, 0, 2)]
    found = []
    for options in ({}, dict(any_classes=True), dict(labels=False)):
        for model in (vit(), named(vit(), names)):
            data = read(tmp_path / 'images', model, held_out=0.3, batch_size=4, seed=3, **options)
            found.append((files(data.train), files(data.val)))
    assert all(pair == found[0] for pair in found) and sum(map(len, found[0])) == 30 and not found[0][0] & found[0][1]
    for part in (data.val, data.plain()):
        assert {label for _, label in part.dataset.samples} == set(range(5))
    batch, labels = next(iter(data.train))
    assert batch.shape == (4, 3, 16, 16) and labels.shape == (4,)


def test_what_is_held_out_depends_on_the_image_alone(vit, tmp_path):
    x, y = torch.randint(0, 256, (400, 5, 5, 3), dtype=torch.uint8).numpy(), np.arange(400) % 5
    for name, some in {'all': slice(None), 'turned': slice(None, None, -1), 'half': slice(200)}.items():
        np.savez(tmp_path / f'{name}.npz', x_train=x[some], y_train=y[some], x_test=x[:1], y_test=y[:1])

    def held(name, share, **options):
        data = read(tmp_path / f'{name}.npz', vit(), held_out=share, **options)
        return [{image.numpy().tobytes() for image in part.images} for part in (data.val, data.plain())]
    (few, rest), (more, _) = held('all', 0.1), held('all', 0.3)
    assert held('all', 0.001) == held('all', 0.001, labels=False) and len(held('all', 0.001)[0]) >= 5
    for labels in (y.astype(object), y + 0.5, np.arange(400)):  # they are no classes
        np.savez(tmp_path / 'other.npz', x_train=x, y_train=labels)
        assert len(held('other', 0.1, labels=False)[0]) == len(few)
    np.savez(tmp_path / 'other.npz', x_train=x, y_train=y[:, None], x_test=x[:1], y_test=y[:1, None])  # as Keras has them
    assert held('other', 0.1) == held('other', 0.1, labels=False) == [few, rest]
    for name in ('a.bmp', 'b.bmp', 'a.png', 'b.png'):
        (tmp_path / name).write_bytes(bytes(2 ** 16) + name.encode())  # which begin alike: only PNGs are compressed
    assert [_hash(f'{tmp_path}/a.{end}') == _hash(f'{tmp_path}/b.{end}') for end in ('bmp', 'png')] == [False, True]
    pair = torch.randn(50, 3, 16, 16), torch.arange(50) % 5
    assert [read(pair, vit(), held_out=0.001, labels=labels).count('val') for labels in (True, False)] == [5, 5]
    assert not few & rest and few < more and 20 < len(few) < 60 < len(more) < 180
    assert held('turned', 0.1, seed=3) == held('all', 0.1, labels=False) == [few, rest]
    assert read(tmp_path / 'all.npz', vit(), labels=False).count('test') == 1
    assert held('half', 0.3)[0] == more & {image.tobytes() for image in x[:200].transpose(0, 3, 1, 2)}


def test_some_of_those_held_out_are_to_judge(vit, images):
    root, model = images(count=40), vit()
    data = read(root, model, held_out=0.4, judging=0.1)
    assert files(data.test) <= files(read(root, model, held_out=0.1).val)
    assert files(data.test) | files(data.val) == files(read(root, model, held_out=0.4).val)
    images('parts/train')
    parts = read(images('parts/val', count=20).parent, model, judging=0.1)
    assert parts.held_out == 0 and parts.count('val') + parts.count('test') == 100 and 30 < parts.count('test') < 70
    alone = read((torch.rand(1, 3, 16, 16), torch.zeros(1).long()), model, judging=0.1)
    assert alone.count() == alone.count('val') == alone.count('test') == 1


def test_other_images_have_the_same_classes(vit, images):
    others = images('others')
    (others / 'class4').rename(others / 'class9')
    with pytest.raises(ValueError, match="others' does not have the classes of the other images"):
        with_test(read(images(), vit()), others, vit())


def test_a_test_folder_is_for_the_final_number_only(vit, images, tmp_path):
    root = images('images/training').parent
    images('images/test', count=2)
    data = read(root, vit())
    picture(root / 'test' / '0.png')  # that of no class makes the folder useless
    useless = read(root, vit(), judging=0.3)
    (root / 'test' / '0.png').unlink()
    (root / 'test' / 'class4').rename(tmp_path / 'rare')
    with pytest.warns(RuntimeWarning, match="The test/ of '.*' is not used: its classes differ"):
        assert 'test' not in read(root, vit(), judging=0.3).words
    (tmp_path / 'rare').rename(root / 'test' / 'class4')
    assert 'test' not in useless.words and files(useless.test) < files(data.train) | files(data.val)
    assert data.count('val') == 5 and data.count('test') == 10 and not any('/test/' in f for f in files(data.train) | files(data.val))
    loader, words = read(root, vit(), held_out=0.).evaluated()
    assert files(loader) == files(data.test) and words == str(root / 'test')
    assert data.evaluated()[1] == f"the share 0.1 held out of training of {root / 'training'}"
    assert files(read(root, vit(), labels=False).test) == files(data.test)
    images('images/validation', count=2)
    data = read(root, vit())
    assert files(data.evaluated()[0]) == files(data.val) == files(read(root, vit(), held_out=0.).val)
    assert {f.split('/')[-3] for f in files(data.val)} == {'validation'}


def test_parts_that_do_not_fit(vit, images):
    val = images('a/val')
    with pytest.raises(ValueError, match='has val/ but no train/'):
        read(val.parent, vit())
    images('a/train')
    (val / 'class4').rename(val / 'class9')
    for refused in (lambda: read(val.parent, vit()), lambda: read(val.parent, vit(), any_classes=True, held_out=0.)):
        with pytest.raises(ValueError, match="have different classes. Only one of them has class4, class9.*give '.*a/val'"):
            refused()
    shutil.rmtree(val / 'class9')
    with pytest.raises(ValueError, match='have different classes. Only one of them has class4'):
        read(val.parent, vit())


CLASSES = ['a', 'b', 'c', 'd']


@pytest.mark.parametrize('name', ['train', 'training', 'test', 'val', 'valid', 'Eval'])
def test_a_class_may_be_called_as_a_part_is(vit, tmp_path, name):
    for label in (*CLASSES, name):
        for i in range(4):
            picture(tmp_path / label / f'{i}.png')
    data = read(tmp_path, vit(), held_out=0.25)
    assert (data.count(), data.count('val')) == (15, 5) and any(f'/{name}/' in f for f in files(data.val))
    for held_out, labels in ((0.25, False), (0., True)):
        other = read(tmp_path, vit(), held_out=held_out, labels=labels)
        assert files(other.train) | (files(other.val) if other.val else set()) == files(data.train) | files(data.val)


LAYOUTS = {  # images, and what is trained on and evaluated on: a part, or what the message holds
    'train and test': (['train/C/0', 'train/C/1', 'test/C/0'], 'train', 'test'),
    'any case, and others': (['Train/C/0', 'VAL/C/0', 'devkit/0'], 'Train', 'VAL'),
    'train alone': (['train/C/0', 'train/C/1'], 'train', 'train'),
    'val alone': (['val/C/0'], 'has val/ but no train/', 'val'),
    'test alone': (['test/C/0'], 'has test/ but no train/', 'test'),
    'test without classes': (['train/C/0', 'train/C/1', 'test/0'], 'train', 'images that are in no class'),
    'val with an image too many': (['train/C/0', 'val/C/0', 'val/0'], 'such as 0.png', 'such as 0.png'),
    'train of folders beside a class': (['apple/0', 'train/C/0'], 'has apple/, train/: it is not clear', "such as '{root}/train'"),
    'parts or classes': (['train/0', 'val/0'], 'has train/, val/: it is not clear', "such as '{root}/train'"),
    'two names of one part': (['train/C/0', 'training/C/0'], 'has train/, training/: it is not clear', 'it is not clear'),
    'an image beside the classes': (['C/0', '0'], 'images that are in no class', 'such as 0.png'),
    'no class': (['0', '1'], 'images that are in no class', 'images that are in no class'),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('stray', [False, True])
def test_layouts_of_folders(vit, tmp_path, layout, stray):
    paths, *expected = LAYOUTS[layout]
    for path in paths:
        for label in (*CLASSES, 'e') if 'C' in path else ['']:
            picture(tmp_path / f"{path.replace('C', label)}.png")
    if stray:  # none of this is of any account
        for place in [p for p in tmp_path.rglob('*') if p.is_dir()] + [tmp_path]:
            (place / 'README.txt').write_text('stray')
            (place / '.hidden.png').write_text('stray')
            picture(place / '.cache' / 'f' / '0.png')
        (tmp_path / 'empty').mkdir()
    for make, found in ((lambda: read(tmp_path, vit(), held_out=0.5).train, expected[0]),
                        (lambda: read(tmp_path, vit(), held_out=0.).evaluated()[0], expected[1])):
        if (tmp_path / found).is_dir():
            samples = make().dataset.samples
            assert {Path(file).relative_to(tmp_path).parts[0] for file, _ in samples} == {found}
            assert {(Path(file).parent.name, label) for file, label in samples} == {(name, i) for i, name in enumerate((*CLASSES, 'e'))}
        else:
            with pytest.raises(ValueError) as e:
                make()
            assert found.format(root=tmp_path) in str(e.value) and '\n' not in str(e.value)
    if any(word in layout for word in ('parts or classes', 'beside a class', 'two names')):
        with pytest.raises(ValueError, match='it is not clear which are parts'):
            read(tmp_path, vit(), labels=False)
    else:
        data = read(tmp_path, vit(), labels=False)
        found = {Path(f).relative_to(tmp_path).parts[0].lower() for f in files(data.train) | files(data.val)}
        assert (found == {'train'}) is any(path.lower().startswith('train') for path in paths)


def test_classes_of_one_image_stay_in_training(vit, images):
    root = images(count=1)
    assert read(root, vit(), labels=False, held_out=0.4).count('val') > 0
    picture(root / 'class2' / '1.png')
    data = read(root, vit(), held_out=0.9)
    assert (data.count(), data.count('val')) == (5, 1) and 'class2' in files(data.val).pop()
    assert {label for _, label in data.train.dataset.samples} == set(range(5))


def test_classes_that_sort_alike_have_an_order(tmp_path):
    for name in ('Cat', 'cat', '1', '①', '01', 'CAT', '001'):
        picture(tmp_path / name / 'A1.png')
        picture(tmp_path / name / 'a01.png')
    assert files_in(tmp_path)[2] == ['001', '01', '1', 'CAT', 'Cat', 'cat', '①']  # whatever the order of a set


@pytest.mark.parametrize('channels', [1, 2, 3, 4])
@pytest.mark.parametrize('overlay', [{}, dict(mean=(0.1, 0.2, 0.6), std=(0.3, 0.2, 0.1)), dict(mean=(0.4,), std=(0.3,))],
                         ids=['as timm makes it', 'three values', 'one value'])
def test_channels(vit, images, tmp_path, channels, overlay):
    model, root = vit(in_chans=channels, pretrained_cfg_overlay=overlay), images()
    Image.new('RGB', (16, 16), (0, 45, 90)).save(root / 'class0' / '0.png')
    mean, std = (resolve_input_data_config(model)[key] for key in ('mean', 'std'))
    assert len(mean) == len(std) == channels
    if overlay:
        own = len(overlay['mean']) == channels
        assert mean == pytest.approx(overlay['mean'] if own else [sum(overlay['mean']) / len(overlay['mean'])] * channels)
        assert std == pytest.approx(overlay['std'] if own else [sum(overlay['std']) / len(overlay['std'])] * channels)
    pixels = {1: [37], 2: [0, 45], 3: [0, 45, 90], 4: [0, 45, 90, 255]}[channels]  # grey by Pillow's weights; opaque
    expected = (torch.tensor(pixels) / 255 - torch.tensor(mean)) / torch.tensor(std)
    if channels != 2:  # of which there are no image files
        data = read(root, model, batch_size=4, held_out=0.)
        batch, _ = next(iter(data.plain()))
        assert batch.shape == next(iter(data.train))[0].shape == (4, channels, 16, 16)
        torch.testing.assert_close(batch[0, :, 8, 8], expected, atol=0.02, rtol=0)
    x = np.array(pixels, np.uint8) * np.ones((10, 16, 16, 1), np.uint8)
    np.savez(tmp_path / 'a.npz', x_train=x, y_train=np.arange(10) % 5, x_test=x, y_test=np.arange(10) % 5)
    batch, _ = next(iter(read(tmp_path / 'a.npz', model).test))
    torch.testing.assert_close(batch, expected.view(1, -1, 1, 1).expand(10, channels, 16, 16))


def test_refuses(vit, images, tmp_path):
    (tmp_path / 'empty').mkdir(), (tmp_path / 'labels.csv').write_text('file,label')
    root = images()
    for source, model, options, message in (
            (tmp_path / 'nowhere', vit(), {}, "There is no '.*nowhere'. Give a folder"),
            (tmp_path / 'empty', vit(), {}, r"There are no images in '.*empty' \(.png, .jpg, .jpeg, .webp, .bmp, .tif, .tiff, .gif, .avif, .jfif, .ppm, .pgm, .heic, .heif\)"),
            *((file, vit(), dict(workers=None), f"{file.name}' is a file. Give the folder") for file in (root / 'class0' / '0.png', tmp_path / 'labels.csv')),
            (images('three', classes=3), vit(), {}, 'has 3 classes, but the model has 5'),
            ([torch.randn(2, 3, 16, 16)], vit(), dict(limit=1), 'limit does not apply to a loader'),
            (root, vit(in_chans=2), {}, 'Image files have 1, 3 or 4 channels; the model takes 2')):
        with pytest.raises(ValueError, match=message):
            read(source, model, **options)
    assert classes_of(root) == ([f'class{i}' for i in range(5)], 5)


@pytest.mark.parametrize('dtype', [np.uint16, '>u2'])
def test_16_bits_are_scaled(tmp_path, dtype):
    deep = np.arange(0, 65536, 164, dtype=dtype)[:400].reshape(20, 20)
    Image.fromarray(deep).save(tmp_path / 'deep.tiff')
    Image.fromarray(deep.astype(np.uint16)).save(tmp_path / 'deep.png')
    for name in ('deep.tiff', 'deep.png'):
        assert np.abs(np.asarray(read_image(tmp_path / name, 'RGB'))[..., 0] - deep / 257.).max() <= 0.5


def test_images_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(np.arange(200, dtype=np.uint8).reshape(10, 20)).save(tmp_path / 'x.png', exif=exif)
    assert read_image(tmp_path / 'x.png', 'L').size == (10, 20)
    Image.new('L', (4096, 3000)).save(tmp_path / 'x.jpg', exif=exif)
    assert read_image(tmp_path / 'x.jpg', 'L').size == (1500, 2048)  # a large JPEG is read smaller
    Image.new('L', (4, 6)).save(tmp_path / 'x.png', exif=b'Exif\0\0no TIFF')
    assert read_image(tmp_path / 'x.png', 'L').size == (4, 6)
    Image.new('RGB', (4, 6)).save(tmp_path / 'x.eps')
    with pytest.raises(ValueError, match='it is a program'):
        read_image((tmp_path / 'x.eps').rename(tmp_path / '\x1b.png'), 'RGB')


def test_files_that_are_no_images_are_said_and_left_out(vit, images, caplog):
    root, image = images(), io.BytesIO()
    Image.new('RGB', (64, 64), (9, 99, 200)).save(image, 'avif')
    (root / 'class1' / '0.png').write_bytes(image.getvalue()[:-20])  # Pillow raises SyntaxError
    (root / 'class1' / '1.png').write_bytes(b'')
    for file in [*(root / 'class4').iterdir()]:
        file.with_suffix('.HEIC').write_bytes(b'no image'), file.unlink()  # a class without images that Pillow reads remains
    with pytest.raises(ValueError, match=r"0.png' cannot be read as an image: Failed to decode"):
        open_image(root / 'class1' / '0.png', data_config(vit()))
    for workers in (0, 1):
        loader = read(root, vit(), batch_size=4, workers=workers, held_out=0.).plain()
        labels = torch.cat([labels for _, labels in loader])
        assert labels.bincount(minlength=5).tolist() == [6, 4, 6, 6, 0] and loader.files.bad.sum() == 8  # also those that a worker found
    assert "class1/0.png' cannot be read as an image" in caplog.text and len(caplog.records) == 8  # each file once
    data = read(root, vit(), held_out=0., batch_size=4)
    assert all(label >= 0 for _, labels in data.train for label in labels)  # another image takes the place
    assert len(data.sample('train', 99)[0]) == 22


@pytest.mark.parametrize('workers', [0, 1])
def test_an_epoch_depends_on_its_seed_alone(vit, images, workers):
    root, found = images(), []
    for before in (0, 1):
        train = read(root, vit(), batch_size=4, workers=workers).train
        for _ in range(before):
            list(train)
        random_seed(5)
        found.append([batch for batch, _ in train])
    for a, b in zip(*found):
        assert torch.equal(a, b)


# --- arrays

def test_arrays_are_split_shuffled_and_augmented(arrays, vit):
    data = read(arrays, vit(), batch_size=8, padding=1)
    train, val = data.train, data.val
    assert [len(part) for part in (train, val, data.test)] == [10, 2, 2] and data.count('test') == 10
    set_epoch(train, 0)
    first = list(train.indices)
    assert first == list(train.indices) and len({i for b in first for i in b}) == 80
    set_epoch(train, 1)
    assert first != list(train.indices)
    batch, labels = next(iter(train))
    assert batch.shape == (8, 3, 16, 16) and labels.dtype == torch.int64
    assert torch.equal(torch.cat([x for x, _ in val]), val.prepare(val.images))
    raw = train.images[:1].repeat(300, 1, 1, 1)
    found = train.augment(raw)
    variants = {tuple(image[0].flatten().tolist()) for image in found}
    assert found.dtype == torch.uint8 and len(variants) == 18 and tuple(range(1, 26)) in variants  # 3 x 3 shifts, mirrored or not
    erased = partial(train.augment, reprob=1.)(raw)
    assert (erased[:, 0] == 0).sum() > (found[:, 0] == 0).sum() and (erased[:, 0] == erased[:, 2]).all()


def test_processes_share_an_order_and_no_image(arrays, vit, monkeypatch):
    parts, whole = [], list(read(arrays, vit(), batch_size=16).train.indices)
    for rank in (0, 1):
        monkeypatch.setattr('timm_odevit.data.batches.rank_and_world', lambda rank=rank: (rank, 2))
        parts.append(list(read(arrays, vit(), batch_size=8).train.indices))
    assert [len(each) for each in (whole, *parts)] == [5, 5, 5]
    for one, a, b in zip(whole, *parts):
        assert sorted(one) == sorted(a + b)


def test_grey_arrays_need_no_axis_of_channels(arrays, vit, tmp_path):
    data = dict(np.load(arrays))
    flat = {key: data[key][..., 0] for key in ('x_train', 'x_test')}
    np.savez(tmp_path / 'flat.npz', **{**data, **flat})
    np.savez(tmp_path / 'one.npz', **{**data, **{key: x[..., None] for key, x in flat.items()}})
    a, b = (read(tmp_path / name, vit(in_chans=1), batch_size=8, reprob=1.) for name in ('flat.npz', 'one.npz'))
    assert a.test.images.shape[1:] == (1, 5, 5) and a.sha256() == b.sha256() and next(iter(a.train))[0].shape == (8, 1, 16, 16)
    with pytest.raises(ValueError, match=r'got torch.uint8 \[100, 5, 5, 1\]. Give such images, or a model with another in_chans'):
        read(tmp_path / 'flat.npz', vit())


class Pickled:
    def __reduce__(self):
        return open, ('ran', 'w')  # makes a file, if it is unpickled


X, Y = np.zeros((4, 5, 5, 3), np.uint8), np.arange(4)
MISFITS = {
    'too many labels': (dict(y_train=Y * 9), {}, 'has 28 classes, but the model has 5'),
    'too many classes': (dict(classes=list('abcdef')), {}, 'has 6 classes, but the model has 5'),
    'other channels': ({}, dict(in_chans=1), r'must hold uint8 images x_train \[N, S, S, 1\]; got torch.uint8 \[4, 5, 5, 3\]'),
    'channels first': (dict(x_test=X.transpose(0, 3, 1, 2)), {}, r'x_test .*; got torch.uint8 \[4, 3, 5, 5\]'),
    'labels of two axes': (dict(y_train=Y[:, None].repeat(2, 1)), {}, r'labels must be whole numbers .* torch.int64 \[4, 2\]'),
    'too few labels': (dict(y_train=Y[:3]), {}, r'got 4 images and torch.int64 \[3\]'),
    'negative labels': (dict(y_test=Y - 1), {}, 'whole numbers from 0; got torch.int64 from -1 to 2'),
    'objects': (dict(y_train=np.array([Pickled()] * 4, dtype=object)), {}, "bad.npz' cannot be read as .npz: Object arrays"),
    'too few names': (dict(classes=['a']), {}, 'must hold classes, a name for each label from 0 to 3; got <U1'),
    'a name for the terminal': (dict(classes=['a', 'b', '\x1b[2J', 'd', 'e']), {}, 'whose name cannot be printed'),
}


@pytest.mark.parametrize('case', MISFITS)
def test_arrays_that_do_not_fit(vit, tmp_path, case):
    change, model, message = MISFITS[case]
    np.savez(tmp_path / 'bad.npz', **{**dict(x_train=X, y_train=Y, x_test=X, y_test=Y), **change})
    with pytest.raises(ValueError, match=message):
        read(tmp_path / 'bad.npz', vit(**model))
    assert not Path('ran').exists()


def test_a_file_of_arrays_that_is_damaged(arrays, vit, tmp_path):
    whole = arrays.read_bytes()
    spoiled = bytearray(whole)
    spoiled[whole.index(b'x_train.npy') + 3000] ^= 1
    for content, message in ((whole[:-1], ''), (whole[:1000], ''), (b'', ''), (whole[1000:], ''), (spoiled, 'Bad CRC-32'),
                             (b'PK', '')):
        (tmp_path / 'cut.npz').write_bytes(content)
        with pytest.raises(ValueError, match=f"cut.npz' cannot be read as .npz: .*{message}"):
            read(tmp_path / 'cut.npz', vit())


@pytest.mark.parametrize('name', ['گل\u200cسرخ', 'गुलाब\u200d', 'sweet\u00a0pea', '猫\u3000犬', '\u200fعربي'])
def test_classes_may_have_joiners_and_no_break_spaces(vit, images, name):
    root = images()
    (root / 'class2').rename(root / name)
    data = read(root, vit())
    assert name in data.classes and sorted(data.classes) == sorted(classes_of(root)[0])


def test_a_class_whose_name_the_model_has_twice_is_refused(vit, images):
    model = named(vit(num_classes=6), ['class0', 'class3', 'class1', 'class2', 'class3', 'class4'])
    with pytest.raises(ValueError, match=r"has two classes called 'class3'"):
        read(images(), model)
    assert read(images('other'), model, any_classes=True).num_classes == 5


def test_links_upwards_are_not_followed(vit, images, tmp_path):
    root = images()
    for link in ('one', 'two', 'class0/three'):
        (root / link).symlink_to(root, target_is_directory=True)
    (tmp_path / 'far').mkdir()
    (root / 'class2').rename(tmp_path / 'far' / 'two')
    (root / 'class2').symlink_to(tmp_path / 'far' / 'two', target_is_directory=True)
    data = read(root, vit(), held_out=0.)
    assert data.classes == tuple(f'class{i}' for i in range(5)) and data.count() == 30


@pytest.mark.parametrize('options', [{}, dict(crop_pct=0.75), dict(crop_pct=0.9, crop_mode='squash'), dict(interpolation='bilinear')])
def test_an_image_is_the_same_through_every_door(vit, tmp_path, options):
    """As a file and in an array; and as the example prepares images for exported files, by their metadata."""
    model = vit(img_size=32)
    model.pretrained_cfg = {**model.pretrained_cfg, **options}
    rough = np.random.default_rng(0).integers(0, 256, (20, 5, 5, 3), np.uint8)
    pixels = np.stack([np.asarray(Image.fromarray(image).resize((40, 40), Image.Resampling.BICUBIC)) for image in rough])
    (tmp_path / 'class0').mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / 'class0' / f'{i:02}.png')
    np.savez(tmp_path / 'a.npz', x_train=pixels, y_train=np.zeros(20, int), x_test=pixels, y_test=np.zeros(20, int))
    folder, array = (read(source, model, labels=False, held_out=0.).plain() for source in (tmp_path, tmp_path / 'a.npz'))
    expected = next(iter(folder))[0]
    assert torch.equal(expected[3], open_image(tmp_path / 'class0' / '03.png', data_config(model)))
    exported = runpy.run_path(str(Path(__file__).parents[1] / 'examples' / 'exported.py'))
    level = 1 / 255 / min(data_config(model)['std'])
    assert data_config(timm.create_model('naflexvit_base_patch16_gap', img_size=128, depth=1, embed_dim=24))['input_size'] == (3, 128, 128)
    for found in (next(iter(array))[0], torch.from_numpy(exported['prepare'](pixels, data_config(model)))):
        assert (found - expected).abs().max() < 2 * level and (model(found) - model(expected)).abs().max() < 0.02  # Pillow rounds twice


def test_a_share_of_the_batches_is_mixed(vit):
    (_, y), = read((torch.rand(8, 3, 16, 16), torch.arange(8) % 5), vit(), held_out=0., batch_size=8, mixup=0.5, prob=0.).train
    assert set(y.unique().tolist()) == {0., 1.}
