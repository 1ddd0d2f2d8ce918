"""Embeddings: losses, what is measured, and training that follows them."""
import copy
import json
import math
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestNeighbors

from timm_odevit import (
    Recipe,
    TrajectoryDistillationTask,
    convert_,
    evaluate,
    evaluate_embeddings,
    fit,
    save_pretrained,
    train,
)
from timm_odevit.cli import main
from timm_odevit.evaluation.embeddings import knn_accuracy, nearest, probe_accuracy, without_classifiers
from timm_odevit.training.losses import embedding_loss


def batches(count=3, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, 16, 16, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def pair(vit, **kwargs):
    teacher = vit(num_classes=0)
    return convert_(copy.deepcopy(teacher), **kwargs).model, teacher


def npz(path):
    rng, labels = np.random.default_rng(0), np.arange(40) % 10
    x_train, x_test = rng.integers(0, 256, (2, 40, 16, 16, 3), dtype=np.uint8)
    np.savez(path, x_train=x_train, x_test=x_test, y_train=labels, y_test=labels)


# --- losses

def test_embedding_loss_is_the_angle_plus_the_relative_error():
    teacher = torch.randn(64, 8) * torch.tensor([10., *[1.] * 7]) + 5
    student, rotation = torch.randn(64, 8), torch.linalg.qr(torch.randn(8, 8)).Q  # a rotation changes nothing: PHI-S does more
    torch.testing.assert_close(embedding_loss(student @ rotation, teacher @ rotation), embedding_loss(student, teacher))
    assert embedding_loss(teacher, teacher).item() == pytest.approx(0, abs=1e-6) and embedding_loss(student[:1], teacher[:1]) < 99
    mean = teacher.mean(dim=0).expand_as(teacher)  # explains nothing: the squared error is the variance
    angle = 1 - F.cosine_similarity(mean, teacher).mean()
    torch.testing.assert_close(embedding_loss(mean, teacher), angle + 1)
    torch.testing.assert_close(  # the angle does not see the length
        embedding_loss(2 * teacher, teacher), F.mse_loss(2 * teacher, teacher) / (teacher - mean).square().mean())


# --- what is measured

def test_neighbours_k_nn_and_probe_agree_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 6, generator=generator)
    known, labels = torch.arange(1500) % 5, torch.arange(200) % 5
    learned = centres[known] + torch.randn(1500, 6, generator=generator)
    x = centres[labels] + torch.randn(200, 6, generator=generator)
    found = NearestNeighbors(n_neighbors=21, metric='cosine').fit(learned.numpy())
    distances, others = found.kneighbors(x.numpy(), 20)
    assert (nearest(learned).numpy() == found.kneighbors(learned.numpy(), 2)[1][:, 1]).all()
    votes = np.zeros((200, 5))
    for i in range(200):
        np.add.at(votes[i], known.numpy()[others[i]], np.exp((1 - distances[i]) / 0.07))
    assert knn_accuracy(x, labels, learned, known) == pytest.approx(100 * (votes.argmax(1) == labels.numpy()).mean())
    scaled = [(z - learned.mean(0)) / learned.std(0) for z in (learned, x)]
    # scikit-learn's C weighs the sum over the images against half the squared weights
    model = LogisticRegression(C=1 / (2 * 1e-3 * 1500), max_iter=1000).fit(scaled[0], known)
    assert probe_accuracy(x, labels, learned, known) == pytest.approx(100 * model.score(scaled[1], labels), abs=0.51)


def test_a_model_is_nearest_to_itself(vit):
    student, teacher = pair(vit, phases=3)  # exactly the teacher
    found = evaluate_embeddings(student, batches(), teacher=teacher, labelled=batches(seed=1), steps=(3, 6))
    first, same, other = found.results
    assert (first.model, first.cosine, first.error, first.neighbours) == ('teacher', 1, 0, 100)
    assert same.cosine == pytest.approx(1) and same.error == pytest.approx(0, abs=1e-9) and same.neighbours == 100
    assert same.knn == first.knn and same.probe == first.probe
    assert other.cosine < 1 and other.error > 0 and other.steps == 6 and other.nfe == 6
    assert student.blocks.steps == 3
    text = str(found)
    assert 'cosine' in text and 'top-1' not in text and '1.0000' in text
    assert json.loads(found.to_json())[1]['neighbours'] == 100
    assert found._repr_markdown_() == text


def test_the_error_is_relative_to_the_teachers_variance_and_zero_shot_is_the_largest_cosine(vit):
    (student, teacher), images = pair(vit), torch.cat([x for x, _ in batches()])
    classes = torch.randn(3, 32) * torch.tensor([[1.], [9.], [99.]])  # of any norm
    found = evaluate_embeddings(student, batches(), teacher=teacher, class_embeddings=classes).results[-1]
    with torch.no_grad():
        ours, theirs = student.eval()(images), teacher.eval()(images)
    assert found.error == pytest.approx(((ours - theirs).square().mean() / theirs.var(0, correction=0).mean()).item(), rel=1e-4)
    right = F.cosine_similarity(ours[:, None], classes, dim=-1).argmax(1) == torch.cat([labels for _, labels in batches()])
    assert found.zero_shot == pytest.approx(100 * right.double().mean().item())


