"""A small server that speaks to the huggingface_hub client as the Hub does, for tests: repositories in memory, on the loopback."""
import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

import yaml

TOKEN = 'hf_test'
LICENSES = ('apache-2.0', 'mit', 'cc-by-4.0', 'cc-by-nc-4.0', 'other')
TASKS = ('image-classification', 'image-feature-extraction')


class Repo:
    def __init__(self, private=False):
        self.private = private
        self.commits = {'0' * 40: {}}  # oid: {path: bytes}
        self.refs = {'main': '0' * 40}

    def commit(self, ref, files):
        oid = hashlib.sha1(f'{ref} {len(self.commits)}'.encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        return oid

    def at(self, revision):
        oid = self.refs.get(revision, revision)
        return (oid, self.commits[oid]) if oid in self.commits else (None, None)


def is_lfs(path):
    return path.endswith('.safetensors')


def blob_id(content):
    return hashlib.sha1(f'blob {len(content)}\0'.encode() + content).hexdigest()


def about(path, content):
    found = {'type': 'file', 'path': path, 'size': len(content), 'oid': blob_id(content)}
    if is_lfs(path):
        found['lfs'] = {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 130}
    return found


def errors_in_card(content):
    """What the Hub's check of a card's metadata would say, for the fields that this project writes."""
    found = re.match(r'---\n(.*?)\n---\n', content, re.S)
    data = yaml.safe_load(found[1]) if found else {}
    errors = [] if isinstance(data.get('license'), str) and data['license'] in LICENSES else ['"license" must be one of the list']
    if data.get('pipeline_tag') not in (None, *TASKS):
        errors.append('"pipeline_tag" is not known')
    for name in ('tags', 'datasets'):
        if not isinstance(data.get(name, []), list) or not all(isinstance(v, str) for v in data.get(name, [])):
            errors.append(f'"{name}" must be an array of strings')
    for model in data.get('model-index', []):
        for result in model['results']:
            if not {'task', 'dataset', 'metrics'} <= set(result) or not {'type', 'name'} <= set(result['dataset']):
                errors.append('"model-index" lacks a task, a dataset or metrics')
            if any(not {'type', 'value'} <= set(metric) for metric in result['metrics']):
                errors.append('"model-index" lacks a metric\'s type or value')
    return errors


class HubServer:
    """`with HubServer() as hub:` listens at `hub.url`; `hub.repos` maps 'org/name' to repositories."""

    def __init__(self):
        self.repos, self.lfs, self.log = {}, {}, []

    def __enter__(self):
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (Handler,), {'hub': self}))
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def sent(self, method, part):
        return [path for m, path in self.log if m == method and part in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def reply(self, code=200, body=None, **headers):
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def fail(self, code, kind, message, **headers):
        self.reply(code, {'error': message}, X_Error_Code=kind, X_Error_Message=message, **headers)

    def body(self):
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    @property
    def allowed(self):
        return self.headers.get('Authorization') == f'Bearer {TOKEN}'

    def handle_any(self):
        url = urlparse(self.path)
        self.hub.log.append((self.command, self.path))
        path, query = unquote(url.path), parse_qs(url.query)
        for method, pattern, name in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method == self.command.replace('HEAD', 'GET'):
                return getattr(self, name)(*found.groups(), query=query)
        self.body()
        self.fail(404, 'NotFound', f'no route for {self.command} {self.path}')

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def repo(self, name, write=False):
        """The repository, or None after an error was sent."""
        repo = self.hub.repos.get(name)
        if write and not self.allowed:
            self.fail(401, '', 'Invalid username or password.')
        elif repo is None or (repo.private and not self.allowed):
            self.fail(404, 'RepoNotFound', 'Repository not found')
        else:
            return repo

    def create(self, query):
        asked = json.loads(self.body())
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not self.allowed:
            return self.fail(401, '', 'Invalid username or password.')
        if name in self.hub.repos:
            return self.reply(409, {'error': 'You already created this model repo', 'url': f'{self.hub.url}/{name}'})
        self.hub.repos[name] = Repo(private=asked.get('private', asked.get('visibility') == 'private'))
        self.reply(body={'url': f'{self.hub.url}/{name}', 'name': name})

    def validate(self, query):
        errors = errors_in_card(json.loads(self.body())['content'])
        self.reply(200 if not errors else 400, {'errors': [{'message': e} for e in errors], 'warnings': []})

    def info(self, name, revision=None, query=None):
        repo = self.repo(name)
        if repo is None:
            return None
        oid, files = repo.at(revision or 'main')
        if files is None:
            return self.fail(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        self.reply(body={'id': name, 'modelId': name, 'sha': oid, 'private': repo.private, 'tags': [], 'downloads': 0,
                         'siblings': [{'rfilename': path} for path in sorted(files)]})

    def branch(self, name, branch, query):
        repo = self.repo(name, write=True)
        self.body()
        if repo is not None:
            if branch in repo.refs:
                return self.fail(409, '', 'Reference already exists')
            repo.refs[branch] = repo.refs['main']
            self.reply()

    def preupload(self, name, revision, query):
        asked = json.loads(self.body())['files']
        repo = self.repo(name, write=True)
        if repo is not None:
            files = repo.at(revision)[1]
            if files is None:
                return self.fail(404, 'RevisionNotFound', f'Invalid rev id: {revision}')

            def oid(path):
                found = about(path, files[path]) if path in files else {}
                return found.get('lfs', found).get('oid')
            self.reply(body={'files': [{'path': f['path'], 'uploadMode': 'lfs' if is_lfs(f['path']) else 'regular',
                                        'shouldIgnore': False, 'oid': oid(f['path'])} for f in asked]})

    def batch(self, name, query):
        asked = json.loads(self.body())
        if self.repo(name, write=True) is not None:
            objects = [dict(o) if o['oid'] in self.hub.lfs else dict(
                o, actions={'upload': {'href': f"{self.hub.url}/lfs/{o['oid']}"}}) for o in asked['objects']]
            self.reply(body={'transfer': 'basic', 'objects': objects})

    def upload(self, oid, query):
        content = self.body()
        if hashlib.sha256(content).hexdigest() != oid:
            return self.fail(400, '', 'the SHA-256 of the content is another one')
        self.hub.lfs[oid] = content
        self.reply()

    def commit(self, name, revision, query):
        lines = [json.loads(line) for line in self.body().splitlines()]
        repo = self.repo(name, write=True)
        if repo is None:
            return
        oid, files = repo.at(revision)
        if files is None:
            return self.fail(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        files = dict(files)
        for line in lines:
            value = line['value']
            if line['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif line['key'] == 'lfsFile':
                files[value['path']] = self.hub.lfs[value['oid']]
            elif line['key'] == 'deletedFile':
                files.pop(value['path'])
        pull = 'create_pr' in query
        ref = f'refs/pr/{sum(r.startswith("refs/pr/") for r in repo.refs) + 1}' if pull else revision
        oid = repo.commit(ref, files)
        done = {'success': True, 'commitOid': oid, 'commitUrl': f'{self.hub.url}/{name}/commit/{oid}'}
        if pull:
            done['pullRequestUrl'] = f'{self.hub.url}/{name}/discussions/{ref.rsplit("/", 1)[-1]}'
        self.reply(body=done)

    def resolve(self, name, rest, query):
        repo = self.repo(name)
        if repo is None:
            return
        # a ref may hold slashes
        revision = next((r for r in sorted(repo.refs, key=len, reverse=True) if rest.startswith(f'{r}/')), rest.split('/')[0])
        path = rest[len(revision) + 1:]
        oid, files = repo.at(revision)
        if files is None:
            return self.fail(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        if path not in files:
            return self.fail(404, 'EntryNotFound', 'Entry not found', X_Repo_Commit=oid)
        content = files[path]
        etag = hashlib.sha256(content).hexdigest() if is_lfs(path) else blob_id(content)
        headers = {'ETag': f'"{etag}"', 'X_Repo_Commit': oid, 'X_Linked_ETag': f'"{etag}"', 'X_Linked_Size': str(len(content))}
        self.reply(200, content, **headers)


NAME, REV = r'([\w.-]+/[\w.-]+)', r'([^?]+)'
ROUTES = [
    ('POST', '/api/repos/create', 'create'),
    ('POST', '/api/validate-yaml', 'validate'),
    ('GET', f'/api/models/{NAME}', 'info'),
    ('GET', f'/api/models/{NAME}/revision/{REV}', 'info'),
    ('POST', f'/api/models/{NAME}/branch/{REV}', 'branch'),
    ('POST', f'/api/models/{NAME}/preupload/{REV}', 'preupload'),
    ('POST', f'/{NAME}\\.git/info/lfs/objects/batch', 'batch'),
    ('PUT', '/lfs/([0-9a-f]{64})', 'upload'),
    ('POST', f'/api/models/{NAME}/commit/{REV}', 'commit'),
    ('GET', f'/{NAME}/resolve/(.+)', 'resolve'),
]
