"""A small server that speaks to the huggingface_hub client as the Hub does, for tests: repositories in memory, on the loopback."""
import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml

TOKEN = 'hf_test'
LICENSES = ('apache-2.0', 'mit', 'cc-by-4.0', 'cc-by-nc-4.0', 'other')
TASKS = ('image-classification', 'image-feature-extraction')


class RefusedError(Exception):
    """Status, the Hub's code, a message, and what else the answer has."""


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
        if oid not in self.commits:
            raise RefusedError(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        return oid, self.commits[oid]


def errors_in_card(content):
    """What the Hub's check of a card's metadata would say, for the fields that this project writes."""
    found = re.match(r'---\n(.*?)\n---\n', content, re.S)
    data = yaml.safe_load(found[1]) if found else {}
    results = [result for model in data.get('model-index', []) for result in model['results']]
    return [message for right, message in (
        (data.get('license') in LICENSES, '"license" must be one of the list'),
        (data.get('pipeline_tag') in (None, *TASKS), '"pipeline_tag" is not known'),
        (all(isinstance(value, str) for name in ('tags', 'datasets') for value in data.get(name, [])), 'tags and datasets must be strings'),
        (all({'task', 'dataset', 'metrics'} <= set(result) and {'type', 'name'} <= set(result['dataset'])
             and all({'type', 'value'} <= set(metric) for metric in result['metrics']) for result in results),
         '"model-index" lacks a task, a dataset or metrics'),
    ) if not right]


class HubServer:
    """`with HubServer() as hub:` listens at `hub.url`; `hub.repos` maps 'org/name' to repositories."""

    def __init__(self):
        self.repos, self.log = {}, []

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

    def handle_any(self):
        url = urlparse(self.path)
        self.hub.log.append((self.command, self.path))
        self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        try:
            for method, pattern, name in ROUTES:
                found = re.fullmatch(pattern, unquote(url.path))
                if found and method == self.command.replace('HEAD', 'GET'):
                    answer = getattr(self, name)(*found.groups())
                    return self.reply(200, *answer if isinstance(answer, tuple) else (answer,))
            raise RefusedError(404, 'NotFound', f'no route for {self.command} {self.path}')
        except RefusedError as e:
            code, kind, message, *more = e.args
            self.reply(code, dict(*more, error=message), {'X-Error-Code': kind, 'X-Error-Message': message})

    do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

    def reply(self, code, body, headers=()):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {**dict(headers), 'Content-Length': str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def repo(self, name, write=False):
        repo, allowed = self.hub.repos.get(name), self.headers.get('Authorization') == f'Bearer {TOKEN}'
        if write and not allowed:
            raise RefusedError(401, '', 'Invalid username or password.')
        if not write and (repo is None or (repo.private and not allowed)):
            raise RefusedError(404, 'RepoNotFound', 'Repository not found')
        return repo

    # each returns the body of the answer and, if necessary, its headers

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        created = {'url': f'{self.hub.url}/{name}', 'name': name}
        if self.repo(name, write=True):
            raise RefusedError(409, '', 'You already created this model repo', created)
        self.hub.repos[name] = Repo(private=asked.get('private', asked.get('visibility') == 'private'))
        return created

    def validate(self):
        errors = errors_in_card(json.loads(self.body)['content'])
        if errors:
            raise RefusedError(400, '', 'Invalid metadata', {'errors': [{'message': e} for e in errors]})
        return {'errors': [], 'warnings': []}

    def info(self, name):
        repo = self.repo(name)
        return {'id': name, 'modelId': name, 'private': repo.private, 'tags': [], 'downloads': 0}

    def preupload(self, name, revision):
        self.repo(name, write=True).at(revision)
        return {'files': [{'path': asked['path'], 'uploadMode': 'regular', 'shouldIgnore': False, 'oid': None}
                          for asked in json.loads(self.body)['files']]}

    def commit(self, name, revision):
        repo = self.repo(name, write=True)
        files = dict(repo.at(revision)[1])
        for line in map(json.loads, self.body.splitlines()):
            if line['key'] == 'file':
                files[line['value']['path']] = base64.b64decode(line['value']['content'])
        oid = repo.commit(revision, files)
        return {'success': True, 'commitOid': oid, 'commitUrl': f'{self.hub.url}/{name}/commit/{oid}'}

    def resolve(self, name, rest):
        repo = self.repo(name)
        revision, _, path = rest.partition('/')
        oid, files = repo.at(revision)
        if path not in files:
            raise RefusedError(404, 'EntryNotFound', 'Entry not found')
        return files[path], {'ETag': f'"{hashlib.sha256(files[path]).hexdigest()}"', 'X-Repo-Commit': oid}


NAME, REV = r'([\w.-]+/[\w.-]+)', r'([^?]+)'
ROUTES = [
    ('POST', '/api/repos/create', 'create'),
    ('POST', '/api/validate-yaml', 'validate'),
    ('GET', f'/api/models/{NAME}', 'info'),
    ('POST', f'/api/models/{NAME}/preupload/{REV}', 'preupload'),
    ('POST', f'/api/models/{NAME}/commit/{REV}', 'commit'),
    ('GET', f'/{NAME}/resolve/(.+)', 'resolve'),
]
