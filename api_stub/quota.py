"""How many jobs may wait for one model, and how many of one key may be on their way at once.

The jobs of a key are in a set in Redis, which all servers share. Those that have ended are taken
out of it when it is full, not before: below the limit, a key costs two commands a job. A place is
taken before the job is made and named after it afterwards, so that requests that come together
cannot pass the limit together; a server that dies in between leaves a place that soon is free
again.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from mlx_rq.api_stub.middleware import rate_limited
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.options import STORED_TTL
from mlx_rq.jobs.queue.record import ended_among
from mlx_rq.jobs.queue.scripts import tolerant_script

FULL_SECONDS = 30.0
"""When a client should come again that found no place."""

_UNNAMED = "new:"
_UNNAMED_SECONDS = 60.0
"""How long a place is kept for a job that is being made."""

_CLEAN_SECONDS = 1.0
"""How often the jobs of a key that has no place left are looked through."""


_LOOK_SECONDS = 1.0
"""How long a server goes by what it saw of a queue that was not nearly full."""


class Room:
    """What the queues of all models have room for, seen from one server."""

    def __init__(self, most_waiting: int) -> None:
        self._limit = most_waiting
        self._spare: dict[str, tuple[int, float]] = {}

    def check(self, connection: Redis, model: str) -> None:
        """Raises ApiError where too many jobs wait for a model.

        While jobs come, the queue is looked at again once half of what had room then has come.
        """
        now = time.monotonic()
        spare, until = self._spare.get(model, (0, 0.0))
        if spare and now < until:
            self._spare[model] = spare - 1, until
            return
        names = [keys.queue_name(model, priority) for priority in PRIORITIES]
        waiting = sum(waiting_in(connection, names))
        if waiting >= self._limit:
            self._spare.pop(model, None)
            wait = counted(waiting, "job waits", "jobs wait")
            raise rate_limited(f"{wait} for {model!r} already.", FULL_SECONDS)
        self._spare[model] = (self._limit - waiting - 1) // 2, now + _LOOK_SECONDS


class Quota:
    """The places of all keys, seen from one server."""

    def __init__(self, jobs_per_key: int | None) -> None:
        self._limit = jobs_per_key
        self._cleaned: dict[str, float] = {}

    @contextmanager
    def place(self, connection: Redis, owner: str) -> Iterator["Place"]:
        """Takes a place of a key while its job is made; raises ApiError where all are taken."""
        if self._limit is None:
            yield Place()
            return
        name, place = keys.owned(owner), f"{_UNNAMED}{secrets.token_hex(8)}"
        taken, taken_at = _take(connection, name, place)
        if taken > self._limit and self._clean(connection, owner):
            taken = reading.count(reading.ask(connection.zcard, name))
        if taken > self._limit:
            reading.ask(connection.zrem, name, place)
            jobs = counted(self._limit, "job of this key is", "jobs of this key are")
            why = f"{jobs} on {'its' if self._limit == 1 else 'their'} way already."
            raise rate_limited(why, FULL_SECONDS)
        made = Place()
        try:
            yield made
        finally:
            with connection.pipeline() as pipe:
                pipe.zrem(name, place)
                if made.job_id is not None:
                    pipe.zadd(name, {made.job_id: taken_at})
                reading.ask_all(pipe)

    def _clean(self, connection: Redis, owner: str) -> bool:
        """Takes out the jobs that have ended; returns whether it was time to look."""
        now = time.monotonic()
        if now < self._cleaned.get(owner, float("-inf")) + _CLEAN_SECONDS:
            return False
        self._cleaned[owner] = now
        name = keys.owned(owner)
        members: Any = connection.zrange(name, 0, -1, withscores=True)
        scores = {reading.text(member): score for member, score in members}
        unnamed = {member for member in scores if member.startswith(_UNNAMED)}
        late = redis_time(connection) - _UNNAMED_SECONDS
        gone = [member for member in unnamed if scores[member] < late]
        gone += ended_among(connection, [member for member in scores if member not in unnamed])
        if gone:
            connection.zrem(name, *gone)
        return True


class Place:
    """One place; `job_id` is set to the job that has it, None where none was made."""

    job_id: str | None = None


def _take(connection: Redis, name: str, place: str) -> tuple[int, float]:
    """Puts a place into a key's set; returns how many there are with it, and the time in Redis."""
    script = connection.register_script(tolerant_script(__package__, "quota.lua"))
    taken, time = script(keys=[name], args=[place, STORED_TTL])
    return int(taken), float(time)
