"""Files that are complete or absent, folders that only one process at a time writes to, and text for them."""
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

OWN = '.odevit-'  # prefix of the names of locks and of unfinished files
_WAIT = 300.  # seconds that a save waits for another into the same folder


@contextmanager
def locked(folder: Path, name: str = 'run', wait: float = 0.) -> Iterator[None]:
    """Lock a folder, created if missing, against other processes; locks of different names are independent.

    Raises OSError if another process still holds the lock after `wait` seconds, or if the folder cannot be written to.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    lock = FileLock(str(folder / f'{OWN}{name}.lock'))
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=wait)
        except Timeout:
            raise OSError(
                f"'{folder}' is in use by another process. Wait until it is done, or give another folder.") from None
        except OSError as e:
            raise OSError(f"Cannot write to '{folder}': {e.strerror or e}.") from e
        yield
    finally:
        with suppress(OSError):
            if lock.is_locked:
                os.unlink(lock.lock_file)  # before the release: then it may be another process's
        lock.release()
        with suppress(OSError):
            for each in made:
                each.rmdir()  # only if it is empty


@contextmanager
def staged(folder: Path, *names: str) -> Iterator[Path]:
    """Yield an empty folder to write one file to, or two that belong together; then move them to `folder`.

    Each file is always complete or absent. Of two, the second is the one that readers look for first: if it changes, it
    is absent while the first is replaced.
    """
    with locked(folder, 'save', _WAIT):
        aside = folder / f'{OWN}save'
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        aside.mkdir()
        try:
            yield aside
            for name in names:
                with open(aside / name, 'rb+') as file:
                    os.fsync(file.fileno())
            last = folder / names[-1]
            if len(names) > 1 and last.is_file() and last.read_bytes() != (aside / last.name).read_bytes():
                last.unlink()
            for name in names:
                os.replace(aside / name, folder / name)
        except (OSError, SafetensorError) as e:  # if the disk is full, say
            raise OSError(f"'{folder / names[0]}' could not be written: {' '.join(str(e).split())}") from e
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    path = path.resolve()  # of a link
    with staged(path.parent, path.name) as aside:
        (aside / path.name).write_text(text, encoding='utf-8', errors='replace')  # of names of files in no encoding


def to_json(tree: Any) -> str:
    """Numbers that are not finite become null."""
    text = json.dumps(tree, default=lambda value: value.tolist())  # tensors, and NumPy's numbers
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2) + '\n'


def cell(value: float | None, digits: int = 2) -> str:
    return '-' if value is None else str(value) if isinstance(value, int) else f'{value:.{digits}f}'


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ['-' * width for width in widths], *rows[1:]]
    return '\n'.join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines)
