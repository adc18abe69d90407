"""The result of a job, as it lies under its key: the response object, or `{"error": …}`.

A result that cannot be read is that of a job that failed: it becomes an error object that says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from redis import Redis

from mlx_rq.jobs.openai.answers import is_answer
from mlx_rq.jobs.openai.errors import error_in, error_object
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.finish import FinishState
from mlx_rq.jobs.queue.reading import Unreadable

Outcome = dict[str, Any]


class _Error(BaseModel):
    """What every error object says; it may say more."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def read_result(job_id: str, reply: Any) -> Outcome | None:
    """Reads what Redis replied about a job's result key; None where there is nothing."""
    if reply is None:
        return None
    outcome = reading.json_object(reply)
    if isinstance(outcome, Unreadable):
        return unreadable(job_id, outcome.why)
    error = error_in(outcome)
    if error is None:
        return outcome if is_answer(outcome) else unreadable(job_id, "no answer that is known here")
    try:
        _Error.model_validate(error)
    except ValidationError:
        return unreadable(job_id, "no error object")
    return {**outcome, "error": {**dict.fromkeys(_Error.model_fields), **error}}


def read_errors(connection: Redis, job_ids: Sequence[str]) -> dict[str, str]:
    """Says why jobs failed; those that have no error, or no result any more, are left out."""
    return {job_id: str(error["message"]) for job_id, error in _errors(connection, job_ids).items()}


def error_codes(connection: Redis, job_ids: Sequence[str]) -> dict[str, str]:
    """Says by which codes jobs failed, as `read_errors` says why."""
    return {
        job_id: str(error["code"])
        for job_id, error in _errors(connection, job_ids).items()
        if error["code"]
    }


def _errors(connection: Redis, job_ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.get(keys.result(job_id))
        replies = reading.ask_all(pipe)
    errors: dict[str, Mapping[str, Any]] = {}
    for job_id, reply in zip(job_ids, replies, strict=True):
        outcome = read_result(job_id, reply)
        if outcome is not None and (error := error_in(outcome)) is not None:
            errors[job_id] = error
    return errors


def unreadable(job_id: str, why: str) -> Outcome:
    """Makes the outcome of a job whose result is spoilt."""
    message = f"The result of the job cannot be read: {keys.result(job_id)} holds {why}."
    return {"error": error_object(message, code="unreadable_result", type="server_error")}


def ending_of(outcome: Mapping[str, Any]) -> FinishState:
    """Names the state, in RQ's words, of a job that ended with this."""
    error = error_in(outcome)
    if error is None:
        return "finished"
    return "canceled" if error["type"] == "cancelled" else "failed"
