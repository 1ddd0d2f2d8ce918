"""Model cards, with metadata that the Hub understands; their text is in card.md."""
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from .._version import __version__
from ..convert.planning import count_in_words
from ..data.preprocessing import cfg_of, data_config
from ..files import cell, markdown_table
from ..ode.blocks import count_parameters, find_ode_blocks


def model_card(
        name: str, model: nn.Module, *, summary: str = '', results: Sequence[Mapping[str, Any]] = (),
        dataset: str = '', protocol: str = '', trained_at: Sequence[int] = (), training: str = '', limits: str = '',
        license: str | None = None, provenance: str = '',
) -> str:
    """Of Markdown: `name` is for `timm.create_model`, the step counts `trained_at` are bold."""
    cfg = cfg_of(model)
    license = license or cfg.get('license')
    if not license:
        raise ValueError("The licence of these weights is not known. Give license=, such as 'apache-2.0'.")
    if results and not (dataset and isinstance(results, list) and all(
            isinstance(row, dict) and {'agreement', 'top1'} <= row.keys() for row in results)):
        raise ValueError("results must be rows of json.loads(evaluate(...).to_json()), of a model with classes, with "
                         "the name of their dataset, such as dataset='CIFAR-100'.")
    blocks = find_ode_blocks(model)
    own = blocks[0].steps if len(blocks) == 1 else None
    rows = [r for r in results if r['model'] != 'teacher']
    kind = 'image-classification' if model.num_classes else 'image-feature-extraction'
    dataset_id = ''.join(c for c in dataset.lower() if c.isalnum())
    metadata = ModelCardData(
        license=license, library_name='timm', pipeline_tag=kind,
        tags=[kind, 'timm', *(['ode-vit'] if blocks else [])],
        datasets=[dataset_id] if dataset else None,
        model_name=name.rsplit('/', 1)[-1] if rows else None,
        eval_results=[EvalResult(
            task_type='image-classification', dataset_type=dataset_id, dataset_name=dataset, metric_type='accuracy',
            metric_value=round(row['top1'] / 100, 6),
            metric_name='top-1' if row['steps'] is None else f"top-1 with K = {row['steps']}") for row in rows] or None,
    )
    measured = ''
    if rows:
        protocol = protocol or f"On {rows[0]['images']:,} images of {dataset}."
        measured = (f"{protocol}{' It was trained with the K in bold.' if trained_at else ''}\n\n"
                    f'{_table(results, own, trained_at)}')
    return str(ModelCard.from_template(
        metadata,
        template_str=Path(__file__).with_name('card.md').read_text(encoding='utf-8'),
        title=name.removeprefix('hf-hub:'), name=name, summary=summary,
        classes=[*map(_plain, names)] if isinstance(names := cfg.get('label_names'), (list, tuple)) else [],
        output='logits' if model.num_classes else 'embedding',
        own=own,
        fewer=fewest if own and (fewest := min(trained_at, default=own)) < own else None,
        rows=rows, dataset=dataset,
        architecture=type(model).__name__,
        odes=blocks,
        shared=count_in_words(sum(len(b.shared.phases) for b in blocks)),
        base=getattr(model, '_model_args', {}).get('base'),
        parameters=f'{count_parameters(model):,}',
        size=' x '.join(map(str, data_config(model)['input_size'])),
        sections=[('Results', measured), ('How it was trained', training)],
        limits=limits, licence=_plain(license), provenance=provenance, version=__version__,
    )) + '\n'


def _plain(text: Any) -> str:
    """Text on one line, with Markdown and HTML escaped; an underscore within a word is not Markdown."""
    line = escape(' '.join(str(text).split()), quote=False)
    return re.sub(r'[\\`*\[\]#|~]|(?<![^\W_])_|_(?![^\W_])', r'\\\g<0>', line)


def _table(results: Sequence[Mapping[str, Any]], own: int | None, trained_at: Sequence[int]) -> str:
    rows = [['model', 'K', 'NFE', 'parameters', 'top-1 %', 'top-5 %', 'kept %', 'agreement %']]
    for r in results:
        steps = f"**{r['steps']}**" if r['steps'] in trained_at else cell(r['steps'])
        mark = ' (as saved)' if own and r['steps'] == own else ''
        rows.append([_plain(r['model']), steps + mark, cell(r['nfe']), f"{r['parameters']:,}",
                     *(cell(r[key]) for key in ('top1', 'top5', 'kept', 'agreement'))])
    return markdown_table(rows)
