"""Whose a job is: a client of an HTTP server that asks for keys sees its own, and no other's.

A client goes by a name that tells nothing of its key (`docs/security.md`). Who comes without one,
as a program that logs in to Redis itself, or where a server asks for no keys, sees everything.
"""

import re
from collections.abc import Sequence

from rq.job import Job as RQJob

from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.payload import read_meta

OPERATOR = "operator"
"""The client that sees what belongs to any."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_name(text: str) -> bool:
    """Tells whether a client can be called so."""
    return _NAME.fullmatch(text) is not None


def may_see(client: str | None, owner: str | None) -> bool:
    """Tells whether a client may see what belongs to an owner; what nobody owns is the operator's.

    None as the client is somebody without a name.
    """
    return client in (None, OPERATOR, owner)


def may_see_job(redis_url: str | None, client: str | None, job_id: str) -> bool:
    """Tells whether a client may see a job; raises RedisUnavailable."""
    return bool(seen_among(redis_url, client, [job_id]))


def owner_of(redis_url: str | None, job_id: str) -> str | None:
    """Says whose a job is; None where it is nobody's. Raises RedisUnavailable."""
    connection = connect(redis_url)
    with reachable(connection):
        meta = read_meta(reading.ask(connection.hget, RQJob.key_for(job_id), "meta"))
    owner = meta.get("owner")
    return owner if isinstance(owner, str) and is_name(owner) else None


def seen_among(redis_url: str | None, client: str | None, job_ids: Sequence[str]) -> list[str]:
    """Picks the jobs that a client may see; raises RedisUnavailable."""
    if may_see(client, None):
        return list(job_ids)
    connection = connect(redis_url)
    with reachable(connection), connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(RQJob.key_for(job_id), "meta")
        metas = reading.ask_all(pipe)
    return [
        job_id
        for job_id, meta in zip(job_ids, metas, strict=True)
        if may_see(client, read_meta(meta).get("owner"))
    ]