def test_without_a_teacher_and_without_labels_there_is_nothing_to_compare(vit):
    found = evaluate_embeddings(vit(num_classes=0), batches()).results[0]
    assert found.cosine is None and found.knn is None and found.images == 12
    images = torch.cat([x for x, _ in batches()])
    assert evaluate_embeddings(vit(num_classes=0), images).results[0].images == 12
    one = evaluate_embeddings(vit(num_classes=1), images, teacher=vit(num_classes=1)).results[-1]
    assert one.cosine is one.neighbours is None and one.error is not None  # the cosine of two numbers says nothing
    with pytest.raises(ValueError, match=r'images \[B, C, H, W\] and labels \[B\]; got torch.float32'):
        evaluate_embeddings(vit(num_classes=0), images, class_embeddings=torch.randn(3, 32))


def test_bad_input(vit):
    student, teacher = pair(vit)
    with pytest.raises(ValueError, match='evaluate_embeddings'):
        evaluate(student, batches())
    with pytest.raises(ValueError, match='gives embeddings .*32.*, the teacher .*5'):
        evaluate_embeddings(student, batches(), teacher=vit())
    with pytest.raises(ValueError, match='gave no images'):
        evaluate_embeddings(student, [])
    for alone in evaluate_embeddings(student, batches(1, 1), teacher=teacher).results:
        assert alone.error is None and alone.neighbours is None and alone.cosine is not None
    for options, message in [
            (dict(labelled=batches(1, 1)), 'at least 2 classes'), (dict(labelled=batches()), 'the images that are classified'),
            (dict(labelled=[(x, y - 1) for x, y in batches(seed=1)]), 'whole numbers from 0; got torch.int64 from -1'),
            (dict(class_embeddings=[[math.nan] * 32] * 3), 'class_embeddings must be finite numbers')]:
        with pytest.raises(ValueError, match=message):
            evaluate_embeddings(student, batches(), **options)


def test_embeddings_that_are_not_finite_are_never_right(vit):
    student, teacher = pair(vit)
    x, y = torch.randn(12, 3, 16, 16), torch.arange(12) % 2
    with torch.no_grad():
        student.norm.weight.fill_(math.nan)
    with pytest.warns(RuntimeWarning, match='the embeddings of 12 of 12 images are not finite'):
        found = evaluate_embeddings(student, (x, y), labelled=(x + 1e-3, y), class_embeddings=torch.randn(3, 32), teacher=teacher)
    bad = found.results[-1]
    assert (bad.knn, bad.probe, bad.zero_shot, bad.neighbours, bad.cosine) == (0., 0., 0., 0., 0.)
    assert found.results[0].probe == 100.


