"""What was measured: rows, tables, JSON."""
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

import timm
import torch

from .._version import __version__

__all__ = ['Benchmark', 'Timing', 'Weights', 'machine']


@dataclass(frozen=True)
class Timing:
    """One call that was timed.

    Attributes:
        name: What was run.
        batch_size: Images per call.
        seconds: Median time of a call.
        low: Lower quartile of the times.
        high: Upper quartile of the times.
        ratio: Median over the rounds of its time divided by that of the line it is compared with; 1 for that line.
        against: Name of the line it is compared with.
        evaluations: Blocks that an image passes through, on average; None if not known.
        peak: Peak memory in bytes that a call allocates, beyond the parameters and their gradients.
    """
    name: str
    batch_size: int
    seconds: float
    low: float
    high: float
    ratio: float
    against: str
    evaluations: Optional[float]
    peak: int

    @property
    def images_per_second(self) -> float:
        return self.batch_size / self.seconds

    def row(self) -> str:
        spread = 50 * (self.high - self.low) / self.seconds
        count, each = '', ''
        if self.evaluations is not None:
            count, each = f'{self.evaluations:.3g}', f'{1000 * self.seconds / self.evaluations:.2f}'
        return (f'| {self.name} | {count} | {1000 * self.seconds:.1f} ± {spread:.0f} % | {self.ratio:.3f} | '
                f'{self.images_per_second:.1f} | {each} | {self.peak / 1e6:.1f} |')


@dataclass(frozen=True)
class Weights:
    """What a model takes on disk.

    Attributes:
        name: Name of the model.
        parameters: Number of parameters, each counted once.
        bytes: Bytes of its weights as they are, as float16 and as int8; see `weight_bytes`.
        load: Seconds in which timm builds it from its saved folder.
    """
    name: str
    parameters: int
    bytes: Dict[str, int]
    load: float

    def row(self) -> str:
        sizes = ' | '.join(f'{size / 1e6:.1f}' for size in self.bytes.values())
        return f'| {self.name} | {self.parameters:,} | {sizes} | {1000 * self.load:.0f} |'


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` measured; `print` gives tables in Markdown.

    Attributes:
        machine: Processor, threads, versions, number of rounds.
        timings: One Timing for each candidate and batch size.
        weights: One Weights for each model.
    """
    machine: Dict[str, Any]
    timings: List[Timing]
    weights: List[Weights] = field(default_factory=list)

    def to_dict(self) -> Dict[str, Any]:
        """Everything as dicts and lists, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [', '.join(f'{key} {value}' for key, value in self.machine.items())]
        for size in dict.fromkeys(timing.batch_size for timing in self.timings):
            rows = [timing.row() for timing in self.timings if timing.batch_size == size]
            parts.append('\n'.join([
                f'| batch {size} | evaluations | ms | ratio | images/s | ms per evaluation | peak memory, MB |',
                '| --- | --- | --- | --- | --- | --- | --- |', *rows]))
        if self.weights:
            parts.append('\n'.join([
                '| weights | parameters | MB | MB as float16 | MB as int8 | ms to load |',
                '| --- | --- | --- | --- | --- | --- |', *(weights.row() for weights in self.weights)]))
        return '\n\n'.join(parts)


def machine(device: str, dtype: torch.dtype, rounds: int) -> Dict[str, Any]:
    """What the figures depend on."""
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else _processor()
    return {'device': name, 'threads': torch.get_num_threads(), 'dtype': str(dtype).removeprefix('torch.'),
            'torch': torch.__version__, 'timm': timm.__version__, 'timm-odevit': __version__, 'rounds': rounds}


def _processor() -> str:
    path = Path('/proc/cpuinfo')
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor() or platform.machine()
