"""The command `top`: what `status` says, live, with what runs, and keys to sort and to cancel."""

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from redis import Redis
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.status import status
from mlx_rq.worker.cli.common import redis_option
from mlx_rq.worker.cli.status_view import count, line, view

_LOOK_SECONDS = 1.0

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 48

_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "k": "up", "j": "down", "\x03": "q"}
_HELP = "q quit · s sort · ↑ ↓ choose · c cancel the job"


@click.command()
@redis_option
def top(redis_url: str | None) -> None:
    """Show queues, workers and running jobs, live; q ends it.

    s sorts the running jobs by tokens, by id or by worker; c cancels the one that is chosen with
    the arrow keys, once y is pressed.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal: `mlx-rq status` prints the same once")
    connection = connect(redis_url)
    console = Console(highlight=False)
    screen = Screen()
    with reachable(connection):
        screen.take(status(connection))
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as keys:
            looked_at = time.monotonic()
            for key in keys:
                if key is not None:
                    wanted = screen.press(key)
                    if wanted == "quit":
                        return
                    if wanted is not None:
                        _cancel(connection, screen, wanted)
                if time.monotonic() - looked_at >= _LOOK_SECONDS:
                    screen.take(status(connection))
                    looked_at = time.monotonic()
                live.update(screen.draw(console), refresh=True)


def _cancel(connection: Redis, screen: "Screen", job_id: str) -> None:
    ended = job_id in cancel_jobs(connection, [job_id]).ended
    screen.said = f"{job_id} {'cancelled' if ended else 'had ended before'}"


class Screen:
    """What is shown, and what keys do to it. Knows neither a terminal nor Redis."""

    SORTS = ("tokens", "id", "worker")

    def __init__(self) -> None:
        self.said = ""
        self._state: Mapping[str, Any] = {}
        self._sort = 0
        self._chosen: str | None = None
        self._asking = False
        self._speeds: dict[str, deque[float]] = {
            name: deque(maxlen=_HISTORY) for name in ("tokens/s out", "tokens/s in", "waiting")
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes in what is so now."""
        self._state = state
        now = [worker["rates"]["now"] for worker in state["workers"]]
        figures = (
            sum(rates["generated_tokens"] for rates in now),
            sum(rates["prompt_tokens"] for rates in now),
            sum(queue["queued"] for queue in state["queues"]),
        )
        for values, figure in zip(self._speeds.values(), figures, strict=True):
            values.append(figure)
        ids = [row[0] for row in self.rows()]
        if self._chosen not in ids:
            self._chosen, self._asking = (ids[0] if ids else None), False

    def rows(self) -> list[tuple[str, int, str]]:
        """Gives id, tokens and worker of what runs, in the order that is wanted."""
        rows = [
            (row["id"], row["tokens"], worker["name"])
            for worker in self._state["workers"]
            for row in worker["rows"]
        ]
        by = (lambda row: (-row[1], row[0]), lambda row: row[0], lambda row: (row[2], row[0]))
        return sorted(rows, key=by[self._sort])

    def press(self, key: str) -> str | None:
        """Does what a key means; returns "quit", or the id of a job that is to be cancelled."""
        key = _KEYS.get(key, key)
        if self._asking:
            self._asking = False
            return self._chosen if key == "y" else "quit" if key == "q" else None
        self.said = ""
        if key == "q":
            return "quit"
        if key == "s":
            self._sort = (self._sort + 1) % len(self.SORTS)
        elif key in ("up", "down"):
            self._move(1 if key == "down" else -1)
        elif key == "c":
            self._asking = self._chosen is not None
        return None

    def _move(self, step: int) -> None:
        ids = [row[0] for row in self.rows()]
        if self._chosen in ids:
            place = ids.index(self._chosen) + step
            self._chosen = ids[max(0, min(len(ids) - 1, place))]

    def draw(self, console: Console) -> RenderableType:
        """Draws it as high as the terminal is: the running jobs get what the rest leaves."""
        rest = Group(*self._sparklines(), view(self._state))
        used = len(console.render_lines(rest, console.options.update(height=None)))
        room = max(3, console.height - used - 3)
        return Group(rest, *self._running(room), self._foot())

    def _sparklines(self) -> Iterator[Text]:
        for (name, values), style in zip(
            self._speeds.items(), ("green", "cyan", "yellow"), strict=True
        ):
            text = Text(f"{name:13}{count(values[-1]):>8} ", no_wrap=True)
            yield text.append(sparkline(values), style)

    def _running(self, room: int) -> Iterator[Text]:
        rows = self.rows()
        if not rows:
            return
        yield line(f"running jobs, by {self.SORTS[self._sort]}", "bold")
        ids = [row[0] for row in rows]
        place = ids.index(self._chosen) if self._chosen in ids else 0
        first = max(0, min(place - room // 2, len(rows) - room))
        for job_id, tokens, worker in rows[first : first + room]:
            text = f"  {job_id:32} {tokens:>7,} tokens  {worker[:12]}"
            yield line(text, "reverse" if job_id == self._chosen else "")

    def _foot(self) -> Text:
        if self._asking:
            return line(f"cancel {self._chosen}? y", "bold red")
        return line(self.said or _HELP, "dim")


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Draws numbers as bars, the largest as the highest."""
    most = max(values, default=0) or 1
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


@contextmanager
def _keys() -> Iterator[Iterator[str | None]]:
    """Gives the keys that are pressed, None at least every half second, while the block runs."""
    import termios  # not there on Windows, from where jobs may be submitted all the same
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _pressed(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(terminal: int) -> Iterator[str | None]:
    yield None
    while True:
        ready, _, _ = select.select([terminal], [], [], _LOOK_SECONDS / 2)
        if not ready:
            yield None
            continue
        yield from keys_in(os.read(terminal, 64).decode(errors="replace"))


def keys_in(text: str) -> list[str]:
    """Parts what a terminal sends at once into keys: the three bytes of an arrow come together."""
    return re.findall(r"\x1b\[.|.", text, re.DOTALL)


COMMANDS = (top,)
