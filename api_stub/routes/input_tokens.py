"""/v1/responses/input_tokens: how many tokens a response would be made from."""

from fastapi import APIRouter, Request, Response

from mlx_rq.api_stub.answers import InputTokens
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.long_poll import respond
from mlx_rq.api_stub.openapi import answers, body_of
from mlx_rq.api_stub.service import TheService
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.token_count import TokenCountRequest, counting
from mlx_rq.jobs.openai.validation import validate_as

router = APIRouter(tags=["responses"])


@router.post(
    "/v1/responses/input_tokens",
    responses=answers(InputTokens),
    openapi_extra=body_of(ResponsesRequest, streams=False),
)
async def count_input_tokens(request: Request, body: JsonBody, service: TheService) -> Response:
    """Count the tokens of a response's prompt, as a worker's model has them; nothing is generated.

    As at OpenAI, the body need not name a model; then any worker counts.
    """
    validate_as(ResponsesRequest, body)  # in its own names
    job = await service.submit(
        request, TokenCountRequest.kind, counting(body), waits=True, any_model=True
    )
    return await respond(request, service, job)
