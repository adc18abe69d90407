"""Stored completions: chats that were sent with `store: true`, to be listed and read again."""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.json_store import Order, page
from mlx_rq.api_stub.openapi import model_body
from mlx_rq.api_stub.service import Door, JsonBody, TheDoor
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RequestError, ResultTimeout, error_in
from mlx_rq.jobs.openai.fields import Metadata, Strict
from mlx_rq.jobs.openai.validation import read_as
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import reachable
from mlx_rq.jobs.queue.options import STORED_TTL

router = APIRouter(tags=["stored completions"])

_ID = "chatcmpl-"


class MetadataUpdate(Strict):
    """The body that changes a stored completion."""

    metadata: Metadata | None


def remember(door: Door, job: Job) -> None:
    """Puts a job among the stored ones; those whose results are gone by now are dropped."""
    now = time.time()
    with reachable(door.connection), door.connection.pipeline() as pipe:
        pipe.zadd(keys.STORED, {job.id: now}, nx=True)
        pipe.zremrangebyscore(keys.STORED, "-inf", now - STORED_TTL)
        pipe.execute()


_BY_METADATA = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


@router.get("/v1/chat/completions", openapi_extra={"parameters": [_BY_METADATA]})
async def list_completions(
    request: Request,
    door: TheDoor,
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
        for completion in await run_in_threadpool(_all, door)
        if model in (None, completion["model"])
        and wanted.items() <= (completion["metadata"] or {}).items()
    ]
    return JSONResponse(page(found, after, limit, order))


@router.get("/v1/chat/completions/{completion}")
async def get_completion(door: TheDoor, completion: str) -> JSONResponse:
    """Give a stored completion."""
    return JSONResponse(await run_in_threadpool(_read, door, completion))


@router.post(
    "/v1/chat/completions/{completion}",
    openapi_extra=model_body(MetadataUpdate, {"metadata": {"checked": "yes"}}),
)
async def update_completion(door: TheDoor, completion: str, body: JsonBody) -> JSONResponse:
    """Change the metadata of a stored completion."""
    update = read_as(MetadataUpdate, body)

    def write() -> dict[str, Any]:
        _read(door, completion)
        name = keys.metadata(completion.removeprefix(_ID))
        with reachable(door.connection):
            door.connection.set(name, json.dumps(update.metadata), ex=STORED_TTL)
        return _read(door, completion)

    return JSONResponse(await run_in_threadpool(write))


@router.delete("/v1/chat/completions/{completion}")
async def delete_completion(door: TheDoor, completion: str) -> JSONResponse:
    """Forget a stored completion."""

    def delete() -> None:
        _read(door, completion)
        job_id = completion.removeprefix(_ID)
        Job(job_id, door.redis_url).delete()
        with reachable(door.connection):
            door.connection.zrem(keys.STORED, job_id)
            door.connection.delete(keys.metadata(job_id))

    await run_in_threadpool(delete)
    return JSONResponse({"id": completion, "object": "chat.completion.deleted", "deleted": True})


@router.get("/v1/chat/completions/{completion}/messages")
async def list_messages(
    door: TheDoor,
    completion: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "asc",
) -> JSONResponse:
    """List the messages that a stored completion answered."""

    def read() -> list[dict[str, Any]]:
        _read(door, completion)
        body = Job(completion.removeprefix(_ID), door.redis_url).payload().body
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


def _all(door: Door) -> list[dict[str, Any]]:
    """Reads the stored completions that are there, the oldest first."""
    with reachable(door.connection):
        stored: Any = door.connection.zrange(keys.STORED, 0, -1)
        job_ids = [job_id.decode() for job_id in stored]
        texts = door.connection.mget([keys.result(job_id) for job_id in job_ids]) if job_ids else []
    found = []
    for job_id, text in zip(job_ids, texts, strict=True):
        if text is not None and error_in(result := json.loads(text)) is None:
            found.append(_with_metadata(door, job_id, result))
    return found


def _read(door: Door, completion: str) -> dict[str, Any]:
    """Reads a stored completion; raises ApiError where there is none."""
    job_id = completion.removeprefix(_ID)
    with reachable(door.connection):
        stored = completion.startswith(_ID) and door.connection.zscore(keys.STORED, job_id)
    try:
        if not stored:
            raise JobNotFound(job_id)
        return _with_metadata(door, job_id, Job(job_id, door.redis_url).result(timeout=0))
    except (JobNotFound, JobFailed, ResultTimeout):
        raise ApiError(
            404, f"No stored completion found with id '{completion}'.", code=None, param="id"
        ) from None


def _with_metadata(door: Door, job_id: str, result: dict[str, Any]) -> dict[str, Any]:
    with reachable(door.connection):
        changed = door.connection.get(keys.metadata(job_id))
    if changed is not None:
        return {**result, "metadata": json.loads(changed)}
    try:
        body: Mapping[str, Any] = Job(job_id, door.redis_url).payload().body
    except (JobNotFound, RequestError):
        body = {}
    return {**result, "metadata": body.get("metadata")}
