"""Train many recipes on the same data and seeds, and compare them in one table.

    python hub/tools/ablate.py hub/ablation.yaml cifar100.npz out/ablation
        --teacher local-dir:hub/deit_tiny_patch16_128.cifar100 --limit 3200

The recipes are YAML files, names of recipes of the package, or lists: YAML files with `base` (a recipe), `variants`
(lists of changes, by name) and optionally `changes` (to all of them). The others are compared with the first. Finished
runs are not repeated, and interrupted runs are resumed. Writes table.md, ablation.json, and a folder for each run.
"""
import argparse
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import timm
import torch
import yaml

from timm_odevit import Recipe, evaluate, train
from timm_odevit.data.read import read_data


def load_recipes(paths, changes=()):
    """Recipes by name, of recipes and lists of recipes."""
    found = {}
    for path in paths:
        tree = yaml.safe_load(Path(path).read_text()) if Path(path).is_file() else {}
        if 'variants' in tree:
            for name, own in tree['variants'].items():
                found[str(name)] = Recipe.load(tree['base'], [*tree.get('changes', ()), *own, *changes])
        else:
            found[Path(path).stem] = Recipe.load(path, changes)
    return found


def table(rows):
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


def measure(folder, recipe, data, limit, device):
    """Top-1 in percent on the images held out, at the student's number of steps, at half and at twice that number."""
    model = timm.create_model(f'local-dir:{folder}/best', pretrained=True).to(device)
    val = read_data(data, model, recipe.batches, limit=limit, seed=recipe.seed).val
    steps = getattr(model.blocks, 'steps', None)
    if steps is None:
        return model, {'top1': evaluate(model, val).results[-1].top1}
    counts = {'top1': steps, 'double': 2 * steps, **({'half': steps // 2} if steps % 2 == 0 else {})}
    results = evaluate(model, val, steps=list(counts.values())).results
    return model, {key: result.top1 for key, result in zip(counts, results, strict=True)}


def ablate(recipes, data, out, teacher, seeds, limit, progress, device):
    out, rows = Path(out), []
    for name, recipe in recipes.items():
        row = {'name': name, 'parameters': 0, 'seconds': 0., 'diverged': 0, 'top1': [], 'half': [], 'double': []}
        for seed in range(seeds):
            folder = out / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.')}-{seed}"
            seeded = replace(recipe, seed=seed)
            try:
                history = train(seeded, data, folder, teacher=teacher, resume=(folder / 'recipe.yaml').exists(),
                                limit=limit, progress=progress, device=device)
            except FloatingPointError as e:  # divergence is a result, too
                print(f'{name}, seed {seed}: {e}')
                row['diverged'] += 1
                continue
            model, found = measure(folder, seeded, data, limit, device)
            row['parameters'] = sum(p.numel() for p in model.parameters())
            row['seconds'] = statistics.mean(record['seconds'] for record in history)
            for key, value in found.items():
                row[key].append(value)
        rows.append(row)
        (out / 'ablation.json').write_text(json.dumps(rows, indent=2))
        (out / 'table.md').write_text(table(rows))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('recipes', nargs='+')
    parser.add_argument('data', help='an .npz, or a folder of images')
    parser.add_argument('out')
    parser.add_argument('--teacher', help="a timm name, such as 'local-dir:FOLDER'")
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--set', metavar='KEY=VALUE', action='append', default=[], help='change all recipes')
    parser.add_argument('--limit', type=int, help='use only this many images of an .npz')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--quiet', action='store_true')
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    teacher = timm.create_model(args.teacher, pretrained=True).to(args.device) if args.teacher else None
    recipes = load_recipes(args.recipes, args.set)
    print(table(ablate(recipes, args.data, args.out, teacher, args.seeds, args.limit, not args.quiet, args.device)))


if __name__ == '__main__':
    main()
