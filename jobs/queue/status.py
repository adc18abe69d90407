"""All that a person asks of a queue at one moment, for `mlx-rq status` and `mlx-rq top`.

`docs/status.md` describes the shape. It only grows within a version.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq.jobs.openai.errors import error_in
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.finish import key_names
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.payload import read_meta
from mlx_rq.jobs.queue.results import read_result
from mlx_rq.jobs.queue.workers import with_live

VERSION = 1
"""Of the shape. A new one is for what means something else than before."""

FAILURES = 5
"""How many of the last failures are told."""

_CHUNK = 256
_LOOKED_AT = 1024
"""Entries of a list that are looked at for the oldest that waits: others may have been taken."""


def status(connection: Redis) -> dict[str, Any]:
    """Gives `overview` with how long jobs wait and will wait, what runs, and what failed last."""
    state = overview(connection)
    workers, queues = with_live(connection, state["workers"]), state["queues"]
    now = redis_time(connection)
    for queue in queues:
        name = keys.queue_name(queue["model"], queue["priority"])
        since = [one["waiting_since"][name] for one in workers if name in one["waiting_since"]]
        if queue["queued"] and (first := _oldest_in(connection, name)) is not None:
            since.append(first)
        queue["oldest_seconds"] = round(max(0.0, now - min(since)), 1) if since else None
        queue["eta_seconds"] = eta(queue, queues, workers)
    return {
        "version": VERSION,
        "queues": queues,
        "workers": workers,
        "sharing": sharing(workers),
        "failures": _failures(connection, queues),
        "limits": state["limits"],
        "notes": state["notes"],
    }


def eta(
    queue: Mapping[str, Any],
    queues: Sequence[Mapping[str, Any]],
    workers: Sequence[Mapping[str, Any]],
) -> float | None:
    """Says in how many seconds the last job of a queue will have ended, at the pace of late.

    None where nothing goes on there, or nobody knows the pace.
    """
    if not queue["queued"] + queue["in_progress"]:
        return None
    serving = [one for one in workers if queue["model"] in one["serves"] and not one["paused"]]
    pace = sum(one["rates"]["jobs_at_work"] or 0.0 for one in serving)
    if not pace:
        return None
    served = {model for one in serving for model in one["serves"]}
    rank = PRIORITIES.index(queue["priority"])
    ahead = 0
    for other in queues:
        if other["model"] in served:
            first = PRIORITIES.index(other["priority"]) <= rank
            ahead += other["in_progress"] + (other["queued"] if first else 0)
    return round(float(ahead / pace), 1)


def sharing(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Says what live workers did not compute because prompts begin alike.

    `ratio` is tokens computed for each distinct token; None before any was.
    """
    counts = {
        name: sum(worker["totals"][name] for worker in workers)
        for name in ("prompt_tokens", "distinct_tokens", "prefilled_tokens")
    }
    computed, distinct = counts["prefilled_tokens"], counts["distinct_tokens"]
    return {
        **counts,
        "saved_tokens": max(0, counts["prompt_tokens"] - computed),
        "ratio": round(computed / distinct, 3) if distinct else None,
    }


def _oldest_in(connection: Redis, queue_name: str) -> float | None:
    """Says when the first job that waits in a queue was submitted; None if it is not found soon."""
    name = f"{Queue.redis_queue_namespace_prefix}{queue_name}"
    for start in range(0, _LOOKED_AT, _CHUNK):
        entries = reading.ask(connection.lrange, name, start, start + _CHUNK - 1)
        job_ids = reading.texts(entries)
        if not job_ids:
            return None
        with connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(RQJob.key_for(job_id), "status", "meta")
            replies = reading.ask_all(pipe)
        for fields in replies:
            if fields is reading.WRONG_TYPE or fields[0] != b"queued":
                continue
            since = read_meta(fields[1]).get("submitted_at")
            if (at := reading.number(since, 0, reading.MAX_UNIX_TIME)) is not None:
                return at
    return None


def _failures(connection: Redis, queues: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tells the last jobs that failed, the newest first, each with its reason."""
    names = [keys.queue_name(queue["model"], queue["priority"]) for queue in queues]
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.zrevrange(key_names(name)["failed"], 0, FAILURES - 1)
        found = [
            (job_id, queue["model"])
            for queue, reply in zip(queues, reading.ask_all(pipe), strict=True)
            for job_id in reading.texts(reply)
        ]
    with connection.pipeline(transaction=False) as pipe:
        for job_id, _ in found:
            pipe.get(keys.result(job_id))
            pipe.hget(RQJob.key_for(job_id), "ended_at")
        replies = reading.ask_all(pipe)
    failures = []
    for (job_id, model), result, ended_at in zip(found, replies[::2], replies[1::2], strict=True):
        error = error_in(read_result(job_id, result) or {})
        failures.append(
            {
                "id": job_id,
                "model": model,
                "ended_at": reading.time(ended_at) or None,
                "code": error and error["code"],
                "message": error["message"] if error else "RQ ended it itself.",
            }
        )
    failures.sort(key=_ended, reverse=True)
    return failures[:FAILURES]


def _ended(failure: Mapping[str, Any]) -> float:
    at = failure["ended_at"]
    return datetime.fromisoformat(at).timestamp() if at else 0.0
