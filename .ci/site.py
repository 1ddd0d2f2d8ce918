"""The documentation site, for mkdocs.yml: the repository's Markdown where it lies, and a reference of all public names.

Pages keep their paths, so their links mean the same in the site as in the repository; what a page links to comes along.
"""
import re
from pathlib import Path

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r'(\]\((?![a-z]+:|#))([^)#\s]+)')  # a relative link or picture, without its anchor

# what one does, and the modules whose public names do it; if two fit, the longer
SECTIONS = {
    'Make a small model': ('shrinking',),
    'Convert': ('convert', 'ode'),
    'Train': ('training',),
    'Evaluate': ('evaluation',),
    'Dynamics': ('dynamics',),
    'Save and share': ('convert.merge', 'saving', 'deploy', 'reporting'),
    'Other libraries': ('interop',),
}
INTRODUCTION = """# API reference

The public names of `timm_odevit`, and the classes that they return. In the examples, `vit` is a pretrained timm model, `teacher` a copy
of it, `student` the same model converted, `images` a batch of images, normalised for the model, `loader` batches of images and labels,
and `photos` a folder of images.
"""


def on_files(files, config):
    """Take the pages and, from page to page, what they link to; and set the navigation."""
    order = links('examples/README.md')
    guide = ['examples/' + file.src_uri for file in files if '/' not in file.src_uri and file.src_uri.endswith('.md')]
    guide.sort(key=lambda page: (page != 'examples/README.md', order.index(page) if page in order else len(order), page))
    results = [f'hub/{name}.md' for name in ('RESULTS', 'SPEED', 'DYNAMICS', 'TRAINING')]
    models = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('hub/*/README.md'))
    project = [name for name in ('CHANGELOG.md', 'CONTRIBUTING.md') if (ROOT / name).exists()]

    found = dict.fromkeys(['README.md', *guide, *results, *models, *project])
    for page in (todo := list(found)):
        new = [path for path in links(page) if path not in found and (ROOT / path).is_file()] if page.endswith('.md') else []
        guide += [path for path in new if path.endswith('.md')]
        found.update(dict.fromkeys(new))
        todo += new
    config.nav = [{'Home': 'README.md'}, {'Guide': guide}, {'API reference': 'api.md'}, {'Results': results},
                  {'Models': models}, {'Project': project}]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *(File.generated(config, path, abs_src_path=str(ROOT / path)) for path in found),
                  File.generated(config, 'api.md', content=reference())])


def on_page_markdown(markdown, page, config, files):
    """Let a link to a folder lead to the page in it."""
    folder = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda link: link[1] + page_in(folder, link[2]), markdown)


def page_in(folder, target):
    return f"{target.rstrip('/')}/README.md" if (folder / target / 'README.md').is_file() else target


def links(page):
    """The paths that a page links to."""
    folder = (ROOT / page).parent
    return [(folder / page_in(folder, target)).resolve().relative_to(ROOT).as_posix()
            for _, target in LINK.findall((ROOT / page).read_text())]


def reference():
    """The page of all public names by section, each followed by the classes of what it returns."""
    package = griffe.load('timm_odevit', search_paths=[ROOT])
    public = {package[name].target_path: name for name in package.exports if name != '__version__'}
    sections = {section: [] for section in SECTIONS}
    for path in public:
        fitting = {prefix: section for section, prefixes in SECTIONS.items() for prefix in prefixes
                   if path.startswith(f'timm_odevit.{prefix}.')}
        if not fitting:
            raise PluginError(f'Which section of the reference has {path}? Add its module to SECTIONS in .ci/site.py.')
        sections[fitting[max(fitting, key=len)]].append(path)

    text, shown = INTRODUCTION, set(public)
    for section, paths in sections.items():
        text += f'\n## {section}\n'
        for path in sorted(paths, key=lambda path: public[path].lower()):
            text += f'\n::: timm_odevit.{public[path]}\n'
            returned = getattr(package[public[path]], 'returns', None)
            names = returned.iterate(flat=True) if isinstance(returned, griffe.Expr) else ()
            for name in [name.canonical_path for name in names if isinstance(name, griffe.ExprName)]:
                if name.startswith('timm_odevit.') and name not in shown:
                    shown.add(name)
                    text += f'\n::: {name}\n'
    return text
