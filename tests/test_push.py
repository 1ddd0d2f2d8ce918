"""Round trips through the Hub: the real client, a server on the loopback."""
import json
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from hub_server import TOKEN, HubServer
from huggingface_hub import ModelCard
from safetensors.torch import load as read
from safetensors.torch import load_file, save

from timm_odevit import cli, convert_, evaluate, push_to_hub, save_pretrained
from timm_odevit.saving.cards import model_card

HUB = Path(__file__).parent.parent / 'hub'


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, 'ENDPOINT', server.url)
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', server.url + '/{repo_id}/resolve/{revision}/{filename}')
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)  # Xet speaks to servers of its own
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        yield server


@pytest.fixture
def student(vit):
    return convert_(vit(), phases=2, steps=6).model


def load(name, **kwargs):
    return timm.create_model(f'hf-hub:{name}', pretrained=True, **kwargs).eval()


def test_a_model_on_the_hub_is_converted_by_the_command_line(hub, vit, images, tmp_path, capsys):
    model = vit()
    push_to_hub(model, 'org/teacher')
    out = str(tmp_path / 'exact')
    assert cli.main(['convert', 'hf-hub:org/teacher', out, '--phases', '3']) == 0, capsys.readouterr().err
    torch.testing.assert_close(timm.create_model(f'local-dir:{out}', pretrained=True).eval()(images), model(images))
    assert cli.main(['convert', 'hf-hub:org/nothing', str(tmp_path / 'none')]) == 2
    error = capsys.readouterr().err
    assert 'org/nothing' in error and 'Traceback' not in error and not (tmp_path / 'none').exists()


def test_cards_have_metadata_that_the_hub_understands_and_code_that_runs(hub, student, images, monkeypatch):
    rows = json.loads(evaluate(student, [(images, torch.tensor([0, 1]))], steps=(3, 6), teacher=student).to_json())
    push_to_hub(student, 'org/student', results=rows, dataset='CIFAR-10', license='mit')
    card = ModelCard(hub.repos['org/student'].at('main')[1]['README.md'].decode())
    assert card.data.license == 'mit' and card.data.datasets == ['cifar10'] and card.data.library_name == 'timm'
    assert [r.metric_name for r in card.data.eval_results] == ['top-1 with K = 3', 'top-1 with K = 6']
    assert card.data.eval_results[0].metric_value == pytest.approx(rows[1]['top1'] / 100)
    names = {}
    exec(card.text.split('```python\n')[1].split('```')[0], names)
    assert names['logits'].shape == (1, 5) and len(names['model'].blocks) == 6  # as saved: which others it was trained with is not known
    assert '- Base: `vit_tiny_patch16_224`' in card.text and '@article' in card.text


def test_a_missing_and_an_empty_repository(hub, student):
    push_to_hub(student, 'org/student')
    for name, error in (('org/missing', 'RepositoryNotFoundError'), ('org/student@v9', 'RevisionNotFoundError')):
        with pytest.raises(getattr(huggingface_hub.errors, error)):
            load(name)
    repo = hub.repos['org/student']
    repo.commit('main', {'config.json': repo.at('main')[1]['config.json'], 'pytorch_model.bin': b'\x80'})
    with pytest.raises(OSError, match='model.safetensors of org/student could not be downloaded'):
        load('org/student')
    assert not hub.sent('GET', 'pytorch_model.bin')


def test_a_published_model_is_downloaded_where_its_file_is_absent(hub, student, images, monkeypatch):
    folder = HUB / 'odevit_tiny_native_patch16_128.deit_tiny_cifar100'
    push_to_hub(folder, f'timm-odevit/{folder.name}')
    cfg = timm.get_pretrained_cfg(folder.name)
    cfg.file = None
    stored = load_file(folder / 'test' / 'tensors.safetensors')
    model = timm.create_model(folder.name.split('.')[0], pretrained=True, pretrained_cfg=cfg).eval()
    torch.testing.assert_close(model(stored['input']), stored['output'], rtol=1e-3, atol=1e-3)
    assert hub.sent('GET', 'model.safetensors')


