"""Shows how a batch gets on: bars on a terminal, a line now and then elsewhere, or nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import click
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mlx_rq.jobs.batch.batch import Batch
from mlx_rq.jobs.batch.tally import Tally
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.openai.words import counted

LINE_SECONDS = 10.0
"""How often a line is printed where there is no terminal."""


class Watch(Protocol):
    """Called at least once a second while a batch runs."""

    def __call__(self, batch: Batch) -> None: ...


@contextmanager
def watching(*, quiet: bool) -> Iterator[Watch]:
    """Shows progress on standard error while the block runs."""
    if quiet:
        yield lambda batch: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress)


class Measure:
    """Speeds and shares of this run, from its first look on."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def words(self, batch: Batch) -> list[str]:
        """Tells what a person waits for: speed, reuse, time left, errors."""
        words = []
        seconds = time.monotonic() - self._started
        answers, usage = batch.flight.answers, batch.flight.usage
        if answers and seconds > 0:
            words.append(f"{usage.completion / seconds:,.3g} tokens/s")
            if usage.prompt:
                words.append(f"{usage.cached / usage.prompt:.0%} of prompts reused")
            # Lines that were refused took no time and say nothing about the others.
            words.append(f"{duration(seconds / answers * (batch.tally.total - ended(batch)))} left")
        if errors := batch.tally.errors.total():
            words.append(counted(errors, "error"))
        return words


def ended(batch: Batch) -> int:
    """Counts the lines that have ended, whether they are written or wait for those before them."""
    return batch.tally.done + batch.flight.held


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._measure = Measure()
        self._notes = _Notes()

    def __call__(self, batch: Batch) -> None:
        if note := self._notes.news(batch):
            self._progress.console.print(
                f"note: {note}", highlight=False, markup=False, emoji=False
            )
        self._progress.update(
            self._task,
            total=batch.tally.total,
            completed=ended(batch),
            description=" · ".join(self._measure.words(batch)),
        )


class _Lines:
    def __init__(self) -> None:
        self._measure = Measure()
        self._notes = _Notes()
        self._next = time.monotonic() + LINE_SECONDS
        self._told = 0

    def __call__(self, batch: Batch) -> None:
        if note := self._notes.news(batch):
            click.echo(f"note: {note}", err=True)
        now = time.monotonic()
        if now < self._next or ended(batch) == self._told:
            return
        self._next, self._told = now + LINE_SECONDS, ended(batch)
        words = [f"{self._told:,} of {batch.tally.total:,}", *self._measure.words(batch)]
        click.echo(", ".join(words), err=True)


class _Notes:
    """Gives every note once, until it changes."""

    def __init__(self) -> None:
        self._said: str | None = None
        self._greeted = False

    def news(self, batch: Batch) -> str | None:
        """The note that has not been given yet, if there is one."""
        if not self._greeted:
            self._greeted = True
            return _resumption(batch.tally)
        note, said = batch.flight.note, self._said
        self._said = note
        return note if note != said else None


def _resumption(tally: Tally) -> str | None:
    """Says what of the input was done before, and what of the output is out of date."""
    words = []
    if tally.resumed:
        were = "was" if tally.resumed == 1 else "were"
        words.append(f"going on: {tally.resumed:,} of {tally.total:,} {were} done before")
    if tally.outdated:
        words.append(
            counted(
                tally.outdated,
                "answer belongs to a line that is gone or has changed; it is kept aside at the end",
                "answers belong to lines that are gone or have changed; "
                "they are kept aside at the end",
            )
        )
    return "; ".join(words) or None


def duration(seconds: float) -> str:
    """Writes a time as a person says it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


class Left(NamedTuple):
    """The lines that have no ending in the output: how many wait for those before them there, and
    how many jobs run, wait, or were not submitted yet.
    """

    held: int
    running: int
    waiting: int
    unsubmitted: int


def left_of(batch: Batch) -> Left:
    """Counts what a batch that was stopped leaves; where Redis is away, nothing is known to run."""
    flight = batch.flight
    try:
        decoding = flight.decoding() if flight.running else 0
    except (RedisError, RedisUnavailable):
        decoding = 0
    unsubmitted = max(0, batch.tally.missing - flight.held - flight.running)
    return Left(flight.held, decoding, flight.running - decoding, unsubmitted)


def stopped(batch: Batch) -> str:
    """Says what becomes of a batch that was stopped before its end."""
    tally = batch.tally
    if not tally.total:
        return "Stopped before anything was submitted."
    left = left_of(batch)
    parts = (
        (left.held, "waits for those before it", "wait for those before them"),
        (left.running, "runs", "run"),
        (left.waiting, "waits", "wait"),
        (left.unsubmitted, "is not submitted yet", "are not submitted yet"),
    )
    words = ", ".join(counted(*what) for what in parts if what[0] > 0)
    are = "is" if tally.done == 1 else "are"
    return (
        f"Stopped: {tally.done:,} of {tally.total:,} {are} done, {words}. Jobs go on without this "
        "command; the same command takes them up again."
    )
