"""/v1/chat/completions and /v1/completions: enqueue, wait, answer."""

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import ChatCompletion, Completion
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.chunks import ChatChunks, Chunks, CompletionChunks
from mlx_rq.api_stub.long_poll import keeps_its_job, respond
from mlx_rq.api_stub.openapi import answers, body_of
from mlx_rq.api_stub.routes.stored_completions import remember
from mlx_rq.api_stub.service import Service, TheService
from mlx_rq.api_stub.streaming import stream, without_stream
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest
from mlx_rq.jobs.queue.options import DEFAULT_RESULT_TTL, STORED_TTL, JobOptions

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, streams=True),
    openapi_extra=body_of(ChatRequest),
)
async def create_chat_completion(request: Request, body: JsonBody, service: TheService) -> Response:
    """Wait for the answer of a chat."""
    return await _create(request, ChatChunks, body, service)


@router.post(
    "/v1/completions",
    responses=answers(Completion, streams=True),
    openapi_extra=body_of(CompletionRequest),
)
async def create_completion(request: Request, body: JsonBody, service: TheService) -> Response:
    """Wait for the continuation of a text."""
    return await _create(request, CompletionChunks, body, service)


async def _create(
    request: Request, chunks: type[Chunks], body: dict[str, Any], service: Service
) -> Response:
    body, wanted_stream = without_stream(body)
    store = body.get("store") is True
    options = JobOptions(
        result_ttl=STORED_TTL if store else DEFAULT_RESULT_TTL, stream=wanted_stream is not None
    )
    job = await service.submit(request, chunks.request.kind, body, options=options, waits=True)
    if store:
        await run_in_threadpool(remember, service, job)
    if wanted_stream is not None:
        writer = chunks(job, body, wanted_stream)
        return await stream(service, job, writer, keep=keeps_its_job(request, service))
    return await respond(request, service, job)