def test_another_file_of_a_repository(hub, student):
    push_to_hub(student, 'org/student')
    repo, twice = hub.repos['org/student'], {k: v * 2 for k, v in student.state_dict().items()}
    repo.commit('main', {**repo.at('main')[1], 'other.safetensors': save(twice)})
    found = load('org/student', pretrained_cfg_overlay={'hf_hub_filename': 'other.safetensors'})
    assert torch.equal(found.head.weight, 2 * student.head.weight)
    with pytest.raises(ValueError, match="'other.bin': only .safetensors files are read"):
        load('org/student', pretrained_cfg_overlay={'hf_hub_filename': 'other.bin'})


def test_there_and_back_gives_the_same_logits(hub, student, vit, images, tmp_path):
    url = push_to_hub(student, 'org/student')
    oid, files = hub.repos['org/student'].at('main')
    assert url == f'{hub.url}/org/student/commit/{oid}'
    assert set(files) == {'README.md', 'config.json', 'model.safetensors', 'test/tensors.safetensors'}
    again = load('org/student', cache_dir=tmp_path / 'mine')
    assert list((tmp_path / 'mine').rglob('model.safetensors')) and not (tmp_path / 'cache').exists()
    assert torch.equal(again(images), student(images)) and again.blocks.config == student.blocks.config
    stored = read(files['test/tensors.safetensors'])
    assert torch.equal(again(stored['input']), stored['output'])
    assert load('org/student', num_classes=3)(images).shape == (2, 3)
    assert load('org/student', features_only=True)(images)
    plain = vit()
    push_to_hub(plain, 'org/teacher')
    assert torch.equal(load('org/teacher')(images), plain(images))


def test_private_and_another_branch(hub, student, tmp_path, monkeypatch):
    push_to_hub(student, 'org/student', private=True)
    assert hub.repos['org/student'].private
    student.blocks.steps = 3
    push_to_hub(student, 'org/fast')
    hub.repos['org/student'].commit('fast', hub.repos['org/fast'].at('main')[1])
    assert load('org/student').blocks.steps == 6 and load('org/student@fast').blocks.steps == 3
    monkeypatch.setenv('HF_TOKEN', 'hf_other')
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        load('org/student', cache_dir=tmp_path / 'another')  # what one has, one keeps
    with pytest.raises(OSError, match='org/student on the Hub: .*401') as e:
        push_to_hub(student, 'org/student')
    assert '\n' not in str(e.value)


def test_a_card_that_is_there_is_kept(hub, student, images):
    push_to_hub(student, 'org/student')
    repo = hub.repos['org/student']
    repo.commit('main', {**repo.at('main')[1], 'README.md': b'---\nlicense: mit\n---\nmine\n'})
    student.blocks.steps = 3
    push_to_hub(student, 'org/student')
    assert repo.at('main')[1]['README.md'].endswith(b'mine\n') and load('org/student').blocks.steps == 3
    rows = json.loads(evaluate(student, [(images, torch.tensor([0, 1]))], steps=(3, 6)).to_json())
    push_to_hub(student, 'org/student', results=rows, dataset='CIFAR-10')
    assert b'of CIFAR-10' in repo.at('main')[1]['README.md']


def test_a_folder_is_sent_as_it_is_without_what_is_not_the_models(hub, student, images, tmp_path):
    folder = save_pretrained(student, tmp_path / 'student')
    for name in ('pytorch_model.bin', 'notes.txt', '.secret'):
        (folder / name).write_bytes(b'\x80')
    (folder / 'README.md').write_text('---\nlicense: mit\n---\nmine\n')
    push_to_hub(folder, 'org/student')
    files = hub.repos['org/student'].at('main')[1]
    assert set(files) == {'README.md', 'config.json', 'model.safetensors'}
    assert all(content == (folder / name).read_bytes() for name, content in files.items())
    assert torch.equal(load('org/student')(images), student(images))


