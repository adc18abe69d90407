"""The command `top`: what `status` says, live, with what runs, and keys for single jobs."""

import os
import re
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import click
from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.status import status
from mlx_rq.worker.cli.common import option, redis_option
from mlx_rq.worker.cli.top_job import JobView, look_at
from mlx_rq.worker.cli.top_screen import Screen

_LOOK_SECONDS = 1.0
_KEY_SECONDS = 0.1
"""How soon what came of Redis is on the screen."""

Seen = Mapping[str, Any] | JobView | Exception


@click.command()
@option("--show-content", is_flag=True, help="Show prompts and answers of the jobs that you open.")
@redis_option
def top(show_content: bool, redis_url: str | None) -> None:
    """Show queues, workers and running jobs, live; q ends it.

    s sorts the running jobs by tokens, by id or by worker; the arrow keys choose one: Enter opens
    it (its state, its life), c and then y cancels it. / opens any job by its id, or by how that
    begins. Esc goes back.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal: `mlx-rq status` prints the same once")
    connection = connect(redis_url)
    console, screen = Console(highlight=False), Screen(content=show_content)
    with reachable(connection):
        screen.take(status(connection))
    with (
        closing(Look(connection, redis_url, content=show_content)) as look,
        Live(console=console, screen=True, auto_refresh=False) as live,
        _keys() as keys,
    ):
        size = None
        for key in keys:
            if key is not None:
                wanted = screen.press(key)
                if wanted == "quit":
                    return
                if wanted is not None:
                    screen.said = _cancel(connection, wanted)
                look.at(screen.opened)
            news = look.news()
            for seen in news:
                _take(screen, seen)
            if key is not None or news or size != console.size:
                size = console.size
                live.update(screen.draw(console), refresh=True)


def _take(screen: Screen, seen: Seen) -> None:
    match seen:
        case Exception():
            screen.away(f"tries again: {seen}")
        case JobView():
            screen.take_job(seen)
        case _:
            screen.take(seen)


def _cancel(connection: Redis, job_id: str) -> str:
    """Cancels a job; says what came of it."""
    try:
        with reachable(connection):
            ended = job_id in cancel_jobs(connection, [job_id]).ended
    except (RedisError, RedisUnavailable) as error:
        return f"{job_id} is not cancelled: {error}"
    return f"{job_id} {'cancelled' if ended else 'had ended before'}"


class Look:
    """Asks Redis once a second, in a thread of its own: keys do not wait for it."""

    def __init__(self, connection: Redis, redis_url: str | None, *, content: bool) -> None:
        self._connection, self._redis_url, self._content = connection, redis_url, content
        self._news: SimpleQueue[Seen] = SimpleQueue()
        self._job: str | None = None
        self._soon = threading.Event()
        self._closed = False
        threading.Thread(target=self._follow, name="top", daemon=True).start()

    def at(self, job: str | None) -> None:
        """Has a job looked at, too, by its id or how that begins; None: no more."""
        if job != self._job:
            self._job = job
            self._soon.set()

    def close(self) -> None:
        """Has it end, soon."""
        self._closed = True
        self._soon.set()

    def news(self) -> list[Seen]:
        """Gives what was seen since."""
        seen = []
        try:
            while True:
                seen.append(self._news.get_nowait())
        except Empty:
            return seen

    def _follow(self) -> None:
        while True:
            hurry = self._soon.wait(_LOOK_SECONDS)
            self._soon.clear()
            if self._closed:
                return
            try:
                if (job := self._job) is not None:
                    self._news.put(look_at(job, self._redis_url, content=self._content))
                if not hurry:  # the sparklines have a bar for each second
                    with reachable(self._connection):
                        self._news.put(status(self._connection))
            except (RedisError, RedisUnavailable, OSError) as error:
                self._news.put(error)


@contextmanager
def _keys() -> Iterator[Iterator[str | None]]:
    """Gives the keys that are pressed, None where a moment goes by without, during the block."""
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
        ready, _, _ = select.select([terminal], [], [], _KEY_SECONDS)
        if not ready:
            yield None
        elif text := os.read(terminal, 64):
            yield from keys_in(text.decode(errors="replace"))
        else:
            return  # the terminal was closed


def keys_in(text: str) -> list[str]:
    """Parts what a terminal sends at once into keys: the bytes of an arrow come together."""
    return re.findall(r"\x1b\[\d*[~A-Za-z]|.", text, re.DOTALL)


COMMANDS = (top,)
