"""A teacher's outputs for fixed views of the training images, computed once and kept in memory-mapped files."""
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Tuple, Union

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from tqdm import tqdm

from ..data.arrays import ArrayLoader
from ..distributed import rank_and_world
from ..files import write_text
from ..hooks import evaluating
from ..recording import watch_blocks
from .hashes import fingerprint, hash_of

__all__ = ['CachedLoader', 'Recorded', 'record']

STATES, LOGITS, ABOUT = 'states.npy', 'logits.npy', 'about.json'


@dataclass
class Recorded:
    """Labels of a batch, and the teacher's outputs for it.

    Attributes:
        labels: Labels [B].
        output: The teacher's logits [B, classes].
        states: Its states: the embedded tokens and the output of each layer, [B, N, D] each.
    """
    labels: Tensor
    output: Tensor
    states: List[Tensor]

    def to(self, device: Any, non_blocking: bool = False) -> 'Recorded':
        """A copy on a device, with floating-point tensors in float32."""
        def move(x: Tensor) -> Tensor:
            x = x.to(device, non_blocking=non_blocking)
            return x.float() if x.is_floating_point() else x
        return Recorded(move(self.labels), move(self.output), [move(s) for s in self.states])


@torch.no_grad()
def record(teacher: Any, images: Tensor, labels: Tensor) -> Recorded:
    """Run a teacher on a batch and keep what it gives.

    Args:
        teacher: Model with one sequence `blocks`.
        images: Images [B, C, H, W], normalised for the teacher.
        labels: Labels [B].
    """
    with evaluating(teacher), watch_blocks([list(teacher.blocks)]) as seen:
        output = teacher(images)
    return Recorded(labels, output, seen[0][0])


