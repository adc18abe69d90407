"""Goes on from an earlier response: what it was made from and what it said become input."""

import json
from typing import Any

from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError, ResultTimeout
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.response_object import job_of
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.validation import encode_body
from mlx_rq.jobs.queue.affinity import affinity_of
from mlx_rq.jobs.queue.owners import may_see_job
from mlx_rq.jobs.queue.prefix_path import path_of
from mlx_rq.jobs.queue.prepare import Prepared

Item = dict[str, Any]


def with_history(prepared: Prepared, redis_url: str | None, client: str | None = None) -> Prepared:
    """Puts all that came before a job's `previous_response_id` into its body, where it has one.

    The earlier job's instructions are not inherited. Raises RequestError where there is no such
    response (any more) that the client may see, it was not to be stored, or it has no answer.
    """
    if prepared.continues is None:
        return prepared
    before = _said_before(prepared.continues, redis_url, client)
    body = KINDS[prepared.kind].amended(
        json.loads(prepared.encoded),
        lambda body: {**body, "input": [*before, *items_of(body["input"])]},
    )
    return prepared._replace(
        encoded=encode_body(body), affinity=affinity_of(body), path=path_of(body), continues=None
    )


def items_of(given: str | list[Item]) -> list[Item]:
    """Gives an input as items: a plain text is a message of the user."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _said_before(previous: str, redis_url: str | None, client: str | None) -> list[Item]:
    job_id = job_of(previous)
    try:
        if job_id is None:
            raise JobNotFound(previous)
        job = Job(job_id, redis_url)
        if not may_see_job(redis_url, client, job_id):
            raise JobNotFound(previous)
        kind, body = job.payload()
        if kind != ResponsesRequest.kind or body.get("store") is False or "input" not in body:
            raise JobNotFound(previous)
        return [*items_of(body["input"]), *job.result(timeout=0).get("output", ())]
    except (JobNotFound, RequestError):
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
