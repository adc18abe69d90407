"""Ends many jobs at once."""

from collections.abc import Iterable

from mlx_rq.jobs.client.job import Job, distinct_jobs, one_url
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable


def cancel_many(jobs: Iterable[Job], *, only_waiting: bool = False) -> list[Job]:
    """Ends jobs without an answer, hundreds in one step; returns those that this call ended.

    With `only_waiting`, what a worker has begun goes on. Jobs that had ended before, or are no
    more, are passed by. All must live in one Redis. Raises RedisUnavailable; what was ended until
    then stays so.
    """
    distinct = distinct_jobs(jobs)
    if not distinct:
        return []
    connection = connect(one_url(distinct))
    with reachable(connection):
        job_ids = [job.id for job in distinct]
        ended = cancel_jobs(connection, job_ids, only_waiting=only_waiting).ended
    return [job for job in distinct if job.id in ended]
