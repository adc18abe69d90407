"""Finds the jobs that came, run or ended last, and what is known of each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from rq.job import Job as RQJob
from rq.job import JobStatus

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.backlog import our_queues
from mlx_rq.jobs.queue.finish import key_names
from mlx_rq.jobs.queue.payload import read_meta, read_payload

_LISTS = ("queue", "started", "finished", "failed", "canceled")

_BODIES_AT_ONCE = 20


class Seen(NamedTuple):
    """A job as its record has it; `status` is RQ's word, and times are RQ's, empty if none."""

    id: str
    status: str
    model: str
    priority: str
    created_at: str
    started_at: str
    ended_at: str
    worker: str
    owner: str | None
    batch: str | None

    @property
    def changed_at(self) -> str:
        return max(self.created_at, self.started_at, self.ended_at)


def recent_jobs(connection: Redis, lists: Iterable[str], most: int) -> list[Seen]:
    """Reads the last so many jobs of each of RQ's lists in each queue: those that run, the latest.

    `lists` are of `queue`, `started`, `finished`, `failed` and `canceled`.
    """
    wanted = set(lists)
    with connection.pipeline(transaction=False) as pipe:
        for queue_name in our_queues(connection):
            names = key_names(queue_name)
            for name in _LISTS:
                if name in wanted:
                    (pipe.lrange if name == "queue" else pipe.zrange)(names[name], -most, -1)
        replies = reading.ask_all(pipe)
    # A lease is <job id>:<execution id>.
    ids = dict.fromkeys(
        member.partition(":")[0] for reply in replies for member in reading.texts(reply)
    )
    found = seen_jobs(connection, list(ids))
    running = JobStatus.STARTED.value
    return sorted(found, key=lambda job: (job.status == running, job.changed_at), reverse=True)


def seen_jobs(connection: Redis, job_ids: Sequence[str]) -> list[Seen]:
    """Reads the records of jobs; those that are none, or another program's, are left out."""
    fields = ("status", "origin", "created_at", "started_at", "ended_at", "worker_name", "meta")
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(RQJob.key_for(job_id), *fields)
        replies = reading.ask_all(pipe)
    found = (_seen(job_id, reply) for job_id, reply in zip(job_ids, replies, strict=True))
    return [job for job in found if job is not None]


def _seen(job_id: str, reply: Any) -> Seen | None:
    if isinstance(reply, reading.Unreadable) or not reply[0]:
        return None
    status, origin, created, started, ended, worker, meta = reply
    try:
        model, priority = keys.model_and_priority(reading.text(origin))
    except ValueError:
        return None
    said = read_meta(meta)
    created_at, started_at, ended_at = map(reading.time, (created, started, ended))
    owner, batch = (said[n] if isinstance(said.get(n), str) else None for n in ("owner", "batch"))
    return Seen(
        id=job_id,
        status=reading.text(status),
        model=model,
        priority=priority,
        created_at=created_at,
        started_at=started_at,
        ended_at=ended_at,
        worker=reading.text(worker),
        owner=owner,
        batch=batch,
    )


def metadata_of(connection: Redis, job_ids: Sequence[str]) -> Mapping[str, str]:
    """Reads the metadata in the bodies of jobs, as JSON; empty where there is none."""
    found: dict[str, str] = {}
    for start in range(0, len(job_ids), _BODIES_AT_ONCE):
        some = job_ids[start : start + _BODIES_AT_ONCE]
        with connection.pipeline(transaction=False) as pipe:
            for job_id in some:
                pipe.hget(RQJob.key_for(job_id), "data")
            replies = reading.ask_all(pipe)
        found |= {job_id: _metadata(data) for job_id, data in zip(some, replies, strict=True)}
    return found


def _metadata(data: Any) -> str:
    try:
        body = read_payload(None if isinstance(data, reading.Unreadable) else data).body
    except RequestError:
        return ""
    metadata = body.get("metadata")
    return json.dumps(metadata, ensure_ascii=False) if metadata else ""
