"""Model cards: README.md of a model's folder and of its page on the Hub, with metadata that the Hub understands."""
from typing import Any, Mapping, Optional, Sequence

from huggingface_hub import EvalResult, ModelCardData
from timm.data import resolve_model_data_config
from torch import nn

from .._version import __version__
from ..ode.blocks import count_parameters, find_ode_blocks

__all__ = ['model_card']

_CITATION = """```bibtex
@article{boned2025odevit,
  title = {ODE-ViT: Plug \\& Play Attention Layer from the Generalization of the ViT
           as an Ordinary Differential Equation},
  author = {Boned Riera, Carlos and Romero S{\\'a}nchez, David and Ramos Terrades, Oriol},
  journal = {arXiv preprint arXiv:2511.16501},
  year = {2025},
  url = {https://arxiv.org/abs/2511.16501},
}
```"""
_SETTINGS = ('field', 'method', 'steps', 'T', 'time', 'rank', 'phases', 'blocks', 'init')
_KEYS = {'agreement', 'images', 'kept', 'model', 'nfe', 'parameters', 'steps', 'top1', 'top5'}
_COLUMNS = ('model', 'K', 'NFE', 'parameters', 'top-1 %', 'top-5 %', 'kept %', 'agreement %')


def model_card(
        name: str,
        model: nn.Module,
        *,
        summary: str = '',
        results: Sequence[Mapping[str, Any]] = (),
        dataset: str = '',
        protocol: str = '',
        trained_at: Sequence[int] = (),
        training: str = '',
        limits: str = '',
        license: str = 'apache-2.0',
        provenance: str = '',
) -> str:
    """Return a model's card: Markdown, preceded by metadata.

    Args:
        name: Name to pass to `timm.create_model`, such as 'hf-hub:org/name'.
        model: The model; the card states its base, settings and size.
        summary: A sentence or two on what it is and what it was made from.
        results: Rows of `Evaluation.to_json`.
        dataset: Dataset of the results, such as 'CIFAR-100'; its id is the letters and digits of this, in lower case.
        protocol: A sentence on how the results were measured.
        trained_at: Step counts that the model was trained with; bold in the table.
        training: How it was trained, in Markdown.
        limits: What it cannot do, in Markdown.
        license: The Hub's identifier of the licence.
        provenance: Where the weights and data come from, in Markdown.

    Returns:
        The text of README.md.

    Raises:
        ValueError: The results have no dataset name, or are not rows of `Evaluation.to_json`.
    """
    if results and not dataset:
        raise ValueError("Results need the name of their dataset, such as dataset='CIFAR-100'.")
    if not all(isinstance(row, Mapping) and _KEYS <= set(row) for row in results):
        raise ValueError('results must be rows as returned by json.loads(evaluate(...).to_json()), with '
                         f"{', '.join(sorted(_KEYS))}.")
    blocks = find_ode_blocks(model)
    own = blocks[0].steps if len(blocks) == 1 else None
    rows = [r for r in results if r['model'] != 'teacher']
    if rows and not summary:
        summary = f'An image classifier for {dataset}.'
    metadata = ModelCardData(
        license=license,
        library_name='timm',
        pipeline_tag=(kind := 'image-classification' if model.num_classes else 'image-feature-extraction'),
        tags=[kind, 'timm', *(['ode-vit'] if blocks else [])],
        datasets=[_id(dataset)] if dataset else None,
        model_name=name.rsplit('/', 1)[-1].removeprefix('hf-hub:') if rows else None,
        eval_results=[_metadata_of(r, dataset) for r in rows] or None,
    )
    parts = [f'---\n{metadata.to_yaml()}\n---', f"# {name.removeprefix('hf-hub:')}", summary or _summary(model)]
    dial = not trained_at or set(trained_at) != {own}  # one K in training leaves no choice afterwards
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    if isinstance(names, (list, tuple)) and names:
        more = f', and {len(names) - 20} more' if len(names) > 20 else ''
        parts.append(f"Its {len(names)} classes: {', '.join(map(str, names[:20]))}{more}.")
    parts += ['## Use', _usage(name, model, own if dial else None)]
    if blocks:
        parts += ['## The model', _about(model)]
    if rows:
        bold = ' It was trained with the K in bold.' if trained_at else ''
        how = protocol or f"On {rows[0]['images']:,} images of {dataset}."
        parts += ['## Results', f'{how}{bold}', _table(results, own, trained_at)]
    if training:
        parts += ['## How it was trained', training]
    limits = ' '.join((limits, *(['K evaluations of the shared block cost what K blocks cost: it has fewer parameters '
                                  'than a plain transformer, not less compute.'] if blocks else []))).strip()
    if limits:
        parts += ['## Limits', limits]
    parts += ['## Licence and provenance', f'Licence: {license}. {provenance}'.strip()]
    if blocks:
        parts += ['## Citation', f'Made with timm-odevit {__version__}, after:', _CITATION]
    return '\n\n'.join(parts) + '\n'


