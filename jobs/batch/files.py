"""The files that a batch writes: appended to line by line, healed, and put in order at the end.

While a run goes on, nothing is ever taken out of a file: an answer that replaces an error, or a
line that changed, is appended. `tidy` then leaves exactly one record for each line of the input.
"""

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mlx_rq.files import removed_on_error, sync, sync_path, temporary
from mlx_rq.jobs.batch.done import Done
from mlx_rq.jobs.batch.lines import Source, input_changed
from mlx_rq.jobs.batch.records import (
    Ended,
    Stored,
    code_of,
    encode_record,
    may_be_damaged,
    read_stored,
    record,
)
from mlx_rq.jobs.openai.errors import RequestError


class Outputs:
    """Where records go: answers into one file, errors into another, or both into one."""

    sortable = True
    """Whether records may come in any order, because they are put in order at the end."""

    def __init__(self, answers: Path, errors: Path | None) -> None:
        self.answers, self.errors = answers, errors
        self._paths = [answers] if errors is None else [answers, errors]
        self._open: dict[Path, BinaryIO] = {}
        self._lines = 0

    def check(self, *, ours: bool) -> None:
        """Raises RequestError where a file holds anything but what a batch has written.

        The answers of a run that is known to be `ours` are trusted; its errors are not, as they go
        into whatever file this command names.
        """
        if not ours:
            _check_file(self.answers)
        if self.errors is not None:
            _check_file(self.errors, errors_only=True, ours=ours)

    def recover(self, *, ours: bool) -> Done:
        """Reads what is there already and cuts off a torn last line.

        Without a file of answers everything starts over, also where there are errors. Raises
        RequestError, leaving the files as they are, as `check` does.
        """
        self.check(ours=ours)
        done = Done()
        for path in self._paths:
            for stored in _heal(path):
                if stored is not None:
                    done.add(stored)
                self._lines += 1
        if not self.answers.exists():
            self._lines = 0
            return Done()
        return done

    def create(self) -> None:
        """Makes the file of answers, even if none should come: a missing one starts all over."""
        if not self.answers.exists():
            self._forget_errors()
        self._file(self.answers)

    def _forget_errors(self) -> None:
        """Removes the errors of an earlier run; something like /dev/null stays."""
        if self.errors is not None and self.errors.is_file():
            self.errors.unlink()

    def append(self, ended: Iterable[Ended]) -> list[str | None]:
        """Writes records; returns their error codes (None: an answer). They survive a kill."""
        codes: list[str | None] = []
        for item in ended:
            value = record(item)
            code = code_of(value)
            path = self.errors if code is not None and self.errors else self.answers
            self._file(path).write(encode_record(value))
            codes.append(code)
        self._lines += len(codes)
        for file in self._open.values():
            file.flush()
        return codes

    def sync(self) -> None:
        """Makes what was written survive a power cut."""
        for file in self._open.values():
            sync(file)

    def close(self) -> None:
        """Syncs and closes the files."""
        self.sync()
        for file in self._open.values():
            file.close()
        self._open.clear()

    def tidy(self, source: Source, total: int, *, in_order: bool) -> None:
        """Leaves one record for each line, in the order of the input if so wanted.

        To be called when all `total` lines have one. Answers whose lines are gone or changed are
        moved to `<output>.replaced`: what was generated is never thrown away.
        """
        self.close()
        paths = [path for path in self._paths if path.exists()]
        if self._lines != total or (in_order and not _goes_along(paths, source)):
            _rewrite(paths, source, in_order=in_order)

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = path.open("ab")
            sync_path(path.parent)
        return self._open[path]


class PipedOutputs(Outputs):
    """The same for a pipe, which cannot be read back: nothing is resumed or put in order."""

    sortable = False

    def __init__(self, stream: BinaryIO, errors: Path | None) -> None:
        super().__init__(Path("-"), errors)
        self._open[self.answers] = stream

    def check(self, *, ours: bool) -> None:
        """Raises RequestError where the file of errors holds anything else."""
        if self.errors is not None:
            _check_file(self.errors, errors_only=True)

    def recover(self, *, ours: bool) -> Done:
        """Finds nothing; raises RequestError as `check` does."""
        self.check(ours=ours)
        return Done()

    def create(self) -> None:
        """Removes the errors of an earlier run, as nothing of it is gone on with."""
        self._forget_errors()

    def sync(self) -> None:
        """Does nothing: append has flushed."""

    def close(self) -> None:
        """Closes the file of errors; the pipe is another's."""
        stream = self._open.pop(self.answers)
        super().close()
        self._open[self.answers] = stream

    def tidy(self, source: Source, total: int, *, in_order: bool) -> None:
        """Does nothing."""


