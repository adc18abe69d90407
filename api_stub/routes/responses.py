"""/v1/responses: ask now or in the background, look, cancel, delete, go on from an earlier one."""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import Deleted, InputItem, Page, ResponseObject
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.json_store import Order, page
from mlx_rq.api_stub.long_poll import keeps_its_job, respond
from mlx_rq.api_stub.openapi import answers, body_of
from mlx_rq.api_stub.response_events import ResponseEvents
from mlx_rq.api_stub.service import Service, TheClient, TheService
from mlx_rq.api_stub.streaming import stream, without_stream
from mlx_rq.jobs.client.conversation import items_of
from mlx_rq.jobs.client.job import UNFINISHED, Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError
from mlx_rq.jobs.openai.response_object import job_of, response_id, response_object
from mlx_rq.jobs.openai.responses import Includable, ResponsesRequest
from mlx_rq.jobs.openai.validation import validate_as
from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.options import DEFAULT_RESULT_TTL, STORED_TTL, JobOptions
from mlx_rq.jobs.queue.stream import STREAM_SECONDS, is_kept, is_published

router = APIRouter(tags=["responses"])


@router.post(
    "/v1/responses",
    responses=answers(ResponseObject, streams=True),
    openapi_extra=body_of(ResponsesRequest),
)
async def create_response(request: Request, body: JsonBody, service: TheService) -> Response:
    """Wait for a response; with `background: true`, only put it into the queue.

    With `stream: true`, its events come as it is generated.
    """
    body, wanted_stream = without_stream(body)
    wanted = validate_as(ResponsesRequest, body)
    options = JobOptions(
        result_ttl=DEFAULT_RESULT_TTL if wanted.store is False else STORED_TTL,
        stream=wanted_stream is not None,
    )
    job = await service.submit(
        request, wanted.kind, body, options=options, waits=not wanted.background, wanted=wanted
    )
    if wanted_stream is not None:
        keep = wanted.background is True or keeps_its_job(request, service)
        return await stream(service, job, ResponseEvents(job, wanted, time.time()), keep=keep)
    if not wanted.background:
        return await respond(request, service, job)
    return JSONResponse(await run_in_threadpool(_view, job), headers={"x-job-id": job.id})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> None:
    """Refuse: a local model compacts nothing."""
    raise ApiError(
        404,
        "This server does not compact responses. Go on from one with 'previous_response_id'; "
        "'truncation': 'auto' drops the oldest turns once a conversation does not fit.",
        code="unknown_url",
    )


def _not_found(response: str) -> ApiError:
    return ApiError(404, f"Response with id '{response}' not found.", code=None, param="id")


async def _find_response(service: TheService, client: TheClient, response: str) -> Job:
    """Finds the job of a response that the client may see; raises ApiError for any other."""
    job_id = job_of(response)
    if job_id is None:
        raise _not_found(response)
    try:
        return await service.find(client, job_id)
    except JobNotFound:
        raise _not_found(response) from None


TheResponse = Annotated[Job, Depends(_find_response)]


async def _included(
    include: Annotated[list[Includable] | None, Query()] = None,
    in_brackets: Annotated[list[Includable] | None, Query(alias="include[]")] = None,
) -> None:
    """Takes the names of what is in a response anyway, where that was asked for as it was made."""


@router.get(
    "/v1/responses/{response}",
    responses=answers(ResponseObject, streams=True),
    dependencies=[Depends(_included)],
)
async def get_response(
    service: TheService,
    job: TheResponse,
    wants_stream: Annotated[bool, Query(alias="stream")] = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
    include_obfuscation: bool | None = None,
) -> Response:
    """Give a response as it is now.

    With `stream=true`, give the events of one that was asked for as a stream, from the first one
    or from the one after the number `starting_after`, and go on until it ends.
    """
    if wants_stream:
        events = await run_in_threadpool(_events_again, service, job, starting_after)
        return await stream(service, job, events, keep=True, begun=True)
    if starting_after is not None:
        raise ApiError(
            400,
            "The 'starting_after' parameter is only allowed when 'stream' is enabled.",
            code="invalid_value",
            param="starting_after",
        )
    return JSONResponse(await run_in_threadpool(_view, job))


@router.post("/v1/responses/{response}/cancel", responses=answers(ResponseObject))
async def cancel_response(job: TheResponse) -> JSONResponse:
    """End a response that has not ended."""

    def cancel() -> dict[str, Any]:
        _payload(job)
        job.cancel()
        view = _view(job)
        if view["status"] != "cancelled":
            raise ApiError(400, f"Cannot cancel a {view['status']} response.", code=None)
        return view

    return JSONResponse(await run_in_threadpool(cancel))


