"""/v1/files: upload, list, read, delete."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from mlx_rq.api_stub.answers import Deleted, File, Page, whole
from mlx_rq.api_stub.bodies import check_media_type
from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.json_store import Order, page
from mlx_rq.api_stub.openapi import answers, upload_form
from mlx_rq.api_stub.service import TheClient, TheFiles

router = APIRouter(tags=["files"])

_BYTES = "application/octet-stream"

PURPOSES = ("batch", "user_data")
SHORTEST_LIFETIME, LONGEST_LIFETIME = 3_600, 2_592_000
"""Seconds, for `expires_after`."""


@router.post("/v1/files", responses=answers(File), openapi_extra=upload_form())
async def upload_file(request: Request, files: TheFiles, client: TheClient) -> JSONResponse:
    """Keep a file; `purpose=batch` is for files of requests, one a line.

    `curl localhost:8000/v1/files -F purpose=batch -F file=@requests.jsonl`
    """
    check_media_type(request, "multipart/form-data")
    async with request.form(max_files=1, max_fields=10) as form:
        upload, purpose, lifetime = _read_form(form)
        record = await run_in_threadpool(
            files.create, upload.file, upload.filename or "upload", purpose, lifetime, client
        )
    return JSONResponse(whole(File, record))


def _read_form(form: FormData) -> tuple[UploadFile, str, int | None]:
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise _missing("file")
    if not isinstance(purpose, str):
        raise _missing("purpose")
    if purpose not in PURPOSES:
        raise ApiError(
            400,
            f"Invalid value: {purpose[:80]!r} at 'purpose'. Supported values are: "
            f"{', '.join(PURPOSES)}.",
            code="invalid_value",
            param="purpose",
        )
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return upload, purpose, None
    return upload, purpose, read_lifetime(anchor, seconds, "created_at")


def read_lifetime(anchor: Any, seconds: Any, anchored_to: str) -> int:
    """Reads an `expires_after`; raises ApiError where it is not as it should be."""
    if anchor != anchored_to:
        raise ApiError(
            400,
            f"Invalid 'expires_after.anchor': expected {anchored_to!r}, but got {anchor!r}.",
            code="invalid_value",
            param="expires_after.anchor",
        )
    try:
        lifetime = int(seconds)
    except (TypeError, ValueError):
        lifetime = -1
    if not SHORTEST_LIFETIME <= lifetime <= LONGEST_LIFETIME:
        raise ApiError(
            400,
            f"Invalid 'expires_after.seconds': expected {SHORTEST_LIFETIME} to "
            f"{LONGEST_LIFETIME}, but got {str(seconds)[:80]!r}.",
            code="invalid_value",
            param="expires_after.seconds",
        )
    return lifetime


def _missing(field: str) -> ApiError:
    message = f"Missing required parameter: '{field}'."
    return ApiError(400, message, code="missing_required_parameter", param=field)


@router.get("/v1/files", responses=answers(Page[File]))
async def list_files(
    files: TheFiles,
    client: TheClient,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
    purpose: Literal["batch", "batch_output", "user_data"] | None = None,
) -> JSONResponse:
    """List the files, the newest first."""
    seen = files.all(client)
    wanted = [whole(File, record) for record in seen if purpose in (None, record["purpose"])]
    return JSONResponse(page(wanted, after, limit, order))


@router.get("/v1/files/{file_id}", responses=answers(File))
async def get_file(files: TheFiles, client: TheClient, file_id: str) -> JSONResponse:
    """Describe a file."""
    return JSONResponse(whole(File, files.get(client, file_id)))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {_BYTES: {}}}},
)
async def get_content(files: TheFiles, client: TheClient, file_id: str) -> FileResponse:
    """Give the bytes of a file."""
    record = files.get(client, file_id)
    return FileResponse(files.path(file_id), media_type=_BYTES, filename=record["filename"])


@router.delete("/v1/files/{file_id}", responses=answers(Deleted))
async def delete_file(files: TheFiles, client: TheClient, file_id: str) -> JSONResponse:
    """Delete a file. Batches that read it go on."""
    files.get(client, file_id)
    await run_in_threadpool(files.delete, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})
