"""What Redis knows of a job: RQ's record of it, and its result."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from redis import Redis
from rq.job import Job as RQJob
from rq.job import JobStatus

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.results import Outcome, ending_of, read_result

_ENDED = {
    status.value.encode()
    for status in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
}


class JobRecord(NamedTuple):
    """What was known of a job at one moment; what cannot be read, or is not there, is empty.

    `status` is RQ's word.
    """

    status: str
    origin: str
    created_at: str
    started_at: str
    ended_at: str
    worker: str


def read_outcome(connection: Redis, job_id: str) -> tuple[Outcome | None, str]:
    """Reads the result of a job, None where there is none, and its status."""
    with connection.pipeline() as pipe:  # in one step: the end could come between two
        pipe.get(keys.result(job_id))
        pipe.hget(RQJob.key_for(job_id), "status")
        result, status = reading.ask_all(pipe)
    return read_result(job_id, result), reading.text(status)


def read_record(connection: Redis, job_id: str) -> JobRecord | None:
    """Reads all of it; None where there is no such job (any more)."""
    times = ("created_at", "started_at", "ended_at")
    with connection.pipeline() as pipe:
        pipe.get(keys.result(job_id))
        pipe.hmget(RQJob.key_for(job_id), "status", "origin", "worker_name", *times)
        result, fields = reading.ask_all(pipe)
    if isinstance(fields, reading.Unreadable) or not fields[0]:
        return None
    status, origin, worker = map(reading.text, fields[:3])
    created_at, started_at, ended_at = map(reading.time, fields[3:])
    outcome = read_result(job_id, result)
    if outcome is not None:  # whatever RQ says; one that cannot be read is that of a failed job
        status = ending_of(outcome)
    return JobRecord(status, origin, created_at, started_at, ended_at, worker)


def ended_among(connection: Redis, job_ids: list[str], chunk: int = 1000) -> list[str]:
    """Picks the jobs that have ended, or are gone, a thousand a round trip."""
    ended: list[str] = []
    for start in range(0, len(job_ids), chunk):
        some = job_ids[start : start + chunk]
        with connection.pipeline(transaction=False) as pipe:
            ask_for_ends(pipe, some)
            ended += ends_in(some, reading.ask_all(pipe))
    return ended


def ask_for_ends(pipe: Any, job_ids: Iterable[str]) -> None:
    """Lets a pipeline ask what `ends_in` reads of each of some jobs."""
    for job_id in job_ids:
        pipe.hget(RQJob.key_for(job_id), "status")
        pipe.exists(keys.result(job_id))


def ends_in(job_ids: Sequence[str], replies: Sequence[Any]) -> list[str]:
    """Picks the jobs that have ended: those with a result, and those that are gone."""
    told = zip(job_ids, replies[::2], replies[1::2], strict=True)
    return [job_id for job_id, status, results in told if results or _says_end(status)]


def _says_end(status: Any) -> bool:
    return not isinstance(status, bytes) or status in _ENDED