class CachedLoader:
    """Batches (images [B, C, H, W], Recorded) of fixed views of the images of an ArrayLoader.

    A view is a crop, mirrored or not, determined by the numbers of the image and of the view; epoch e shows view
    e mod `views`. States are kept in half precision, (L + 1) * N * D * 2 bytes per view of an image. The size is
    printed, and the free disk space checked, before anything is computed. Existing files are reused if they were made
    with the same teacher (architecture and weights), images and views.

    Args:
        loader: Loader of the training images.
        teacher: The teacher.
        folder: Folder for the files; each combination of images, teacher and views has its own sub-folder.
        views: Views of each image.
        progress: Print the size and show a progress bar.

    Raises:
        ValueError: The loader is not an ArrayLoader, the teacher has no sequence of blocks, a state is beyond the range
            of half precision, or the run has several processes.
        OSError: There is not enough disk space for the files.
    """

    def __init__(
            self,
            loader: Any,
            teacher: Any,
            folder: Union[str, Path],
            *,
            views: int = 1,
            progress: bool = True,
    ) -> None:
        if not isinstance(loader, ArrayLoader):
            raise ValueError('cache works only with images in memory. Give an .npz, or set cache to 0.')
        if not hasattr(teacher, 'blocks'):
            raise ValueError(f'cache keeps the states after each of teacher.blocks, but a {type(teacher).__name__} has '
                             'none. Set cache to 0.')
        if rank_and_world()[1] > 1:
            raise ValueError('cache works only with one process. Run without torchrun, or set cache to 0.')
        self.loader, self.views = loader, views
        self.epoch = 0
        with _seeded(0, 0):
            first = record(teacher, loader.prepare(loader.images[:1]), loader.labels[:1])
        _half(first.states)  # fail now rather than after an hour
        n, classes = len(loader.labels), first.output.shape[1]
        self.shape = (views, n, len(first.states), *first.states[0].shape[1:])
        size = 2 * int(np.prod(self.shape)) + 4 * views * n * classes
        about = {'shape': list(self.shape), 'classes': classes, 'images': hash_of([loader.images]),
                 'teacher': fingerprint(teacher),
                 'augmentation': [loader.padding, loader.flip, loader.reprob], 'size': list(loader.size),
                 'preprocessing': [loader.mean.flatten().tolist(), loader.std.flatten().tolist(), loader.interpolation]}
        self.folder = Path(folder) / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        if not self._there(about):
            if progress:
                print(f"cache: {size / 1e9:.2f} GB in '{self.folder}': {views} x {n:,} images, "
                      f'{len(first.states)} states each')
            free = shutil.disk_usage(next(p for p in self.folder.absolute().parents if p.exists())).free
            if size > 0.95 * free:
                raise OSError(f"The cache needs {size / 1e9:.2f} GB, but '{folder}' has only {free / 1e9:.2f} GB free. "
                              'Use fewer views, or set cache to 0.')
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f'{self.folder}.lock'):  # one run fills it, and the others wait
                if not self._there(about):
                    try:
                        self._fill(teacher, classes, about, progress)
                    except BaseException:  # a partial cache may be large, and is useless
                        shutil.rmtree(self.folder, ignore_errors=True)
                        raise
        self.states = np.load(self.folder / STATES, mmap_mode='r')
        self.logits = np.load(self.folder / LOGITS, mmap_mode='r')

    def _there(self, about: Any) -> bool:
        try:
            shapes = [np.load(self.folder / name, mmap_mode='r').shape for name in (STATES, LOGITS)]
            same: bool = json.loads((self.folder / ABOUT).read_text()) == about
            return same and shapes == [self.shape, (*self.shape[:2], about['classes'])]
        except (EOFError, FileNotFoundError, ValueError):  # missing or truncated
            return False

    def _fill(self, teacher: nn.Module, classes: int, about: Any, progress: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ABOUT).unlink(missing_ok=True)  # written last: it marks the other files as complete
        views, n = self.shape[:2]
        states = np.lib.format.open_memmap(self.folder / STATES, 'w+', np.float16, self.shape)
        logits = np.lib.format.open_memmap(self.folder / LOGITS, 'w+', np.float32, (views, n, classes))
        for name in (STATES, LOGITS):
            _allocate(self.folder / name)
        batch = 256
        with tqdm(total=views * n, unit='image', desc='cache', disable=not progress) as bar:
            for view in range(views):
                for start in range(0, n, batch):
                    index = torch.arange(start, min(start + batch, n))
                    found = record(teacher, self._images(index, view), self.loader.labels[index])
                    states[view, start:start + len(index)] = _half(found.states).cpu().numpy()
                    logits[view, start:start + len(index)] = found.output.float().cpu().numpy()
                    bar.update(len(index))
        states.flush()
        logits.flush()
        write_text(self.folder / ABOUT, json.dumps(about))

    def _images(self, index: Tensor, view: int) -> Tensor:
        images = []
        for i in index.tolist():
            with _seeded(view, i):
                images.append(self.loader.augment(self.loader.images[i:i + 1]))
        return self.loader.prepare(torch.cat(images))

    def set_epoch(self, epoch: int) -> None:
        """Choose the view and the order of the images for an epoch."""
        self.epoch = epoch
        self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Tuple[Tensor, Recorded]]:
        view = self.epoch % self.views
        for index in self.loader.indices():
            rows = index.cpu().numpy()
            order = np.argsort(rows)  # read the file from front to back
            states = torch.from_numpy(np.asarray(self.states[view, rows[order]]))[torch.from_numpy(np.argsort(order))]
            logits = torch.from_numpy(np.asarray(self.logits[view, rows]))
            yield self._images(index, view), Recorded(self.loader.labels[index], logits, list(states.unbind(1)))


@contextmanager
def _seeded(view: int, image: int) -> Iterator[None]:
    """Seed the global generator for a view of an image, and restore it on exit."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(view * 10_000_019 + image)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def _half(states: List[Tensor]) -> Tensor:
    """States in half precision [B, L + 1, N, D]; values beyond its range raise ValueError."""
    kept = torch.stack(states, 1).half()
    if not torch.isfinite(kept).all():
        largest = max(float(state.abs().max()) for state in states)
        raise ValueError(f'The states of the teacher reach {largest:.4g}, but cache keeps them in half precision, '
                         f'whose largest value is {torch.finfo(torch.half).max:.0f}. Set cache to 0.')
    return kept


def _allocate(path: Path) -> None:
    """Reserve the disk space: writing to a memory map on a full disk kills the process."""
    if hasattr(os, 'posix_fallocate'):
        with open(path, 'r+b') as f:
            os.posix_fallocate(f.fileno(), 0, path.stat().st_size)