@router.delete("/v1/responses/{response}", responses=answers(Deleted))
async def delete_response(job: TheResponse, response: str) -> JSONResponse:
    """Forget a response; one that has not ended is cancelled."""

    def delete() -> None:
        _payload(job)
        job.delete()

    await run_in_threadpool(delete)
    return JSONResponse({"id": response, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response}/input_items",
    responses=answers(Page[InputItem]),
    dependencies=[Depends(_included)],
)
async def list_input_items(
    job: TheResponse,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
) -> JSONResponse:
    """List what a response was made from, also what came from the response before it."""
    body = await run_in_threadpool(_payload, job)
    given = items_of(body["input"])
    items = [_listed(item, f"{job.id}{number:04x}") for number, item in enumerate(given)]
    return JSONResponse(page(items, after, limit, order))


def _payload(job: Job) -> dict[str, Any]:
    """Reads the body of a response that is kept; raises ApiError where there is none."""
    try:
        kind, body = job.payload()
    except (JobNotFound, RequestError):
        raise _not_found(response_id(job.id)) from None
    if kind != ResponsesRequest.kind or body.get("store") is False or "input" not in body:
        raise _not_found(response_id(job.id))
    return body


def _view(job: Job) -> dict[str, Any]:
    """Shows a response: what the worker wrote where it has, else what the request says."""
    body = _payload(job)
    info = job.info()
    status, error = info["status"], None
    if status not in UNFINISHED:
        try:
            return job.result(timeout=0)
        except JobFailed as failure:
            error = failure.error
    request = validate_as(ResponsesRequest, body)
    return response_object(
        request,
        job.id,
        status=status,
        model=info["model"],
        created_at=reading.unix_time(info["created_at"]),
        error=error if status == "failed" else None,
    )


_BEFORE_TEXT = 2
"""Events of a response before those of its text: that it was created, that it is in progress."""


def _events_again(service: Service, job: Job, starting_after: int | None) -> ResponseEvents:
    """Makes the events of a response that was streamed; raises ApiError where it cannot.

    What was published is forgotten after a while. Then the events come in larger pieces, and their
    numbers mean something else.
    """
    body, connection = _payload(job), service.connection
    if not is_published(connection, job.id):
        raise ApiError(
            400,
            "Only a response that was created with 'stream' can be streamed; get it without.",
            code="invalid_value",
            param="stream",
        )
    info = job.info()
    ended = info["status"] not in UNFINISHED
    has_seen_text = starting_after is not None and starting_after >= _BEFORE_TEXT
    if has_seen_text and not is_kept(connection, job.id) and (not ended or _has_text(job)):
        raise ApiError(
            400,
            f"The events of a response are numbered until {STREAM_SECONDS} seconds after its last "
            "text, so this one cannot be gone on with; leave out 'starting_after'.",
            code="invalid_value",
            param="starting_after",
        )
    request = validate_as(ResponsesRequest, body)
    created_at = reading.unix_time(info["created_at"])
    seen = -1 if starting_after is None else starting_after
    return ResponseEvents(job, request, created_at, seen=seen)


def _has_text(job: Job) -> bool:
    """Says whether a response that has ended may have had text published."""
    try:
        items = job.result(timeout=0).get("output", ())
        return any(item["type"] != "function_call" for item in items)
    except JobFailed:
        return True


_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
"""What ids begin with, which most items of other kinds bring with them."""


def _listed(item: Mapping[str, Any], number: str) -> dict[str, Any]:
    """Writes an item as a list shows it: with an id, and its text in parts."""
    kind = item.get("type", "message")
    shown = {
        "id": f"{_PREFIXES.get(kind, 'item_')}{number}",
        "status": "completed",
        **item,
        "type": kind,
    }
    if kind == "function_call_output" and not isinstance(item["output"], str):
        shown["output"] = json.dumps(item["output"])
    if kind != "message":
        return shown
    part: dict[str, Any] = {"type": "input_text"}
    if item["role"] == "assistant":
        part = {"type": "output_text", "annotations": [], "logprobs": []}
    content = item["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    shown["content"] = [
        {**part, **{name: value for name, value in given.items() if name == "text"}}
        if given.get("type") != "refusal"
        else given
        for given in parts
    ]
    return shown
