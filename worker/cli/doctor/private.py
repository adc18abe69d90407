"""What only its user may read: places that hold passwords, keys, prompts and answers."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_rq.jobs.queue.discovery import FOLDER, URL_FILE
from mlx_rq.worker.cli.config_files import config_files
from mlx_rq.worker.cli.doctor.finding import Finding, Fix
from mlx_rq.worker.cli.service.manager import definitions

_OURS = ((FOLDER, "jobs"), (f"{FOLDER}/{URL_FILE}", "a password"), ("http", "prompts and answers"))
_PASSWORD = re.compile(r"://[^\s/@'\"]*:[^\s@'\"]+@")
_GROUP_AND_OTHERS, _OTHERS = 0o077, 0o007


class _Place(NamedTuple):
    """`closed_to` are the bits of those who must not get at it."""

    path: Path
    holds: str
    closed_to: int = _GROUP_AND_OTHERS


def private_findings(data: Path, secret_files: Iterable[Path]) -> Iterator[Finding]:
    """Looks at who may read what the data folder, the configuration and these files hold."""
    there = [place for place in _places(data, secret_files) if place.path.exists()]
    found = [wrong for place in there if (wrong := _open(place)) is not None]
    yield from found
    if there and not found:
        yield Finding("secrets", "ok", "files with passwords, keys and jobs are closed to others")


def _places(data: Path, secret_files: Iterable[Path]) -> Iterator[_Place]:
    for name, holds in _OURS:
        yield _Place(data / name, holds)
    for path in definitions().values():
        yield _Place(path, "the environment of a service")
    for path in config_files():
        if _has_password(path):
            yield _Place(path, "a password")
    for path in secret_files:  # a group of one's own may be meant to read these
        yield _Place(path, "keys", _OTHERS)


def _has_password(path: Path) -> bool:
    try:
        return _PASSWORD.search(path.read_text(errors="replace")) is not None
    except OSError:
        return False


def _open(place: _Place) -> Finding | None:
    """Says that others may get at a place; None where they may not."""
    seen = place.path.stat()
    if not seen.st_mode & place.closed_to:
        return None
    who = "go" if place.closed_to == _GROUP_AND_OTHERS else "o"
    command = f"chmod {who}-rwx {shlex.quote(str(place.path))}"
    text = f"others may get at {place.path}, which holds {place.holds}"
    if seen.st_uid != os.getuid():
        return Finding("secrets", "error", text, f"Have its owner say: {command}")
    mode = seen.st_mode & 0o7777 & ~place.closed_to
    return Finding("secrets", "error", text, command, Fix(command, lambda: place.path.chmod(mode)))