def test_what_cannot_be_sent(hub, student, tmp_path):
    folder = save_pretrained(student, tmp_path / 'student')
    with pytest.raises(ValueError, match='A folder is sent as it is'):
        push_to_hub(folder, 'org/a', license='mit')
    with pytest.raises(FileNotFoundError):
        push_to_hub(tmp_path / 'empty', 'org/a')
    (folder / 'model.safetensors').write_bytes(b'junk')
    with pytest.raises(ValueError, match='not a valid'):
        push_to_hub(folder, 'org/a')
    for given in (dict(results=[{'top1': 1}], dataset='x'), dict(results=[{'agreement': 1}]), dict(results=object(), dataset='x')):
        with pytest.raises(ValueError, match='results must be rows .* with the name of their dataset'):
            push_to_hub(student, 'org/a', **given)
    student.pretrained_cfg = {**student.pretrained_cfg, 'license': None}
    with pytest.raises(ValueError, match='The licence of these weights is not known. Give license='):
        push_to_hub(student, 'org/a')
    assert not hub.repos
    with pytest.raises(OSError, match='org/a on the Hub: .*license'):
        push_to_hub(student, 'org/a', license='no-such-licence')
    assert not hub.sent('POST', '/commit/')


def test_names_of_classes_cannot_forge_a_section_or_html(student):
    names = ['a\n\n## Licence\n\nMIT', '<img src=x onerror=alert(1)>', 'b\r\u2028# c', '[x](http://y) *b* _i_ `k`', 'maple_tree']
    student.pretrained_cfg.update(num_classes=5, label_names=names, license='cc-by-nc-4.0')
    text = model_card('x', student)
    assert ModelCard(text).data.license == 'cc-by-nc-4.0' and '\n## Licence\n' not in text and '<img' not in text
    line = next(line for line in text.splitlines() if line.startswith('Its 5 classes: '))
    assert r'a \#\# Licence MIT, &lt;img src=x onerror=alert(1)&gt;, b \# c, \[x\](http://y) \*b\* \_i\_ \`k\`, maple_tree.' in line


def test_a_model_without_classes_gives_embeddings(student):
    student.reset_classifier(0)
    text = model_card('x', student)
    assert 'pipeline_tag: image-feature-extraction' in text and 'embedding = model(' in text and 'classification' not in text


def test_the_command_line(hub, student, images, tmp_path, capsys):
    save_pretrained(student, tmp_path / 'student')
    push = ['push', f"local-dir:{tmp_path / 'student'}", 'org/student']
    assert cli.main([*push, '--card', str(tmp_path / 'card.md')]) == 0 and 'nothing was sent' in capsys.readouterr().out
    assert not hub.repos and 'hf-hub:org/student' in (tmp_path / 'card.md').read_text()
    (tmp_path / 'results.json').write_text(evaluate(student, [(images, torch.tensor([0, 1]))]).to_json())
    assert cli.main([*push, '--results', str(tmp_path / 'results.json'), '--dataset', 'CIFAR-10', '--private']) == 0
    assert 'sent: http' in capsys.readouterr().out and hub.repos['org/student'].private
    assert torch.equal(load('org/student')(images), student(images))
    (tmp_path / 'student' / 'README.md').write_text('---\nlicense: mit\n---\nmine')
    (tmp_path / 'student' / 'recipe.yaml').write_text('stages: []')
    assert cli.main([*push[:2], 'org/folder']) == 0  # as it is, with its card
    files = hub.repos['org/folder'].at('main')[1]
    assert files['README.md'].endswith(b'mine') and 'recipe.yaml' in files
    assert cli.main([*push[:2], 'org/folder', '--private']) == 2 and 'it exists and is public' in capsys.readouterr().err
    assert cli.main([*push, '--results', str(tmp_path / 'none.json')]) == 2 and 'none.json' in capsys.readouterr().err
    assert cli.main([*push, '--license', 'no-such-licence']) == 2 and 'license' in capsys.readouterr().err
