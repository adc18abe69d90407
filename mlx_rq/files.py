"""Files that are whole or not there at all, that a power cut leaves as they are, that are locked.

Imports nothing of ours: every room may use it.
"""

import errno
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

if sys.platform == "win32":  # producers only: they write and lock nothing
    _FULL_SYNC = None
else:
    import fcntl

    _FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Gives an empty file that takes the place of another, whole and on the disk, after the block.

    Where the block raises, what was there before stays. `mode` as for `os.open`. Raises OSError,
    which names the file that was meant; what is no regular file (/dev/stdout) is not replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file, which it would take the place of", str(path))
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            sync(file)
        _rename(fresh, path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError) and (error.filename == str(fresh) or is_full(error)):
            error.filename = str(path)
        raise


def is_full(error: OSError) -> bool:
    """Tells whether there was no room for what was written; such an error names no file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def temporary(path: Path) -> Path:
    """Names the file that `put_in_place` renames to this one; one that was left is overwritten."""
    return path.with_name(f"{path.name}.tmp")


@contextmanager
def removed_on_error(*paths: Path) -> Iterator[None]:
    """Removes files that are not whole where the block raises: a full disk needs the room."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def put_in_place(new: Path, path: Path) -> None:
    """Renames a file, or a folder whose files are on the disk, so that the name lasts too."""
    sync_path(new)
    _rename(new, path)


def _rename(new: Path, path: Path) -> None:
    new.replace(path)
    sync_path(path.parent)


def sync(file: IO[Any]) -> None:
    """Returns when all that was written to a file is on the disk."""
    file.flush()
    _sync(file.fileno())


def sync_path(path: Path) -> None:
    """Returns when what is in a file, or which names are in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    # On macOS fsync leaves the data in the cache of the disk itself, which a power cut empties.
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError:
            pass  # not every file system can do it
    os.fsync(descriptor)


def lock(file: IO[Any], *, shared: bool = False, wait: bool = False) -> bool:
    """Takes the lock of an open file; says whether it was free, unless it is to `wait` for it.

    It ends when the file is closed, in child processes that got it too: with the process, however
    that ends. Any number may have a `shared` lock at once.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True
