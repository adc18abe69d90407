"""Stored completions: chats that were sent with `store: true`, to be listed and read again."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import ChatCompletion, Deleted, Page, StoredMessage
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.json_store import Order, page
from mlx_rq.api_stub.openapi import answers, model_body
from mlx_rq.api_stub.service import Service, TheClient, TheService
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError, ResultTimeout, error_in
from mlx_rq.jobs.openai.fields import Metadata, Strict
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.validation import read_as
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import reachable
from mlx_rq.jobs.queue.options import STORED_TTL
from mlx_rq.jobs.queue.owners import may_see_job, seen_among
from mlx_rq.jobs.queue.results import read_result

router = APIRouter(tags=["stored completions"])

_ID = ChatRequest.id_prefix


class MetadataUpdate(Strict):
    """The body that changes a stored completion."""

    metadata: Metadata | None


def remember(service: Service, job: Job) -> None:
    """Puts a job among the stored ones; those whose results are gone by now are dropped."""
    with reachable(service.connection), service.connection.pipeline() as pipe:
        now = redis_time(service.connection)
        pipe.zadd(keys.STORED, {job.id: now}, nx=True)
        pipe.zremrangebyscore(keys.STORED, "-inf", now - STORED_TTL)
        if reading.WRONG_TYPE in reading.ask_all(pipe):
            service.connection.delete(keys.STORED)  # what is there is no good to anybody
            service.connection.zadd(keys.STORED, {job.id: now})


_BY_METADATA = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


@router.get(
    "/v1/chat/completions",
    responses=answers(Page[ChatCompletion]),
    openapi_extra={"parameters": [_BY_METADATA]},
)
async def list_completions(
    request: Request,
    service: TheService,
    client: TheClient,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "asc",
    model: str | None = None,
) -> JSONResponse:
    """List the stored completions, also by model and by `metadata[key]=value`."""
    wanted = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[")
    }
    found = [
        completion
        for completion in await run_in_threadpool(_all, service, client)
        if model in (None, completion.get("model"))
        and wanted.items() <= (completion["metadata"] or {}).items()
    ]
    return JSONResponse(page(found, after, limit, order))


@router.get("/v1/chat/completions/{completion}", responses=answers(ChatCompletion))
async def get_completion(service: TheService, client: TheClient, completion: str) -> JSONResponse:
    """Give a stored completion."""
    return JSONResponse(await run_in_threadpool(_read, service, client, completion))


@router.post(
    "/v1/chat/completions/{completion}",
    responses=answers(ChatCompletion),
    openapi_extra=model_body(MetadataUpdate, {"metadata": {"checked": "yes"}}),
)
async def update_completion(
    service: TheService, client: TheClient, completion: str, body: JsonBody
) -> JSONResponse:
    """Change the metadata of a stored completion."""
    update = read_as(MetadataUpdate, body)

    def write() -> dict[str, Any]:
        _read(service, client, completion)
        name = keys.metadata(completion.removeprefix(_ID))
        with reachable(service.connection):
            service.connection.set(name, json.dumps(update.metadata), ex=STORED_TTL)
        return _read(service, client, completion)

    return JSONResponse(await run_in_threadpool(write))


@router.delete("/v1/chat/completions/{completion}", responses=answers(Deleted))
async def delete_completion(
    service: TheService, client: TheClient, completion: str
) -> JSONResponse:
    """Forget a stored completion."""

    def delete() -> None:
        _read(service, client, completion)
        job_id = completion.removeprefix(_ID)
        Job(job_id, service.redis_url).delete()
        with reachable(service.connection):
            reading.ask(service.connection.zrem, keys.STORED, job_id)
            service.connection.delete(keys.metadata(job_id))

    await run_in_threadpool(delete)
    return JSONResponse({"id": completion, "object": "chat.completion.deleted", "deleted": True})


@router.get("/v1/chat/completions/{completion}/messages", responses=answers(Page[StoredMessage]))
async def list_messages(
    service: TheService,
    client: TheClient,
    completion: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "asc",
) -> JSONResponse:
    """List the messages that a stored completion answered."""

    def read() -> list[dict[str, Any]]:
        _read(service, client, completion)
        body = Job(completion.removeprefix(_ID), service.redis_url).payload().body
        return [
            _message(message, f"{completion}-{number}")
            for number, message in enumerate(body["messages"])
        ]

    return JSONResponse(page(await run_in_threadpool(read), after, limit, order))


def _message(message: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Writes a message as a list shows it: its text as one string, its parts beside it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    text = "".join(part["text"] for part in parts) if parts else content
    shown = {"name": None, "refusal": None, **message}
    return {**shown, "id": identity, "content": text, "content_parts": parts}


def _all(service: Service, client: str | None) -> list[dict[str, Any]]:
    """Reads the stored completions that are there and a client may see, the oldest first."""
    with reachable(service.connection):
        stored = reading.texts(reading.ask(service.connection.zrange, keys.STORED, 0, -1))
        job_ids = seen_among(service.redis_url, client, stored)
        with service.connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.get(keys.result(job_id))
            replies = reading.ask_all(pipe)
    found = []
    for job_id, reply in zip(job_ids, replies, strict=True):
        result = read_result(job_id, reply)
        if result is not None and error_in(result) is None and "id" in result:
            found.append(_with_metadata(service, job_id, result))
    return found


def _read(service: Service, client: str | None, completion: str) -> dict[str, Any]:
    """Reads a stored completion; raises ApiError where there is none that a client may see."""
    job_id = completion.removeprefix(_ID)
    with reachable(service.connection):
        score = reading.ask(service.connection.zscore, keys.STORED, job_id)
    try:
        if not completion.startswith(_ID) or not isinstance(score, float):
            raise JobNotFound(job_id)
        if not may_see_job(service.redis_url, client, job_id):
            raise JobNotFound(job_id)
        return _with_metadata(service, job_id, Job(job_id, service.redis_url).result(timeout=0))
    except (JobNotFound, JobFailed, ResultTimeout):
        raise ApiError(
            404, f"No stored completion found with id '{completion}'.", code=None, param="id"
        ) from None


def _with_metadata(service: Service, job_id: str, result: dict[str, Any]) -> dict[str, Any]:
    with reachable(service.connection):
        changed = reading.ask(service.connection.get, keys.metadata(job_id))
    metadata = None if changed == b"null" else reading.json_object(changed)
    if not isinstance(metadata, reading.Unreadable):
        return {**result, "metadata": metadata}
    try:
        body: Mapping[str, Any] = Job(job_id, service.redis_url).payload().body
    except (JobNotFound, RequestError):
        body = {}
    return {**result, "metadata": body.get("metadata")}
