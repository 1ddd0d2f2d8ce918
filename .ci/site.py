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
    'Save and share': ('saving', 'quantization', 'export'),
    'Other libraries': ('interop',),
}
INTRODUCTION = """# API reference

The public names of `timm_odevit`, and the classes that they return or hold. In the examples, `vit` is a pretrained
timm model, `teacher` a copy of it, `student` the same, converted, `clip` a CLIP of the library in question, `images` a
batch of images, normalised for it, `loader` batches of images and labels, and `photos` a folder of images.
"""


def on_files(files, config):
    """Take the pages and, from page to page, what they link to; and set the navigation."""
    guide = ['examples/' + file.src_uri for file in files if '/' not in file.src_uri and file.src_uri.endswith('.md')]
    order = ['examples/README.md', *links('examples/README.md')]
    guide.sort(key=lambda page: (order.index(page) if page in order else len(order), page))
    results, models = (sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
                       for pattern in ('hub/*.md', 'hub/*/README.md'))
    results.sort(key=lambda page: page != 'hub/RESULTS.md')
    project = [name for name in ('CHANGELOG.md', 'CONTRIBUTING.md') if (ROOT / name).exists()]

    found = dict.fromkeys(['README.md', *guide, *results, *models, *project])
    for page in (todo := list(found)):
        new = [path for path in dict.fromkeys(links(page)) if path not in found] if page.endswith('.md') else []
        found.update(dict.fromkeys(new))
        todo += new
        for path in new:
            if path.endswith('.md') and not path.endswith('README.md'):  # a folder is found by its link
                (results if path.startswith('hub/') else guide).append(path)
    config.nav = [{'Home': 'README.md'}, {'Guide': guide}, {'API reference': 'api.md'}, {'Results': results},
                  {'Models': models}, {'Project': project}]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    own = {path: {'abs_src_path': str(ROOT / path)} if (ROOT / path).is_file() else {'content': text_of(path)}
           for path in found}
    own |= {'api.md': {'content': reference()}, 'site.css': {'abs_src_path': str(ROOT / '.ci' / 'site.css')}}
    return Files([*theme, *(File.generated(config, path, **source) for path, source in own.items())])


def on_page_markdown(markdown, page, config, files):
    """Let a link to a folder lead to the page in it, which may be HTML."""
    markdown = re.sub(r'\[([^]]*)\]\(\.github/[^)]*\)', r'\1', markdown)  # which GitHub Pages does not serve
    return LINK.sub(lambda link: link[1] + page_in((ROOT / page.file.src_uri).parent, link[2]), markdown)


def links(page):
    """The files that a page links to, and the pages of folders."""
    folder = (ROOT / page).parent
    found = [(folder / page_in(folder, target)).resolve() for _, target in LINK.findall(text_of(page))]
    return [path.relative_to(ROOT).as_posix() for path in found
            if path.is_file() or (path.name == 'README.md' and path.parent.is_dir())]


def page_in(folder, target):
    if not (folder / target).is_dir():
        return target
    return target.rstrip('/') + ('/index.html' if (folder / target / 'index.html').exists() else '/README.md')


def text_of(page):
    """The text of a page, or of one that lists a folder."""
    path = ROOT / page
    if path.is_file():
        return path.read_text()
    names = sorted(each.name for each in path.parent.iterdir() if each.is_file())
    return f'# {path.parent.name}\n\n' + ''.join(f'- [{name}]({name})\n' for name in names)


def on_page_content(html, page, config, files):
    """Let long names in tables break at their joints, and the names that docstrings mention lead to the reference."""
    html = re.sub(r'(<td>(?:<a [^>]*>)?<code>)([^<]{24,})',
                  lambda cell: cell[1] + re.sub(r'[_.]', r'\g<0><wbr>', cell[2]), html)
    if page.file.src_uri != 'api.md':
        return html
    known = {'timm_odevit.dynamics': 'dynamics', **{anchor.split('.')[1]: anchor for anchor in
                                                    re.findall(r'id="(timm_odevit\.\w+)"', html)}}
    return re.sub(r'<code>([\w.]+)(\(\))?</code>', lambda code: (
        f'<a href="#{known[code[1]]}">{code[0]}</a>' if code[1] in known else code[0]), html)


def reference():
    """The page of all public names by section, each followed by the classes that it returns or holds."""
    package = griffe.load('timm_odevit', search_paths=[ROOT])
    public = {package[name].target_path: name for name in package.exports if name != '__version__'}
    sections = {section: [] for section in SECTIONS}
    for path in public:
        fitting = {prefix: section for section, prefixes in SECTIONS.items() for prefix in prefixes
                   if path.startswith(f'timm_odevit.{prefix}.')}
        if not fitting:
            raise PluginError(f'Which section of the reference has {path}? Add its module to SECTIONS in .ci/site.py.')
        sections[fitting[max(fitting, key=len)]].append(path)

    text, shown = INTRODUCTION, {path.removeprefix('timm_odevit.') for path in public}
    for section, paths in sections.items():
        text += f'\n## {section}\n'
        if section == 'Dynamics':  # what its docstring says of all of them
            text += '\n' + package['dynamics'].docstring.value.split('\n\n')[1] + '\n'
        for path in sorted(paths, key=lambda path: public[path].lower()):
            text += f'\n::: timm_odevit.{public[path]}\n'
            for name in (todo := classes(package, package[public[path]].final_target)):
                if name not in shown:
                    shown.add(name)
                    text += f'\n::: timm_odevit.{name}\n'
                    todo += classes(package, package[name])
    return text


def classes(package, item):
    """The classes of the package that a function returns, or that the fields of a class hold."""
    hints = [item.returns] if item.is_function else [each.annotation for each in item.attributes.values()]
    names = [name.canonical_path for hint in hints if isinstance(hint, griffe.Expr)
             for name in hint.iterate(flat=True) if isinstance(name, griffe.ExprName)]
    own = [name.removeprefix('timm_odevit.') for name in names if name.startswith('timm_odevit.')]
    return [name for name in own if package[name].is_class]


class Defaults(griffe.Extension):
    """Shows the default of a setting without its check."""

    def on_attribute_instance(self, *, attr, **kwargs):
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == 'setting':
            first = attr.value.arguments[0]
            attr.value = None if isinstance(first, griffe.ExprKeyword) else first
