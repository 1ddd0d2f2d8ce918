"""The tables of hub/DYNAMICS.md, from the records in hub/dynamics/; hub/tools/table.py writes them."""
import json
from pathlib import Path

RECORDS = Path(__file__).parent.parent / 'dynamics'
SIGNALS = {
    'confidence': 'softmax confidence', 'margin': 'margin of the logits', 'entropy': 'entropy', 'radius': 'radius',
    'exponent': 'largest exponent', 'acceleration': 'acceleration', 'distance': 'distance from the teacher'}


def rows(heads, lines):
    return '\n'.join([f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads),
                      *(f"| {' | '.join(line)} |" for line in lines)]) + '\n'


def models():
    """The records by model and measure, the teacher first."""
    found = {}
    for path in sorted(RECORDS.glob('*/*.json')):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


def spread(found, digits=3):
    return f"{found['mean']:.{digits}f} ± {found['sd']:.{digits}f}"


def exponents():
    lines = []
    for name, measures in models().items():
        whole, token = (measures[key]['found'] for key in ('exponents', 'class_token'))
        lines.append([f'`{name}`', spread(whole), f"{whole['drift']:.2f}", spread(token), f"{token['drift']:.2f}",
                      str(whole['without'])])
    heads = ['model', 'largest exponent', 'drift', 'of the class token alone', 'drift', 'images without an exponent']
    return rows(heads, lines)


def constants():
    lines = []
    for name, measures in models().items():
        lipschitz, softmax = (measures[key]['found'] for key in ('lipschitz', 'softmax'))
        norms = measures['spectral_norms']['found']
        widest = max(norms, key=norms.get)
        lines.append([f'`{name}`', spread(lipschitz, 2), f"{lipschitz['largest']:.1f}", spread(softmax),
                      f'{norms[widest]:.1f}, of {widest.split(" ")[0]}'])
    return rows(['model', 'Lipschitz constant, mean along the way', 'largest', "JaSMin's g_1", 'largest spectral norm'],
                lines)


def regions():
    lines = []
    for name, measures in models().items():
        region, back = measures['region']['found'], measures['recovery']['found']
        student = region['distance'] is not None and region['distance'] == region['distance']
        lines.append([f'`{name}`', *(f'{region[key]:.2f}' if student else '-' for key in ('distance', 'towards')),
                      *(f'{region[key]:.1f} %' if student else '-' for key in ('inside', 'same')),
                      f"{back['factor'][0]:.2f}, {back['factor'][len(back['factor']) // 2]:.2f}",
                      f"{back['same'][0]:.1f} %"])
    teacher = next(iter(models().values()))['region']['found']
    return (f"The teacher's own radius is {teacher['worst']:.3f} of the norm of the state in the worst direction, "
            f"{teacher['random']:.2f} in a random one (medians).\n\n" + rows(
                ['model', 'distance from the teacher', 'radius in this direction', 'nearer than the worst radius',
                 'same class', 'left of a perturbation at t = 0, 6', 'class kept'], lines))


def relations():
    found = {name: {row['name']: row for row in measures['relations']['found']} for name, measures in models().items()}
    lines = []
    for key, title in SIGNALS.items():
        cells = []
        for measures in found.values():
            row = measures.get(key)
            cells.append('-' if row is None else f"{row['auroc']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
                         + ('' if row['related'] else ', no relation'))
        lines.append([title, *cells])
    return rows(['AUROC for being right', *(f'`{name}`' for name in found)], lines)


def discretisation():
    lines = []
    for name, measures in models().items():
        if 'discretisation' not in measures:
            continue
        for row in measures['discretisation']['found']:
            order = '-' if row['order'] is None or row['order'] != row['order'] else f"{row['order']:.1f}"
            lines.append([f'`{name}`', row['method'], str(row['steps']), f"{row['error']:.3f}", f"{row['bound']:.2f}",
                          order, f"{row['local'][0]:.3f}, {row['local'][-1]:.3f}"])
    return rows(['model', 'method', 'K', 'error', 'bound', 'observed order', 'first and last local error'], lines)


def costs():
    lines = []
    for measure in ('spectral_norms', 'exponents', 'class_token', 'softmax', 'region', 'recovery', 'relations',
                    'lipschitz', 'discretisation'):
        times = [measures[measure]['ms per image'] for measures in models().values() if measure in measures]
        counts = [measures[measure]['images'] for measures in models().values() if measure in measures]
        if times:
            what = 'per model' if measure == 'spectral_norms' else 'per image'
            factor = counts[0] if measure == 'spectral_norms' else 1
            low, high = factor * min(times), factor * max(times)
            times = f'{low:.0f}' if f'{low:.0f}' == f'{high:.0f}' else f'{low:.0f} to {high:.0f}'
            lines.append([measure.replace('_', ' '), f'{times} ms {what}'])
    return rows(['measure', 'one core'], lines)


def _runs(name):
    path = RECORDS / f'{name}.json'
    return json.loads(path.read_text()) if path.exists() else []


def methods():
    found = {}
    for row in _runs('methods'):
        found.setdefault((row['method'], row['steps'], row['nfe']), []).append(row)

    def cell(runs, key, digits):
        values = [run[key] for run in runs]
        mean = sum(values) / len(values)
        return f"{mean:.{digits}f} ({', '.join(f'{v:.{digits}f}' for v in values)})"
    lines = [[method, str(steps), f'{nfe:g}', cell(runs, 'top1', 1), cell(runs, 'distance', 3), cell(runs, 'error', 3),
              cell(runs, 'exponent', 3)]
             for (method, steps, nfe), runs in sorted(found.items(), key=lambda item: -item[0][1])]
    return rows(['method', 'K', 'evaluations', 'top-1 % held out', 'distance from the teacher',
                 'discretisation error', 'largest exponent'], lines)


def jasmin():
    lines = []
    for row in _runs('jasmin'):
        epochs = row['epochs']
        widest = [max(value for key, value in epoch.items() if key.startswith('norm of')) for epoch in epochs]
        lines.append([row['run'].rsplit('-', 1)[0].replace('-', ' '), f"{epochs[-1]['val_top1']:.1f}",
                      ', '.join(f"{epoch['jasmin_loss']:.2f}" for epoch in epochs), f"{row['softmax']:.3f}",
                      ', '.join(f'{value:.2f}' for value in widest), f"{row['exponent']:.3f}"])
    return rows(['training', 'top-1 %', 'mean log g over the epochs', 'g_1 after it',
                 'largest spectral norm in each epoch', 'largest exponent'], lines)


def violations():
    lines = [[row['kind'], {'rotated': f"{row['degree']:g}°", 'displaced': f"{row['degree']:g} of the norm",
                            'exchanged': f"{100 * row['degree']:g} % of the images"}.get(row['kind'], '-'),
              f"{row['inside']:.1f}", f"{row['top1']:.1f}"] for row in _runs('violations')]
    return rows(['trajectories', 'by', "ends with the teacher's class %", 'student, top-1 %'], lines)


TABLES = {f'dynamics {name}': make for name, make in {
    'exponents': exponents, 'constants': constants, 'regions': regions, 'relations': relations,
    'discretisation': discretisation, 'methods': methods, 'jasmin': jasmin, 'violations': violations,
    'costs': costs}.items()}
