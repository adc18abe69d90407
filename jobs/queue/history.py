"""What the queue and its workers did over the last hours: a stream of samples, with a bound.

An entry's id is the beginning of its time slot, by the clock of Redis, so that of all HTTP servers
that sample one queue only the first one in each slot writes, whoever that is.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from redis import Redis
from redis.exceptions import ResponseError

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.reading import Unreadable

SLOT_SECONDS = 10
"""How often a sample is kept."""

KEPT_SECONDS = 12 * 3600
"""How far back samples go (about 2 MB in Redis); gone so long after the last one was written."""


class Sample(BaseModel):
    """What was seen at one moment. Rates are by the second, since the sample before."""

    workers: int
    queued: int
    in_progress: int
    jobs_ended: float
    prompt_tokens: float
    """Tokens of the prompts that were taken, whether computed or had for nothing."""
    prefilled_tokens: float
    decoded_tokens: float
    memory_active: int
    memory_cache: int
    memory_ceiling: int


def write_sample(connection: Redis, sample: Sample) -> bool:
    """Keeps a sample; False where this slot has one already."""
    slot = int(redis_time(connection)) // SLOT_SECONDS * SLOT_SECONDS
    try:
        _add(connection, slot, sample)
    except ResponseError as error:
        if "equal or smaller" in str(error):
            return False
        raise
    connection.expire(keys.HISTORY, KEPT_SECONDS)
    return True


def _add(connection: Redis, slot: int, sample: Sample) -> None:
    fields: Any = sample.model_dump()
    kept = KEPT_SECONDS // SLOT_SECONDS
    identity = f"{slot * 1000}-0"
    add = connection.xadd
    if reading.ask(add, keys.HISTORY, fields, id=identity, maxlen=kept) is reading.WRONG_TYPE:
        connection.delete(keys.HISTORY)
        add(keys.HISTORY, fields, id=identity, maxlen=kept)


def read_history(connection: Redis, after: int = 0) -> list[tuple[int, Sample]]:
    """Reads the samples after a Unix time in seconds, each with its time, the oldest first."""
    found = reading.ask(
        connection.xrevrange,
        keys.HISTORY,
        min=f"({after * 1000 + 999}",
        count=KEPT_SECONDS // SLOT_SECONDS,
    )
    if isinstance(found, Unreadable):
        return []
    read = [(_seconds(identity), _sample(fields)) for identity, fields in reversed(found)]
    return [(at, sample) for at, sample in read if sample is not None]


def _seconds(identity: bytes) -> int:
    return reading.count(identity.partition(b"-")[0]) // 1000


def _sample(fields: Mapping[bytes, bytes]) -> Sample | None:
    """Reads an entry; None where somebody else wrote it."""
    try:
        return Sample.model_validate_strings(
            {reading.text(name): reading.text(value) for name, value in fields.items()}
        )
    except ValidationError:
        return None
