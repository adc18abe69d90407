"""What was claimed becomes what the engine takes, or an error that says why not."""

import logging
from collections.abc import Iterable
from contextlib import suppress

from redis import Redis
from redis.exceptions import RedisError

from mlx_rq.engine.interface import Outcome, Task
from mlx_rq.jobs.openai.errors import RequestError, error_object
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import some_waiting
from mlx_rq.jobs.queue.payload import read_payload
from mlx_rq.worker.leases.claim import ClaimedJob

logger = logging.getLogger("mlx_rq.worker")

_SOME = 16
"""Requests of each queue that are looked at, to know what a queue holds."""


def task_of(job: ClaimedJob) -> Task:
    """Reads and checks a claimed job; raises RequestError where it is not to be generated."""
    if job.attempt > job.max_attempts:
        raise RequestError(
            f"The job was given up after {job.max_attempts} attempts: each time the worker "
            "that generated it died. Submit it again, perhaps with fewer tokens.",
            code="max_attempts_exceeded",
            type="server_error",
        )
    payload = read_payload(job.data)
    request = validate(payload.kind, payload.body)
    model, _ = keys.model_and_priority(job.queue_name)
    return Task(job.id, request, job.rank, job.submitted_at, model, job.others_follow)


def waiting_requests(connection: Redis, models: Iterable[str]) -> list[JobRequest]:
    """Reads some of the requests that wait for models of these names; none, where Redis is away."""
    queues = [keys.queue_name(model, rank) for model in models for rank in PRIORITIES]
    requests = []
    try:
        waiting = some_waiting(connection, queues, _SOME)
    except RedisError as error:
        logger.warning("nobody knows yet what waits: %s", error)
        return []
    for data in waiting:
        with suppress(RequestError):  # told when it is claimed
            payload = read_payload(data)
            requests.append(validate(payload.kind, payload.body))
    return requests


def no_answer(job_id: str) -> Outcome:
    """Ends a job to which the engine has given no answer, or none that can be written."""
    message = "The engine ended without a usable answer to this job."
    return Outcome(job_id, {"error": error_object(message, code="no_answer", type="server_error")})
