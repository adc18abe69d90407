"""What must be true of jobs and of Redis when a test has broken something."""

from collections.abc import Iterable, Sequence

from fakes import PATIENCE
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import Job, as_completed
from mlx_rq.jobs.queue.options import DEFAULT_MAX_ATTEMPTS, RECOVERY_RETRIES

ALL = DEFAULT_MAX_ATTEMPTS - 1 + RECOVERY_RETRIES
"""The retries that RQ is given for a job of which no attempt was lost."""


def all_answered(jobs: Sequence[Job]) -> None:
    """Waits for jobs and asserts that each has its own answer, unaltered."""
    assert set(as_completed(jobs, timeout=PATIENCE)) == set(jobs)
    assert texts(jobs) == [f"text for {job.id}" for job in jobs]


def texts(jobs: Iterable[Job]) -> list[str]:
    return [job.result(0)["choices"][0]["text"] for job in jobs]


def attempts_lost(connection: Redis, jobs: Iterable[Job]) -> list[int]:
    """How many attempts each job has lost with a worker that died."""
    return [ALL - int(connection.hget(RQJob.key_for(job.id), "retries_left")) for job in jobs]


def ends(connection: Redis, job: Job) -> int:
    """How many ends RQ's stream of results tells of a job."""
    return int(connection.xlen(f"rq:results:{job.id}"))


def traces(connection: Redis) -> list[str]:
    """What is left of leases, anywhere."""
    patterns = ("rq:wip:*", "rq:execution:*", "rq:executions:*", "rq:worker:*:executions")
    return [key.decode() for pattern in patterns for key in connection.scan_iter(pattern)]
