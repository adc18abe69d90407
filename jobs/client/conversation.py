"""Goes on from earlier responses: what they were made from and what they said become input."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError, ResultTimeout
from mlx_rq.jobs.openai.job_request import Body
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.response_items import referred
from mlx_rq.jobs.openai.response_object import job_of
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.validation import encode_body
from mlx_rq.jobs.queue.affinity import affinity_of
from mlx_rq.jobs.queue.owners import may_see_job
from mlx_rq.jobs.queue.prefix_path import path_of
from mlx_rq.jobs.queue.prepare import Prepared

Item = dict[str, Any]


def with_history(prepared: Prepared, redis_url: str | None, client: str | None = None) -> Prepared:
    """Puts the earlier answers that a job speaks of into its body, where it speaks of any.

    These are all that came before its `previous_response_id`, and items that it names by their ids.
    The earlier job's instructions are not inherited. Raises RequestError where there is no such
    response (any more) that the client may see, it was not to be stored, or it has no answer.
    """
    if not prepared.goes_back:
        return prepared

    def whole(body: Mapping[str, Any]) -> dict[str, Any]:
        items = []
        if (previous := body.get("previous_response_id")) is not None:
            items += _said_before(previous, redis_url, client)
        for index, item in enumerate(items_of(body["input"])):
            item_id = referred(item)
            items.append(item if item_id is None else _item(item_id, index, redis_url, client))
        return {**body, "input": items}

    body = KINDS[prepared.kind].amended(json.loads(prepared.encoded), whole)
    return prepared._replace(
        encoded=encode_body(body), affinity=affinity_of(body), path=path_of(body), goes_back=False
    )


def items_of(given: str | list[Item]) -> list[Item]:
    """Gives an input as items: a plain text is a message of the user."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _item(item_id: str, index: int, redis_url: str | None, client: str | None) -> Item:
    """Finds an item of an earlier answer by its id, which has that of the job in it."""
    with suppress(JobNotFound, RequestError, JobFailed, ResultTimeout):
        job, _ = _response(item_id.partition("_")[2], redis_url, client)
        for item in job.result(timeout=0).get("output", ()):
            if item.get("id") == item_id:
                return dict(item)
    raise RequestError(
        f"Item with id '{item_id}' not found: it is of no answer that is kept here (any more), or "
        "a function's call. Send the item itself instead.",
        code="invalid_value",
        param=f"input[{index}].id",
    )


def _response(job_id: str, redis_url: str | None, client: str | None) -> tuple[Job, Body]:
    """Gives the job of a response that is kept, and its body; raises JobNotFound."""
    job = Job(job_id, redis_url)
    if not may_see_job(redis_url, client, job_id):
        raise JobNotFound(job_id)
    kind, body = job.payload()
    if kind != ResponsesRequest.kind or body.get("store") is False or "input" not in body:
        raise JobNotFound(job_id)
    return job, body


def _said_before(previous: str, redis_url: str | None, client: str | None) -> list[Item]:
    try:
        if (job_id := job_of(previous)) is None:
            raise JobNotFound(previous)
        job, body = _response(job_id, redis_url, client)
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
