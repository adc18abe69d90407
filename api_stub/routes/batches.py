"""/v1/batches: create, look, list, cancel. They run in `batch_runner.py`."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import Batch, Page, whole
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.json_store import Record, page
from mlx_rq.api_stub.openapi import answers, model_body
from mlx_rq.api_stub.routes.files import read_lifetime
from mlx_rq.api_stub.service import TheBatches, TheClient
from mlx_rq.jobs.openai.fields import Metadata, Strict
from mlx_rq.jobs.openai.validation import read_as

router = APIRouter(tags=["batches"])


class _ExpiresAfter(Strict):
    anchor: str
    seconds: int


class BatchRequest(Strict):
    """The body that creates a batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: _ExpiresAfter | None = None


_EXAMPLE = {
    "input_file_id": "file-0123456789abcdef",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


@router.post(
    "/v1/batches", responses=answers(Batch), openapi_extra=model_body(BatchRequest, _EXAMPLE)
)
async def create_batch(body: JsonBody, batches: TheBatches, client: TheClient) -> JSONResponse:
    """Run all requests of an uploaded file; the file is checked while the batch is `validating`."""
    wanted = read_as(BatchRequest, body)
    expiry = wanted.output_expires_after
    lifetime = (
        None if expiry is None else read_lifetime(expiry.anchor, expiry.seconds, "created_at")
    )
    record = await run_in_threadpool(
        batches.create,
        wanted.endpoint,
        wanted.input_file_id,
        wanted.completion_window,
        wanted.metadata,
        lifetime,
        client,
    )
    return JSONResponse(whole(Batch, record))


@router.get("/v1/batches", responses=answers(Page[Batch]))
async def list_batches(
    batches: TheBatches,
    client: TheClient,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JSONResponse:
    """List the batches, the newest first."""
    seen = [whole(Batch, record) for record in batches.records.all_seen_by(client)]
    return JSONResponse(page(seen, after, limit, "desc"))


@router.get("/v1/batches/{batch_id}", responses=answers(Batch))
async def get_batch(batches: TheBatches, client: TheClient, batch_id: str) -> JSONResponse:
    """Tell how far a batch is."""
    return JSONResponse(_existing(batches.records.seen_by(client, batch_id), batch_id))


@router.post("/v1/batches/{batch_id}/cancel", responses=answers(Batch))
async def cancel_batch(batches: TheBatches, client: TheClient, batch_id: str) -> JSONResponse:
    """Stop a batch: requests that run finish, and what is answered is in its output file."""
    _existing(batches.records.seen_by(client, batch_id), batch_id)
    return JSONResponse(whole(Batch, await run_in_threadpool(batches.cancel, batch_id)))


def _existing(record: Record | None, batch_id: str) -> dict[str, Any]:
    if record is None:
        raise ApiError(404, f"No batch found with id '{batch_id}'.", code=None, param="id")
    return whole(Batch, record)
