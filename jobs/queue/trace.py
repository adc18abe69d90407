"""What a job went through, and when: kept in its record, in less than 200 bytes.

Times are Unix seconds in what is given out. What a worker measured lies in the record as one JSON
list: when the job was claimed, seconds after that, and counts.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job as RQJob

from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.results import error_codes
from mlx_rq.jobs.queue.scripts import tolerant_script

_MOST = 2**53
_BY = "by "


class Measured(NamedTuple):
    """What a worker measured of the attempt that ended a job; None for what did not happen.

    `rendered`, `admitted`, `first_token` and `ended` are seconds after the claim. `preempted` and
    `failed` count how often it was put back, to make room and because the device failed;
    `first_with` is how the id of the job begins whose prefix it shared.
    """

    claimed_at: float
    rendered: float | None
    admitted: float | None
    first_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    attempt: int
    preempted: int
    failed: int
    first_with: str

    def encode(self) -> str:
        """Writes it for the job's record."""
        rounded = [round(one, 3) if isinstance(one, float) else one for one in self]
        return json.dumps(rounded, separators=(",", ":"))


class Event(NamedTuple):
    """One thing that happened to a job; `at` is Unix time in seconds.

    `first_for` is how the id of another job begins, for which the prefix was computed that this one
    shared. It is told to nobody who may not see all jobs: the other may be another client's.
    """

    name: str
    at: float
    detail: str = ""
    first_for: str = ""

    @property
    def text(self) -> str:
        """All that is to be said of it, in a line."""
        first_for = f"first for {self.first_for}" if self.first_for else ""
        return "; ".join(filter(None, (self.detail, first_for)))


_FIELDS = ("created_at", "started_at", "ended_at", "worker_name", "status", "trace", "fetched_at")


def note_fetched(connection: Redis, job_ids: Sequence[str]) -> None:
    """Has jobs' records say that their answers were fetched now, unless they were before.

    Where Redis does not take that, nothing is lost by it.
    """
    script = connection.register_script(tolerant_script(__package__, "fetched.lua"))
    with suppress(RedisError):
        script(keys=[RQJob.key_for(job_id) for job_id in job_ids])


def trace(connection: Redis, job_id: str) -> list[Event]:
    """Tells what happened to a job, in order; an empty list where there is no such job."""
    (events,) = traces(connection, [job_id])
    return events


def traces(connection: Redis, job_ids: Sequence[str]) -> list[list[Event]]:
    """Tells what happened to each of some jobs, in two round trips at most."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(RQJob.key_for(job_id), *_FIELDS)
        told = reading.ask_all(pipe)
    failed = [job_id for job_id, fields in zip(job_ids, told, strict=True) if _failed(fields)]
    codes = error_codes(connection, failed)
    return [
        _events(fields, codes.get(job_id, "")) for job_id, fields in zip(job_ids, told, strict=True)
    ]


def worker_in(events: Iterable[Event]) -> str:
    """Names the worker that claimed a job; empty where none did."""
    claimed = next((event.detail for event in events if event.name == "claimed"), "")
    return claimed.removeprefix(_BY).partition(", attempt")[0]


def _failed(fields: Any) -> bool:
    return fields is not reading.WRONG_TYPE and fields[4] == b"failed"


def _events(fields: Any, error: str) -> list[Event]:
    if fields is reading.WRONG_TYPE or not fields[4]:
        return []
    created, started, ended = (reading.time(field) for field in fields[:3])
    by = f"{_BY}{worker}" if (worker := reading.text(fields[3])) else ""
    events = [Event("queued", reading.unix_time(created))] if created else []
    if (measured := _read(fields[5])) is not None:
        events += _measured(measured, by)
    elif started:
        events.append(Event("claimed", reading.unix_time(started), by))
    if ended:
        committed = f"committed as {reading.text(fields[4])}"
        events.append(Event(committed, reading.unix_time(ended), error))
    if (fetched := reading.number(fields[6], 0, reading.MAX_UNIX_TIME)) is not None:
        events.append(Event("fetched", fetched))
    return events


def _measured(measured: Measured, by: str) -> Iterator[Event]:
    attempt = f"attempt {measured.attempt}"
    yield Event("claimed", measured.claimed_at, ", ".join(filter(None, (by, attempt))))
    steps = (
        ("rendered", measured.rendered, counted(measured.prompt_tokens, "token"), ""),
        ("admitted", measured.admitted, _admitted(measured), measured.first_with),
        ("first token", measured.first_token, "", ""),
        ("ended", measured.ended, counted(measured.generated_tokens, "token"), ""),
    )
    for name, seconds, detail, first_for in steps:
        if seconds is not None:
            yield Event(name, measured.claimed_at + seconds, detail, first_for)


def _admitted(measured: Measured) -> str:
    said = [counted(measured.cached_tokens, "token") + " computed for others"]
    if measured.preempted:
        said.append(f"put back {measured.preempted} x to make room")
    if measured.failed:
        said.append(f"put back {measured.failed} x by a fault of the device")
    return ", ".join(said)


def _read(reply: Any) -> Measured | None:
    """Reads what a worker measured; None where there is nothing, or nothing that makes sense."""
    written = reading.json_object(b'{"list":%s}' % reply) if isinstance(reply, bytes) else {}
    values = {} if isinstance(written, reading.Unreadable) else written
    found = values.get("list")
    if not isinstance(found, list) or len(found) != len(Measured._fields):
        return None
    optional = {"rendered", "admitted", "first_token"}
    for name, value in zip(Measured._fields, found, strict=True):
        if value is None and name in optional:
            continue
        if name == "first_with":
            if not isinstance(value, str):
                return None
        elif not isinstance(value, int | float) or not 0 <= value <= _MOST:
            return None
    return Measured(*found)
