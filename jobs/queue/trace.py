"""What a job went through, and when: kept in its record, in less than 200 bytes.

Times are Unix seconds in what is given out. What a worker measured lies in the record as one JSON
list: when the job was claimed, seconds after that, and counts.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from redis import Redis
from rq.job import Job as RQJob

from mlx_rq.jobs.queue import reading

_MOST = 2**53
_BY = "by "


class Measured(NamedTuple):
    """What a worker measured of the attempt that ended a job; None for what did not happen.

    `rendered`, `admitted`, `first_token` and `ended` are seconds after the claim.
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

    def encode(self) -> str:
        """Writes it for the job's record."""
        rounded = [round(one, 3) if isinstance(one, float) else one for one in self]
        return json.dumps(rounded, separators=(",", ":"))


class Event(NamedTuple):
    """One thing that happened to a job; `at` is Unix time in seconds."""

    name: str
    at: float
    detail: str = ""


_FIELDS = ("created_at", "started_at", "ended_at", "worker_name", "status", "trace")


def trace(connection: Redis, job_id: str) -> list[Event]:
    """Tells what happened to a job, in order; an empty list where there is no such job."""
    (events,) = traces(connection, [job_id])
    return events


def traces(connection: Redis, job_ids: Iterable[str]) -> list[list[Event]]:
    """Tells what happened to each of some jobs, in one round trip."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(RQJob.key_for(job_id), *_FIELDS)
        return [_events(fields) for fields in reading.ask_all(pipe)]


def worker_in(events: Iterable[Event]) -> str:
    """Names the worker that claimed a job; empty where none did."""
    claimed = next((event.detail for event in events if event.name == "claimed"), "")
    return claimed.removeprefix(_BY).partition(", attempt")[0]


def _events(fields: Any) -> list[Event]:
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
        events.append(Event(f"committed as {reading.text(fields[4])}", reading.unix_time(ended)))
    return events


def _measured(measured: Measured, by: str) -> Iterator[Event]:
    attempt = f"attempt {measured.attempt}"
    yield Event("claimed", measured.claimed_at, ", ".join(filter(None, (by, attempt))))
    steps = (
        ("rendered", measured.rendered, f"{measured.prompt_tokens:,} tokens"),
        (
            "admitted",
            measured.admitted,
            f"{measured.cached_tokens:,} tokens computed for others"
            + (f", put back {measured.preempted} times" if measured.preempted else ""),
        ),
        ("first token", measured.first_token, ""),
        ("ended", measured.ended, f"{measured.generated_tokens:,} tokens"),
    )
    for name, seconds, detail in steps:
        if seconds is not None:
            yield Event(name, measured.claimed_at + seconds, detail)


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
        if not isinstance(value, int | float) or not 0 <= value <= _MOST:
            return None
    return Measured(*found)
