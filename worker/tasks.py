"""What was claimed becomes what the engine takes, or an error that says why not."""

from mlx_rq.engine.interface import Outcome, Task
from mlx_rq.jobs.openai.errors import RequestError, error_object
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue.payload import read_payload
from mlx_rq.worker.leases.claim import ClaimedJob


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
    return Task(job.id, request, job.rank, job.submitted_at)


def no_answer(job_id: str) -> Outcome:
    """Ends a job to which the engine has given no answer, or none that can be written."""
    message = "The engine ended without a usable answer to this job."
    return Outcome(job_id, {"error": error_object(message, code="no_answer", type="server_error")})
