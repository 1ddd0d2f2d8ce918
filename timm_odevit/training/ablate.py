"""Ablations: train many recipes on the same data and seeds, and compare them in one table."""
import hashlib
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import timm
from torch import nn

from ..distributed import alone_in
from ..evaluation.accuracy import evaluate
from ..files import to_json, write_text
from ..loading.find_weights import WEIGHTS
from ..ode.blocks import count_parameters, find_ode_blocks
from ..settings import whole
from .loaders import loaders
from .read_yaml import read_yaml
from .recipe import Recipe
from .resume import BEST
from .run_recipe import train

__all__ = ['TABLE', 'ablate', 'load_recipes', 'table']

TABLE, RECORD, MEASURED = 'table.md', 'ablation.json', 'measured.json'


def load_recipes(paths: Sequence[Union[str, Path]], changes: Sequence[str] = ()) -> Dict[str, Recipe]:
    """Load recipes, keyed by name.

    Args:
        paths: Recipes, see `Recipe.load`; or lists of recipes: YAML files with `base` (a recipe, or a file in the
            list's folder), `variants` (changes by name) and optionally `changes` (to all variants).
        changes: Changes to all recipes.

    Raises:
        ValueError: A file or a name is invalid; the message says which.
    """
    found: Dict[str, Recipe] = {}
    for path in paths:
        tree = read_yaml(path) if Path(path).is_file() else None
        if not isinstance(tree, dict) or 'variants' not in tree:
            named = {Path(path).stem: Recipe.load(path, changes)}
        else:
            unknown = sorted(map(str, set(tree) - {'base', 'variants', 'changes'}))
            if unknown or not isinstance(tree['variants'], dict) or not tree['variants'] or 'base' not in tree:
                raise ValueError(f"'{path}' must hold base, variants and optionally changes"
                                 f"{f', not {unknown[0]}' if unknown else ''}.")
            common = _changes(f"'{path}', changes", tree.get('changes'))
            beside = Path(path).parent / str(tree['base'])
            base = beside if beside.is_file() else tree['base']
            named = {}
            for name, own in tree['variants'].items():
                where = f"'{path}', variant '{name}'"
                try:
                    named[str(name)] = Recipe.load(base, [*common, *_changes(where, own), *changes])
                except ValueError as e:
                    raise ValueError(f'{where}: {e}') from None
        for name, recipe in named.items():
            if name in found:
                raise ValueError(f"Two recipes are called '{name}'. Rename one of them.")
            found[name] = recipe
    return found


def ablate(
        recipes: Dict[str, Recipe],
        data: Union[str, Path],
        out: Union[str, Path],
        *,
        teacher: Optional[nn.Module] = None,
        seeds: int = 3,
        limit: Optional[int] = None,
        device: str = 'cpu',
        progress: bool = True,
) -> List[Dict[str, Any]]:
    """Train each recipe with each seed, and write one table of accuracy on the held-out images.

    Finished runs are not repeated, and interrupted runs are resumed. Recipes with `cache` share one cache.

    Args:
        recipes: Recipes by name; the others are compared with the first.
        data: See `train`.
        out: Folder: `table.md`, `ablation.json`, one folder per recipe and seed, and the cache.
        teacher: See `train`.
        seeds: Number of seeds, starting from 0.
        limit: Use only this many images of an .npz.
        device: Device.
        progress: Show progress bars.

    Returns:
        For each recipe: name, parameters, seconds per epoch, and for each seed top-1 in percent at the recipe's number
        of steps, at half that number and at twice that number.

    Raises:
        ValueError: There are no recipes, a seed or name is unsuitable, or as `train`.
        OSError: Another process uses the folder.
    """
    folder, seeds = Path(out), whole(1)('seeds', seeds)
    if not recipes:
        raise ValueError("There are no recipes. Give some by name, such as {'rank 8': Recipe.load('low_rank')}.")
    by_slug = {_slug(name): name for name in recipes}
    for name, recipe in recipes.items():
        if recipe.seed:
            raise ValueError(f"'{name}' has seed {recipe.seed}, but ablations set their own, from 0. Leave it out.")
        if by_slug[_slug(name)] != name:
            raise ValueError(f"'{name}' and '{by_slug[_slug(name)]}' would share a folder. Rename one of them.")
    rows: List[Dict[str, Any]] = []
    with alone_in(folder):
        for name, recipe in recipes.items():
            row: Dict[str, Any] = {
                'name': name, 'parameters': 0, 'seconds': 0., 'diverged': 0, 'top1': [], 'half': [], 'double': []}
            for seed in range(seeds):
                place = folder / f'{_slug(name)}-{seed}'
                seeded = replace(recipe, seed=seed)
                try:
                    history = train(
                        seeded, data, place, teacher=teacher, resume=(place / 'recipe.yaml').exists(), limit=limit,
                        cache=folder / 'cache', device=device, progress=progress)
                except FloatingPointError as e:  # divergence is a result, too
                    print(f'{name}, seed {seed}: {e}')
                    row['diverged'] += 1
                    continue
                found = _measure(place, seeded, data, limit, device)
                row['parameters'] = found.pop('parameters')
                row['seconds'] = statistics.mean(record['seconds'] for record in history)
                for key, value in found.items():
                    row[key].append(value)
            rows.append(row)
            write_text(folder / RECORD, to_json(rows))
            write_text(folder / TABLE, table(rows))
    return rows


