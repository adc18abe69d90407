"""Goes on from an earlier response: what it was made from and what it said become input."""

from collections.abc import Mapping
from typing import Any

from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError, ResultTimeout
from mlx_rq.jobs.openai.response_object import job_of
from mlx_rq.jobs.openai.responses import ResponsesRequest

Item = dict[str, Any]


def with_history(body: Mapping[str, Any], redis_url: str | None) -> dict[str, Any]:
    """Copies the body of a responses job, all that came before its `previous_response_id` in it.

    The earlier job's instructions are not inherited. Raises RequestError where there is no such
    response (any more), it was not to be stored, or it has no answer.
    """
    previous = body["previous_response_id"]
    return {**body, "input": [*_said_before(previous, redis_url), *items_of(body["input"])]}


def items_of(given: str | list[Item]) -> list[Item]:
    """Gives an input as items: a plain text is a message of the user."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _said_before(previous: str, redis_url: str | None) -> list[Item]:
    job_id = job_of(previous)
    try:
        if job_id is None:
            raise JobNotFound(previous)
        job = Job(job_id, redis_url)
        kind, body = job.payload()
        if kind != ResponsesRequest.kind or body.get("store") is False:
            raise JobNotFound(previous)
        return [*items_of(body["input"]), *job.result(timeout=0)["output"]]
    except JobNotFound:
        raise RequestError(
            f"Previous response with id '{previous}' not found.",
            code="previous_response_not_found",
            param="previous_response_id",
        ) from None
    except (JobFailed, ResultTimeout):
        raise RequestError(
            f"Invalid 'previous_response_id': response '{previous}' is {job.status()}; "
            "only one that is completed can be gone on from.",
            code="invalid_value",
            param="previous_response_id",
        ) from None
