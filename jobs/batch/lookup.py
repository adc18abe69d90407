"""What a batch asks Redis about its jobs, and takes back of what it submitted."""

from collections.abc import Collection, Sequence
from typing import Any

from redis import Redis
from rq.job import Job as RQJob

from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, error_object
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.workers import live_workers, with_live


def submitted_before(
    connection: Redis, idempotency_keys: Sequence[str], owner: str | None
) -> list[str | None]:
    """Finds an owner's jobs that were made under these keys; None where there is none any more."""
    with connection.pipeline(transaction=False) as pipe:
        for key in idempotency_keys:
            pipe.hget(keys.idempotency(key, owner), "job")
        found = [reading.text(job_id) or None for job_id in reading.ask_all(pipe)]
        for job_id in found:
            pipe.exists(RQJob.key_for(job_id or ""), keys.result(job_id or ""))
        left = pipe.execute()
    return [job_id if count else None for job_id, count in zip(found, left, strict=True)]


def result_of(job: Job) -> Any:
    """Reads the result of a job that left no result key, or is gone altogether."""
    try:
        return job.result(timeout=0)
    except JobFailed as failure:
        return {"error": failure.error}
    except JobNotFound:
        message = "The job vanished from Redis (it was flushed, or ran out of memory)."
        return {"error": error_object(message, code="job_lost", type="server_error")}


def note_of(job: Job) -> str | None:
    """Says what a job waits for that will not come by itself, if anything."""
    try:
        note: str | None = job.info()["note"]
    except JobNotFound:
        return None
    return note


def decoding_among(connection: Redis, job_ids: Collection[str]) -> int:
    """Counts those of the jobs that decode, as workers last said."""
    workers = with_live(connection, live_workers(connection))
    return sum(row["id"] in job_ids for worker in workers for row in worker["rows"])
