"""Notes on disk of which model is being loaded: one whose process has ended tells of its death.

A model that does not fit into memory takes the worker with it, and the next worker would load it
again. A note is a file, there while a model is loaded and locked by the process that loads it; a
lock ends with its process, however that ends.
"""

import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mlx_rq.files import lock, sync, sync_path

logger = logging.getLogger("mlx_rq.worker")

_FORGOTTEN_AFTER = 24 * 3600.0
"""Seconds after which a death counts no more."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """How many workers died while they loaded a model, and when (Unix time) the last one began."""

    count: int
    last: float


class LoadingNotes:
    """The notes of this machine's workers, in a folder that is made when the first one comes.

    Without a folder none are written. Where the disk does not take them, loading goes on.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @contextmanager
    def noted(self, model: str) -> Iterator[None]:
        """Has a note lie there during the block; after one that raises nothing, no death counts."""
        note = self._write(model)
        try:
            yield
        finally:
            if note is not None:
                Path(note.name).unlink(missing_ok=True)
                note.close()
        for left in self._left().get(model, ()):
            left.path.unlink(missing_ok=True)

    def _write(self, model: str) -> TextIO | None:
        """Leaves a note, and gives it with its lock; None where that is not to be, or cannot be."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self._written(self._folder / f"{secrets.token_hex(8)}.json", model)
        except OSError as error:
            logger.error("no note of loading %s can be written: %s", model, error)
            return None

    @staticmethod
    def _written(path: Path, model: str) -> TextIO:
        """Writes a note; where that is broken off, none lies there that would tell of a death."""
        note = path.open("x")
        try:
            lock(note, wait=True)  # for somebody who reads it already
            note.write(json.dumps({"model": model, "at": time.time()}))
            sync(note)
            sync_path(path.parent)
        except BaseException:
            path.unlink(missing_ok=True)
            note.close()
            raise
        return note

    def deaths(self) -> dict[str, Deaths]:
        """Tells of each model how many workers died while they loaded it."""
        return {
            model: Deaths(len(notes), max(note.at for note in notes))
            for model, notes in self._left().items()
        }

    def _left(self) -> dict[str, list["_Note"]]:
        """Reads the notes whose processes have ended, by model; takes away those too old."""
        notes: dict[str, list[_Note]] = {}
        for path in () if self._folder is None else self._folder.glob("*.json"):
            try:
                with path.open() as file:
                    if not lock(file, shared=True):
                        continue  # it is being loaded
                    said = json.load(file)
                note = _Note(path, str(said["model"]), float(said["at"]))
                if time.time() - note.at > _FORGOTTEN_AFTER:
                    path.unlink(missing_ok=True)
                else:
                    notes.setdefault(note.model, []).append(note)
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.error("%s is no note of a worker, and is left there: %s", path, error)
        return notes


@dataclass(frozen=True, slots=True)
class _Note:
    path: Path
    model: str
    at: float
