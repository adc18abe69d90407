"""The limits of the queue, which its operator sets once for all producers, in any language.

They lie in Redis, in the hash `mlx-rq:limits`, and `enqueue.lua` goes by them in the step that
enqueues. So producers that come at the same moment cannot pass a limit together: of a call with
more than 500 jobs, which are sent in parts, the places of all are kept (`reserve.lua`). Only new
jobs are refused: a job that goes back to its queue, and every answer, is always taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.backlog import our_queues, waiting_in
from mlx_rq.jobs.queue.reading import Unreadable

_DIGITS = 18
MOST = 10**_DIGITS - 1
"""The highest limit that can be set and read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What new jobs are refused beyond; None is no limit.

    `jobs` may wait, all queues of mlx-rq together. `bytes` is the memory that Redis uses
    (`used_memory`) with the bodies that come: set well below what the server has, it leaves room
    for the answers.
    """

    jobs: int | None = None
    bytes: int | None = None


def read_limits(connection: Redis) -> Limits:
    """Reads the limits. Raises RequestError where somebody wrote what is none."""
    fields = reading.ask(connection.hmget, keys.LIMITS, "jobs", "bytes")
    if isinstance(fields, Unreadable):
        raise RequestError(
            f"Invalid limits in Redis: {keys.LIMITS} holds {fields.why}, so there are none. "
            "Set them with `mlx-rq limits`.",
            code="invalid_value",
            param="limits",
        )
    jobs, most_bytes = fields
    return Limits(_number("jobs", jobs), _number("bytes", most_bytes))


def _number(name: str, value: Any) -> int | None:
    if value is None:
        return None
    text = reading.text(value)
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS:
        raise RequestError(
            f"Invalid limit {name!r} in Redis: expected a whole number, but got {text[:80]!r} "
            "instead. Set it with `mlx-rq limits`.",
            code="invalid_value",
            param=name,
        )
    return int(text)


def set_limits(connection: Redis, changes: Mapping[str, int | None]) -> None:
    """Sets limits, or with None removes them, in one step; those not named stay as they are."""
    with connection.pipeline() as pipe:
        if changes and reading.ask(connection.hlen, keys.LIMITS) is reading.WRONG_TYPE:
            pipe.delete(keys.LIMITS)
        for name, value in changes.items():
            if value is None:
                pipe.hdel(keys.LIMITS, name)
            else:
                pipe.hset(keys.LIMITS, name, value)
        pipe.execute()


def limits_in_use(connection: Redis) -> dict[str, Any]:
    """Tells each limit and how much of it is used, as `mlx-rq limits` and `status` show it."""
    return in_use(connection, read_limits(connection))


def in_use(connection: Redis, limits: Limits) -> dict[str, Any]:
    """Tells how much of these limits is used."""
    waiting = sum(waiting_in(connection, our_queues(connection)))
    used = connection.info("memory")["used_memory"]
    return {
        "jobs": {"limit": limits.jobs, "waiting": waiting},
        "bytes": {"limit": limits.bytes, "used": used},
    }
