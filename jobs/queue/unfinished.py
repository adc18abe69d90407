"""Finds jobs that have not ended: those of a model, or of a batch, or all."""

from collections.abc import Iterator, Mapping

from redis import Redis
from rq.job import Job as RQJob

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.backlog import our_queues
from mlx_rq.jobs.queue.finish import key_names
from mlx_rq.jobs.queue.payload import read_meta

_READ_AT_ONCE = 5000


def unfinished_jobs(
    connection: Redis,
    *,
    model: str | None = None,
    batch: str | None = None,
    only_waiting: bool = False,
) -> list[str]:
    """Finds the ids of jobs that wait and, unless `only_waiting`, of those that run.

    Of all models and batches where none is named. Some may have ended when this returns.
    """
    found: dict[str, None] = {}
    for queue_name in _queue_names(connection, model):
        for some in _ids(connection, key_names(queue_name), only_waiting):
            found.update(dict.fromkeys(_that_go_on(connection, some, batch, only_waiting)))
    return list(found)


def _queue_names(connection: Redis, model: str | None) -> list[str]:
    ours = our_queues(connection)
    return [n for n in ours if model is None or keys.model_and_priority(n)[0] == model]


def _ids(connection: Redis, names: Mapping[str, str], only_waiting: bool) -> Iterator[list[str]]:
    # From the end, because workers take from the front meanwhile.
    last = -1
    while some := reading.texts(
        reading.ask(connection.lrange, names["queue"], last - _READ_AT_ONCE + 1, last)
    ):
        yield some
        last -= _READ_AT_ONCE
    if not only_waiting:
        leases = reading.texts(reading.ask(connection.zrange, names["started"], 0, -1))
        yield [lease.partition(":")[0] for lease in leases]


def _that_go_on(
    connection: Redis, job_ids: list[str], batch: str | None, only_waiting: bool
) -> Iterator[str]:
    """Picks the jobs that have not ended, and are of the batch; lists hold others, too."""
    states = {b"queued"} if only_waiting else {b"queued", b"started"}
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(RQJob.key_for(job_id), "status", "meta")
        records = reading.ask_all(pipe)
    for job_id, record in zip(job_ids, records, strict=True):
        if not isinstance(record, list):
            continue  # another type than a job's
        status, meta = record
        if status in states and (batch is None or read_meta(meta).get("batch") == batch):
            yield job_id