def _changes(where: str, given: Any) -> List[str]:
    if not isinstance(given or [], list) or not all(isinstance(change, str) for change in given or []):
        raise ValueError(f'{where} must be a list of changes, such as [fit.lr=1e-3, ode.rank=8]; got {given!r}.')
    return given or []


def _slug(name: str) -> str:
    return re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.') or 'recipe'


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """The rows as a Markdown table: means and standard deviations over the seeds."""
    lines = ['| recipe | parameters | top-1 % | difference | half K | double K | s per epoch |', '|' + ' --- |' * 7]
    first = statistics.mean(rows[0]['top1']) if rows[0]['top1'] else float('nan')
    for row in rows:
        if not row['top1']:
            lines.append(f"| {row['name']} | - | diverged | | | | |")
            continue
        top1 = statistics.mean(row['top1'])
        spread = f" ± {statistics.stdev(row['top1']):.2f}" if len(row['top1']) > 1 else ''
        if row['diverged']:
            spread += f" ({row['diverged']} of {row['diverged'] + len(row['top1'])} diverged)"
        others = [f'{statistics.mean(row[key]):.2f}' if row[key] else '-' for key in ('half', 'double')]
        difference = '' if row is rows[0] else f'{top1 - first:+.2f}'
        lines.append(f"| {row['name']} | {row['parameters']:,} | {top1:.2f}{spread} | {difference} | {others[0]} | "
                     f"{others[1]} | {row['seconds']:.0f} |")
    return '\n'.join(lines) + '\n'


def _measure(place: Path, recipe: Recipe, data: Union[str, Path], limit: Optional[int], device: str) -> Dict[str, Any]:
    found: Dict[str, Any]
    weights = hashlib.sha256((place / BEST / WEIGHTS).read_bytes()).hexdigest()
    if (place / MEASURED).exists():
        found = json.loads((place / MEASURED).read_text())
        if found.pop('weights sha256', None) == weights:
            return found
    model: Any = timm.create_model(f'local-dir:{place / BEST}', pretrained=True).to(device)
    _, val = loaders(recipe.batches, data, model, limit=limit, seed=recipe.seed)
    found = {'parameters': count_parameters(model)}
    blocks = find_ode_blocks(model)
    if len(blocks) != 1:
        found['top1'] = evaluate(model, val).results[-1].top1
    else:
        steps = blocks[0].steps
        counts: List[Tuple[str, int]] = [('top1', steps), ('double', 2 * steps)]
        if steps % 2 == 0:
            counts.append(('half', steps // 2))
        results = evaluate(model, val, steps=[count for _, count in counts]).results
        found.update({key: r.top1 for (key, _), r in zip(counts, results, strict=True)})
    write_text(place / MEASURED, json.dumps({**found, 'weights sha256': weights}))
    return found