class _Place(NamedTuple):
    """Where a record lies."""

    file: int
    offset: int
    is_answer: bool


def _check_file(path: Path, *, errors_only: bool = False, ours: bool = False) -> None:
    """Raises RequestError where a file holds what no batch has written.

    Its last line may be torn; in one of `ours`, a power cut may have put zeros into any line.
    """
    if not path.is_file():
        return
    for number, (_, raw, stored) in enumerate(_scan(path), 1):
        if stored is not None and not (errors_only and stored.code is None):
            continue
        torn = not raw.endswith(b"\n") and not raw.startswith(b"\0")
        if stored is None and (ours or torn) and may_be_damaged(raw):
            continue
        what = "no record of a batch" if stored is None else "an answer, not an error"
        raise RequestError(
            f"{path} is there already, and its line {number} is {what}. "
            "Choose another name, or move the file away.",
            code="output_exists",
        )


def _heal(path: Path) -> Iterator[Stored | None]:
    """Yields what the whole lines of a file hold (None: no record) and cuts off a torn last one."""
    if not path.is_file():
        return
    end = 0
    for offset, raw, stored in _scan(path):
        if not raw.endswith(b"\n"):
            break
        end = offset + len(raw)
        yield stored
    os.truncate(path, end)


def _scan(path: Path) -> Iterator[tuple[int, bytes, Stored | None]]:
    """Yields the lines of a file with their offsets and what they hold (None: no record)."""
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                stored = read_stored(raw)
            except ValueError:
                stored = None
            yield offset, raw, stored
            offset += len(raw)


def _goes_along(paths: Sequence[Path], source: Source) -> bool:
    """Tells whether the records of the files, taken together, go along with the input."""
    files = [
        (stored.fingerprint if stored else None for _, _, stored in _scan(path)) for path in paths
    ]
    heads = [next(file, None) for file in files]
    for line in source:
        if line.fingerprint not in heads:
            return False
        index = heads.index(line.fingerprint)
        heads[index] = next(files[index], None)
    return True


def _rewrite(paths: Sequence[Path], source: Source, *, in_order: bool) -> None:
    """Replaces the files by ones that hold only what counts. At every moment one set is whole.

    Raises RequestError, leaving all as it is, where some line has no record.
    """
    current = {line.fingerprint for line in source}
    places, outdated = _find_places(paths, current)
    if len(places) < len(current):
        raise input_changed(source)
    order = (places[line.fingerprint] for line in source) if in_order else sorted(places.values())
    fresh = [temporary(path) for path in paths]
    with removed_on_error(*fresh), ExitStack() as stack:
        old = [stack.enter_context(path.open("rb")) for path in paths]
        new = [stack.enter_context(path.open("wb")) for path in fresh]
        for place in order:
            new[place.file].write(_read(old, place))
        if outdated:
            kept = paths[0].with_name(f"{paths[0].name}.replaced")
            new.append(stack.enter_context(kept.open("ab")))
            new[-1].writelines(_read(old, place) for place in outdated)
        for file in new:
            sync(file)
    for new_path, path in zip(fresh, paths, strict=True):
        new_path.replace(path)
    for errors in paths[1:]:
        if not errors.stat().st_size:
            errors.unlink()
    sync_path(paths[0].parent)


def _read(files: Sequence[BinaryIO], place: _Place) -> bytes:
    file = files[place.file]
    file.seek(place.offset)
    return file.readline()


def _find_places(
    paths: Sequence[Path], current: Set[bytes]
) -> tuple[dict[bytes, _Place], list[_Place]]:
    """Finds the one record that counts for each line, and the answers that no line asks for.

    An answer counts before an error, a later record before an earlier.
    """
    places: dict[bytes, _Place] = {}
    outdated: list[_Place] = []
    for index, path in enumerate(paths):
        for offset, _, stored in _scan(path):
            if stored is None:
                continue
            place = _Place(index, offset, stored.code is None)
            known = places.get(stored.fingerprint)
            if stored.fingerprint not in current:
                if place.is_answer:
                    outdated.append(place)
            elif place.is_answer or known is None or not known.is_answer:
                places[stored.fingerprint] = place
    return places, outdated