def _summary(model: nn.Module) -> str:
    if not find_ode_blocks(model):
        return f'A timm {type(model).__name__}.'
    return ('A vision transformer whose blocks are one shared block that an ODE solver evaluates K times (ODE-ViT, '
            'arXiv 2511.16501).')


def _usage(name: str, model: nn.Module, own: Optional[int]) -> str:
    dial = f'\nmodel.blocks.steps = {max(1, own // 2)}    # the compute dial: {own} as saved' if own else ''
    if any(blocks.shared.depends_on_time and not blocks.config.adaptive for blocks in find_ode_blocks(model)):
        dial += '\ntimm_odevit.merge_(model)    # for inference: as fast as a plain ViT; this fixes the number of steps'
    return f"""```python
import timm, timm_odevit, torch

model = timm.create_model('{name}', pretrained=True).eval()
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**data, is_training=False)    # of a PIL image
{'logits' if model.num_classes else 'embedding'} = model(torch.rand(1, *data['input_size'])){dial}
```"""


def _about(model: nn.Module) -> str:
    args, blocks = getattr(model, '_model_args', {}), find_ode_blocks(model)
    config = blocks[0].config
    lines = [f"- Base: `{args['base']}`"] if 'base' in args else []
    lines.append(f'- Parameters: {count_parameters(model):,}')
    lines.append(f"- Input: {' x '.join(str(v) for v in resolve_model_data_config(model)['input_size'])}")
    shown = [f'{name} {getattr(config, name)}' for name in _SETTINGS if getattr(config, name) not in (None, 0)]
    return '\n'.join([*lines, f"- ODE: {', '.join(shown)}"])


def _table(results: Sequence[Mapping[str, Any]], own: Optional[int], trained_at: Sequence[int]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", '|' + ' --- |' * len(_COLUMNS)]
    for r in results:
        steps = f"**{r['steps']}**" if r['steps'] in trained_at else str(r['steps'] or '-')
        mark = ' (as saved)' if own and r['steps'] == own else ''
        shares = [f'{r[key]:.2f}' if r[key] is not None else '-' for key in ('top1', 'top5', 'kept', 'agreement')]
        cells = [r['model'], steps + mark, str(r['nfe'] or '-'), f"{r['parameters']:,}", *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return '\n'.join(lines)


def _metadata_of(row: Mapping[str, Any], dataset: str) -> EvalResult:
    name = 'top-1' if row['steps'] is None else f"top-1 with K = {row['steps']}"
    return EvalResult(task_type='image-classification', dataset_type=_id(dataset), dataset_name=dataset,
                      metric_type='accuracy', metric_value=round(row['top1'] / 100, 6), metric_name=name)


def _id(dataset: str) -> str:
    return ''.join(c for c in dataset.lower() if c.isalnum())
