"""Files that are always complete or absent, and folders that only one process at a time writes to."""
import errno
import json
import math
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Union

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError

__all__ = ['OWN', 'locked', 'repair', 'staged', 'to_json', 'write_text']

OWN = '.odevit-'  # prefix of the names of locks and of unfinished files
_ASIDE, _BEFORE = f'{OWN}save-', 'before'
_WAIT = 300.  # seconds that a save waits for another save into the same folder
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def locked(folder: Union[str, Path], name: str = 'run', wait: float = 0.) -> Iterator[bool]:
    """Lock a folder against other processes; create it if missing, and remove it again if it stays empty.

    The operating system holds the lock, so it ends with the process, however the process ends.

    Args:
        folder: The folder.
        name: Name of the lock; locks of different names are independent.
        wait: Seconds to wait for the other process.

    Returns:
        A context manager that yields whether the folder is locked; on the few file systems without locks, it warns.

    Raises:
        ValueError: A file of that name exists.
        OSError: Another process holds the lock, or the folder cannot be written to.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"Cannot write to '{folder}': a file of that name exists. Give a folder.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(str(folder / f'{OWN}{name}.lock'))
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=wait)
        except Timeout:
            raise OSError(f"'{folder}' is in use by another process. Wait until it is done, or give another folder."
                          ) from None
        except (NotImplementedError, OSError) as e:
            if isinstance(e, OSError) and e.errno not in _NO_LOCKS:
                raise OSError(f"Cannot write to '{folder}': {e.strerror or e}.") from e
            warnings.warn(f"The file system of '{folder}' has no locks, so a second process writing to it would go "
                          'unnoticed.', stacklevel=3)
        yield lock.is_locked
    finally:
        try:
            if lock.is_locked:
                with suppress(OSError):
                    os.unlink(lock.lock_file)  # before the release: afterwards it may belong to another process
        finally:
            lock.release()
            for path in made:
                with suppress(OSError):  # it is not empty
                    path.rmdir()


@contextmanager
def staged(folder: Union[str, Path], *names: str) -> Iterator[Path]:
    """Write one file, or two that belong together, to a staging folder, then move them over the old ones.

    A file is always complete or absent. Of two, the second is the one that readers look for first: it is removed before
    the first is replaced, and put in place afterwards. So whenever the process ends, the folder holds the old files,
    the new ones, or visibly none. If the second is unchanged, only the first is moved. An exception leaves the old
    files or the new ones; the next call repairs and removes what a killed process left.

    Args:
        folder: The folder for the files, created if missing.
        names: Names of the files.

    Returns:
        A context manager that yields an empty folder, inside `folder`, to write the files to.

    Raises:
        OSError: A file could not be written; the message is one line.
    """
    folder = Path(folder)
    with locked(folder, 'save', _WAIT) as alone:
        if alone:
            _settle_all(folder)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder))
        try:
            try:
                yield aside
            except (SafetensorError, RuntimeError) as e:  # safetensors and torch.save raise these if the disk is full
                text = ' '.join(str(e).split())
                if isinstance(e, RuntimeError) and 'inline_container' not in text and 'PytorchStream' not in text:
                    raise
                raise OSError(f"'{folder / names[0]}' could not be written: {text}") from e
            for name in names:
                _sync(aside / name)
            _put(aside, names)
        finally:
            _settle(aside)


def write_text(path: Path, text: str) -> None:
    """Write a file that is always complete or absent."""
    with staged(path.parent, path.name) as aside:
        (aside / path.name).write_text(text, encoding='utf-8')


def to_json(tree: Any) -> str:
    """A tree of dicts, lists and values as JSON; numbers that are not finite become null."""
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(entry) for entry in value]
        value = value.item() if isinstance(value, np.generic) else value
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(finite(tree), indent=2, allow_nan=False) + '\n'


def repair(folder: Union[str, Path]) -> None:
    """Finish or undo what a killed process left in a folder, if anything."""
    if any(Path(folder).glob(f'{_ASIDE}*')):
        with locked(folder, 'save', _WAIT) as alone:
            if alone:
                _settle_all(Path(folder))


def _put(aside: Path, names) -> None:
    folder, last = aside.parent, names[-1]
    if len(names) > 1:
        old = folder / last
        if old.is_file() and old.read_bytes() == (aside / last).read_bytes():
            names = names[:-1]
        else:
            (aside / _BEFORE).mkdir()  # both files are complete: from here on, an interrupted save can be finished
            if os.path.lexists(old):
                os.replace(old, aside / _BEFORE / last)
            _sync(folder)
    for name in names:
        os.replace(aside / name, folder / name)
        _sync(folder)


def _settle_all(folder: Path) -> None:
    for aside in folder.glob(f'{_ASIDE}*'):
        _settle(aside)


def _settle(aside: Path) -> None:
    """Finish or undo an interrupted save, and remove its staging folder."""
    before = aside / _BEFORE
    if before.is_dir():
        left = [path for path in aside.iterdir() if path != before]
        # two left: none was moved, so undo; one left: the other is in place, so move this one too
        undo = len(left) > 1
        for path in list(before.iterdir()) if undo else left:
            if not os.path.lexists(aside.parent / path.name):
                os.replace(path, aside.parent / path.name)
        if undo:
            before.rmdir()  # otherwise a half-removed folder would look like a save to finish
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir():
        with suppress(OSError):  # some systems cannot open a folder
            _fsync(path, os.O_RDONLY)
    else:
        _fsync(path, os.O_RDWR)


def _fsync(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)
