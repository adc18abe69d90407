"""/v1/chat/completions and /v1/completions: enqueue, wait, answer."""

from fastapi import APIRouter, Request, Response
from mlx_rq.api_stub.door import JsonBody, TheDoor
from mlx_rq.api_stub.examples import body_of
from mlx_rq.api_stub.waiting import answer

router = APIRouter(tags=["completions"])


@router.post("/v1/chat/completions", openapi_extra=body_of("chat"))
async def create_chat_completion(request: Request, body: JsonBody, door: TheDoor) -> Response:
    """Wait for the answer of a chat."""
    job = await door.submit(request, "chat", body, waits=True)
    return await answer(request, door, job)


@router.post("/v1/completions", openapi_extra=body_of("completion"))
async def create_completion(request: Request, body: JsonBody, door: TheDoor) -> Response:
    """Wait for the continuation of a text."""
    job = await door.submit(request, "completion", body, waits=True)
    return await answer(request, door, job)
