"""Puts odd values into the keys and fields that there are while jobs live."""

import random
import re
from typing import NamedTuple

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


class OddValue(NamedTuple):
    """A key, a field of it or None, and what is to be put there."""

    key: str
    field: bytes | str | None
    name: str

    @property
    def about(self) -> set[str]:
        """The ids of the jobs that the key is about."""
        return set(_JOB_ID.findall(self.key)[:1])

    def write(self, connection: Redis) -> None:
        if self.field is not None:
            connection.hset(self.key, self.field, BYTES[self.name])
            return
        connection.delete(self.key)
        if self.name in BYTES:
            connection.set(self.key, BYTES[self.name])
        else:
            TYPES[self.name](connection, self.key)


def odd_value(connection: Redis, chance: random.Random) -> OddValue:
    """Chooses one of the keys that there are, or a field of one, and what is put there.

    Not by what a loss of data is told, nor what a worker has in flight: where nobody can know that,
    a death counts for all that it had.
    """
    damaged = any(connection.type(key) not in (b"none", kind) for key, kind in _COPIES.items())
    # One key of each kind: else those of jobs would be nearly all that is ever hit.
    kinds: dict[str, list[str]] = {}
    for number, found in enumerate(connection.scan_iter("*", count=1000)):
        name = found.decode()
        kinds.setdefault(_JOB_ID.sub("id", name), []).append(name)
        if number == _SEARCHED:
            break
    spared = (*_SPARED, *_COPIES) if damaged else _SPARED
    kind = chance.choice(sorted(kind for kind in kinds if not kind.startswith(spared)))
    key = chance.choice(sorted(kinds[kind]))
    if connection.type(key) == b"hash" and chance.random() < 0.7:
        field = chance.choice(sorted(connection.hkeys(key)))
        return OddValue(key, field, chance.choice(sorted(BYTES)))
    return OddValue(key, None, chance.choice(sorted([*BYTES, *TYPES])))
