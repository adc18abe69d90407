"""Puts odd values into the keys and fields that there are while jobs live."""

import random
import re

from odd_values import BYTES, TYPES
from redis import Redis

from mlx_rq.jobs.queue import keys

_JOB_ID = re.compile("[0-9a-f]{32}")
_SPARED = (keys.DATA_SET, keys.IN_FLIGHT)
_QUEUE = keys.queue_name("default", "default")
_COPIES = {
    f"rq:queue:{_QUEUE}": b"list",
    f"mlx-rq:backlog:{_QUEUE}": b"zset",
    f"mlx-rq:backlog-next:{_QUEUE}": b"zset",
}
"""What waits stands here twice: not both are overwritten before the next claim mends one."""

_SEARCHED = 4000


def spoil(connection: Redis, chance: random.Random) -> tuple[str, set[str]]:
    """Overwrites one key, or one field of one; returns what, and the ids of the jobs it is about.

    Not by what a loss of data is told, nor what a worker has in flight: where nobody can know that,
    a death counts for all that it had.
    """
    damaged = any(connection.type(key) not in (b"none", kind) for key, kind in _COPIES.items())
    # One key of each kind: else those of jobs would be nearly all that is ever hit.
    kinds: dict[str, list[str]] = {}
    for number, key in enumerate(connection.scan_iter("*", count=1000)):
        name = key.decode()
        kinds.setdefault(_JOB_ID.sub("id", name), []).append(name)
        if number == _SEARCHED:
            break
    spared = (*_SPARED, *_COPIES) if damaged else _SPARED
    kind = chance.choice(sorted(kind for kind in kinds if not kind.startswith(spared)))
    key = chance.choice(sorted(kinds[kind]))
    about = set(_JOB_ID.findall(key)[:1])
    if connection.type(key) == b"hash" and chance.random() < 0.7:
        field = chance.choice(sorted(connection.hkeys(key)))
        odd = chance.choice(sorted(BYTES))
        connection.hset(key, field, BYTES[odd])
        return f"{key} {field!r}: {odd}", about
    connection.delete(key)
    odd = chance.choice(sorted([*BYTES, *TYPES]))
    if odd in BYTES:
        connection.set(key, BYTES[odd])
    else:
        TYPES[odd](connection, key)
    return f"{key}: {odd}", about
