"""The page at `/`: its files, its events, and what its buttons do.

It comes without a key, and empty; a key that is asked for is typed into it and goes with all that
it asks for then, as with any client.
"""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from mlx_rq.api_stub.answers import Batch, JobView
from mlx_rq.api_stub.errors import ApiError
from mlx_rq.api_stub.job_view import job_view
from mlx_rq.api_stub.middleware import PAGE_ASSETS, wants_page
from mlx_rq.api_stub.openapi import answers
from mlx_rq.api_stub.page.assets import FILES, file_response
from mlx_rq.api_stub.page.events import Events
from mlx_rq.api_stub.page.view import View, Wanted
from mlx_rq.api_stub.routes.batches import cancel_batch
from mlx_rq.api_stub.routes.jobs import TheJob, cancel_job
from mlx_rq.api_stub.service import TheBatches, TheClient, TheService
from mlx_rq.jobs.client.job import Status

open_router = APIRouter(include_in_schema=False)
"""Asks for no key."""


@open_router.get("/")
async def page(request: Request) -> Response:
    """Give the page to browsers; tell other clients where to go."""
    if not wants_page(request.headers):
        raise HTTPException(404)
    return file_response("index.html")


@open_router.get(f"{PAGE_ASSETS}/{{name}}")
async def asset(name: str) -> Response:
    """Give a file that the page loads."""
    if name not in FILES:
        raise HTTPException(404)
    return file_response(name)


async def only_the_page(request: Request, x_mlx_rq_page: Annotated[Literal["1"], Header()]) -> None:
    """Raises ApiError for what another site's page has a browser send.

    It cannot send the header without being asked first (CORS), nor deny where it comes from.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    if site is None and origin is not None:  # an older browser
        same = urlsplit(origin).netloc == request.headers.get("host")
        site = "same-origin" if same else "cross-site"
    if site not in (None, "same-origin"):
        raise ApiError(
            403, "Only the server's own page may ask for this.", code="origin_not_allowed"
        )


router = APIRouter(tags=["page"], dependencies=[Depends(only_the_page)])


@router.get("/page/events", include_in_schema=False)
async def events(
    request: Request,
    service: TheService,
    client: TheClient,
    status: Status | Literal[""] = "",
    search: Annotated[str, Query(max_length=200)] = "",
    job: Annotated[str, Query(max_length=200)] = "",
    after: Annotated[int, Query(ge=0, lt=2**40)] = 0,
) -> StreamingResponse:
    """Tell the state of the queue and the client's jobs and batches, and then what changes."""
    view = View(service, client, Wanted(status, search, job))
    stream = Events(view, service.redis_url, request.app.state.closing, after)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(stream.run(), media_type="text/event-stream", headers=headers)


@router.post("/page/jobs/{job_id}/cancel", responses=answers(JobView))
async def cancel(job: TheJob) -> JSONResponse:
    """End a job without an answer, from the page."""
    return await cancel_job(job)


@router.post("/page/jobs/{job_id}/retry", responses=answers(JobView, status=202), status_code=202)
async def retry(service: TheService, job: TheJob) -> JSONResponse:
    """Put what a job that failed or was cancelled asked for into the queue once more."""
    again = await run_in_threadpool(service.retry, job)
    return JSONResponse(await run_in_threadpool(job_view, again, service.served), 202)


@router.post("/page/batches/{batch_id}/cancel", responses=answers(Batch))
async def cancel_a_batch(batches: TheBatches, client: TheClient, batch_id: str) -> JSONResponse:
    """Stop a batch, from the page."""
    return await cancel_batch(batches, client, batch_id)