def test_without_scikit_learn_it_is_said_what_to_install(vit, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn', None)
    with pytest.raises(ImportError, match='pip install scikit-learn'):
        evaluate_embeddings(vit(num_classes=0), batches(), labelled=batches(seed=1))
    assert evaluate_embeddings(vit(num_classes=0), batches(), teacher=vit(num_classes=0)).results[1].neighbours is not None


def test_labels_of_another_integer_type_inside_inference_mode(vit):
    model, few = vit(num_classes=0), [[(x, y.to(torch.uint8)) for x, y in batches(seed=seed)] for seed in (0, 1)]
    expected = evaluate_embeddings(model, batches(), labelled=batches(seed=1)).results[0]
    with torch.inference_mode():
        found = evaluate_embeddings(model, few[0], labelled=few[1]).results[0]
    assert (found.knn, found.probe) == (expected.knn, expected.probe)


# --- training

@pytest.mark.parametrize('settings', [{}, dict(exits=(0.5,), exit_weight=0.5)], ids=str)
def test_training_comes_nearer_to_the_teachers_embeddings(vit, settings, tmp_path):
    student, teacher = pair(vit, phases=2)
    task = TrajectoryDistillationTask(student, teacher, **settings)
    before = evaluate_embeddings(student, batches(), teacher=teacher).results[-1]
    history = fit(task, batches(), batches(), out=tmp_path / 'run', epochs=8, lr=3e-3)
    after = evaluate_embeddings(student, batches(), teacher=teacher).results[-1]
    assert after.cosine > before.cosine and after.error < before.error
    assert history[-1]['val_cosine'] == pytest.approx(after.cosine, abs=1e-6) and 'val_top1' not in history[-1]
    best = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    chosen = evaluate_embeddings(best, batches(), teacher=teacher).results[-1].cosine
    assert chosen == pytest.approx(max(record['val_cosine'] for record in history), abs=1e-6)


def test_the_outputs_of_a_model_with_a_projection_are_embeddings_if_said_so(vit):
    """CLIP's image towers have their projection where others have classes; labels then mean nothing."""
    teacher = vit(num_classes=7)
    student = convert_(copy.deepcopy(teacher)).model
    images, labels = torch.randn(4, 3, 16, 16), torch.full((4,), 99)
    parts = TrajectoryDistillationTask(student, teacher, embedding=True)(images, labels)
    torch.testing.assert_close(parts['kd_loss'], embedding_loss(student(images), teacher(images)))
    assert 'task_loss' not in parts
    task = TrajectoryDistillationTask(student, teacher, embedding=True)
    assert 'val_neighbours' in fit(task, [(images, labels)], [(images, labels)], epochs=1)[0]


def test_a_projection_is_no_classifier_and_a_head_that_must_stay_is_refused(vit):
    projecting, headless, student = vit(), vit(num_classes=0), vit()
    projecting.head.bias.data.zero_()
    assert without_classifiers(student, projecting) == (student, projecting)
    assert [each.num_classes for each in without_classifiers(student, headless)] == [0, 0] and student.num_classes == 5
    student.reset_classifier = None
    with pytest.raises(ValueError, match='The head of this VisionTransformer cannot be left out'):
        without_classifiers(student)


@pytest.mark.parametrize('recipe, classes', [('embedding', 0), ('zero_shot', 6)])
def test_recipes(vit, recipe, classes, tmp_path):
    npz(tmp_path / 'd.npz')
    teacher = vit(num_classes=classes, depth=6)
    made = Recipe.load(recipe, ['data.batch_size=12', 'stages.0.fit.epochs=1'])
    train(made, tmp_path / 'd.npz', tmp_path / 'run', teacher=teacher)
    student = timm.create_model(f"local-dir:{tmp_path / 'run' / 'best'}", pretrained=True)
    history = json.loads((tmp_path / 'run' / 'history.json').read_text())
    assert all('val_cosine' in record for record in history)
    outside = {name: p for name, p in teacher.state_dict().items() if 'blocks.' not in name}
    kept = all(torch.equal(p, student.state_dict()[name]) for name, p in outside.items())
    assert kept == (recipe == 'zero_shot')  # the texts need the rest as it is


def test_a_student_of_a_classifiers_embeddings_has_no_head(vit, images, tmp_path, monkeypatch):
    assert without_classifiers(convert_(vit(), halting='entropy').model, vit(num_classes=0))[0](images).shape == (2, 32)
    monkeypatch.chdir(tmp_path)
    npz('d.npz')
    save_pretrained(vit(depth=6), 'teacher')  # its head has a bias
    command = ['distill', 'embedding', 'd.npz', 'run', '--teacher', 'local-dir:teacher', '--quiet']
    assert main([*command, *[f'--set={each}' for each in ('data.batch_size=12', 'stages.0.fit.epochs=1')]]) == 0
    assert timm.create_model('local-dir:run/best', pretrained=True).num_classes == 0
    assert main(['evaluate', 'local-dir:run/best', 'd.npz', '--teacher', 'local-dir:teacher', '--quiet', '--json', 'a.json']) == 0
    assert json.loads((tmp_path / 'a.json').read_text())[0]['cosine'] > 0


def test_the_training_images_of_a_folder_are_labelled_ones(vit, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(vit(num_classes=0), 'model')
    for part in ('val', 'train'):
        for label in range(3):
            (tmp_path / 'images' / part / f'c{label}').mkdir(parents=True)
            for i in range(4):
                Image.new('RGB', (16, 16), (100 * label, 9 * i, len(part))).save(tmp_path / 'images' / part / f'c{label}' / f'{i}.png')

    def rows(*args):
        workers = () if args[0].endswith('.npz') else ('--workers', '0')
        assert main(['evaluate', 'local-dir:model', *args, '--quiet', *workers, '--json', 'a.json']) == 0
        return json.loads((tmp_path / 'a.json').read_text())
    same = '--teacher', 'local-dir:model'  # without a teacher, there would be nothing to compare with
    assert rows('images')[0]['knn'] == 100 and rows('images/train', '--held-out', '0.3')[0]['knn'] is not None
    assert rows('images/val', *same)[0]['knn'] is None
    (tmp_path / 'all').mkdir()
    (tmp_path / 'images' / 'train' / 'c1').rename(tmp_path / 'all' / 'c1')
    assert rows('all', '--held-out', '0.3', *same)[0]['knn'] is None  # of one class, there is nothing to measure
    np.savez('one.npz', x_train=np.zeros((9, 16, 16, 3), np.uint8), y_train=np.zeros(9, int), x_test=np.zeros((9, 16, 16, 3), np.uint8), y_test=np.zeros(9, int))
    assert rows('one.npz', *same)[0]['knn'] is None
    (tmp_path / 'all' / 'c1').rename(tmp_path / 'images' / 'train' / 'c1')
    (tmp_path / 'images' / 'val' / 'c2').rename(tmp_path / 'images' / 'val' / 'c3')
    capsys.readouterr()
    assert main(['evaluate', 'local-dir:model', 'images', '--quiet', '--workers', '0']) == 2
    assert "have different classes. Only one of them has c2, c3. To evaluate without the training images, give 'images/val'" in capsys.readouterr().err
