"""One line below the log that shows how the work goes on, where there is a terminal."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.jobs.queue.status import status
from mlx_rq.worker.cli.batch_progress import duration
from mlx_rq.worker.cli.status_view import count, line

_LOOK_SECONDS = 1.0

_LAST_WORDS_SECONDS = 1.0
"""How long the log is still listened to after the end: another process may hold it open."""

_STDERR = 2


@contextmanager
def living_line(redis_url: str, worker: str | None = None) -> Iterator[None]:
    """Keeps a line about the workers, or the named one, at the foot of the terminal.

    What this process and its children write to standard error meanwhile stands above it. Does
    nothing where that is no terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    file = open(os.dup(_STDERR), "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    console = Console(file=file, highlight=False)
    look = _Look(redis_url, worker)
    live = Live(console=console, get_renderable=look, transient=True, refresh_per_second=2)
    live.start()
    try:
        with _log_above(console):
            yield
    finally:
        for end in (live.stop, file.close):
            with suppress(OSError):  # the terminal was closed
                end()


class _Look:
    """Asks the queue once a second, in a thread of its own, and gives the line."""

    def __init__(self, redis_url: str, worker: str | None) -> None:
        self._redis_url, self._worker = redis_url, worker
        self._line = Text("starting")
        threading.Thread(target=self._follow, name="living line", daemon=True).start()

    def __call__(self) -> Text:
        return self._line

    def _follow(self) -> None:
        connection = new_connection(self._redis_url)
        pause = threading.Event()
        absent = "the worker is loading its model"
        while not pause.wait(_LOOK_SECONDS):
            try:
                told = words(status(connection), self._worker)
                absent = "the worker is stopping, or starts again" if told else absent
                self._line = line(told or absent)
            except (RedisError, OSError) as error:
                self._line = line(f"Redis: {error}")


def words(state: Mapping[str, Any], name: str | None = None) -> str:
    """Says in a line what runs, how fast, what waits, and until when; empty without a worker."""
    workers = [one for one in state["workers"] if name in (None, one["name"])]
    if not workers:
        return ""
    served = {model for worker in workers for model in worker["serves"]}
    queues = [queue for queue in state["queues"] if queue["model"] in served]
    waiting = sum(queue["queued"] for queue in queues) + _sum(workers, "waiting")
    speed = sum(worker["rates"]["now"]["generated_tokens"] for worker in workers)
    parts = [
        f"{_sum(workers, 'running')} of {counted(_sum(workers, 'capacity'), 'row')}",
        f"{count(speed)} tokens/s",
        f"{waiting:,} waiting",
        f"{_sum(workers, 'ended'):,} ended",
    ]
    if etas := [queue["eta_seconds"] for queue in queues if queue["eta_seconds"] is not None]:
        parts.append(f"{duration(max(etas))} left")
    parts += [f"paused: {worker['paused']}" for worker in workers[:1] if worker["paused"]]
    return " · ".join(parts)


def _sum(workers: list[Mapping[str, Any]], name: str) -> int:
    return sum(int(worker[name]) for worker in workers)


@contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """Lets all that is written to standard error go to the console, by whichever process."""
    kept, (reading_end, writing_end) = os.dup(_STDERR), os.pipe()
    sys.stderr.flush()
    os.dup2(writing_end, _STDERR)
    os.close(writing_end)
    reader = threading.Thread(
        target=_pass_on, args=(reading_end, console.print), name="log", daemon=True
    )
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)
        reader.join(_LAST_WORDS_SECONDS)


def _pass_on(reading_end: int, show: Callable[[Text], None]) -> None:
    with open(reading_end, encoding="utf-8", errors="replace") as log:
        for text in log:  # to the end, or those who write would wait for ever
            with suppress(OSError):  # the terminal was closed
                show(Text(text.rstrip("\n"), overflow="fold"))
