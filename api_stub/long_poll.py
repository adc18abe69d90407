"""Waits for jobs on behalf of clients: any number of them through one blocking read."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mlx_rq.api_stub.errors import NO_RETRY, ApiError
from mlx_rq.api_stub.middleware import header_seconds
from mlx_rq.api_stub.service import Service
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.queue.waiting import wait_for_end

READ_TIMEOUT = 600.0
"""Seconds that OpenAI's client waits for an answer unless it is told otherwise."""

_HEADER = "x-stainless-read-timeout"


def patience(request: Request) -> float:
    """Gives the seconds within which the client has to have an answer: a bit before it hangs up."""
    timeout = header_seconds(request, _HEADER) or READ_TIMEOUT
    return timeout - min(5.0, timeout / 10)


def keeps_its_job(request: Request, service: Service) -> bool:
    """Tells whether the job goes on when its client hangs up.

    Under an Idempotency-Key, other requests may be waiting for the same job.
    """
    return service.settings.keep_on_disconnect or "idempotency-key" in request.headers


async def respond(request: Request, service: Service, job: Job) -> Response:
    """Waits for the job and answers with its result, the response object.

    A client that goes away takes its job with it, unless that is to be kept. Raises JobFailed, and
    ApiError (504, 503) where the client cannot wait any longer; the job goes on then.
    """
    ended, gone = await wait(request, service, job, patience(request))
    if gone:
        if not keeps_its_job(request, service):
            await run_in_threadpool(job.cancel)
        return Response(status_code=499)  # nobody reads it
    if not ended:
        raise _still_running(job, closing=request.app.state.closing.is_set())
    result = await run_in_threadpool(job.result, 0)
    return JSONResponse(result, headers={"x-job-id": job.id})


async def wait(request: Request, service: Service, job: Job, seconds: float) -> tuple[bool, bool]:
    """Waits until the job ends, the client goes, the server closes, or the time is up.

    Returns whether the job ended and whether the client is gone.
    """
    end, gone, closing = (
        asyncio.ensure_future(coroutine) for coroutine in _causes(request, service, job)
    )
    service.requests.waiting += 1
    try:
        await asyncio.wait(
            {end, gone, closing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if end.done():
            end.result()  # raises what went wrong with Redis
        return end.done(), gone.done() and not end.done()
    finally:
        service.requests.waiting -= 1
        for future in (end, gone, closing):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


def _causes(request: Request, service: Service, job: Job) -> tuple[Coroutine[Any, Any, Any], ...]:
    """What ends the waiting: the job, the client, the server."""
    closing: asyncio.Event = request.app.state.closing
    return wait_for_end(job.id, service.redis_url), _disconnected(request), closing.wait()


async def _disconnected(request: Request) -> None:
    """Returns once the client has hung up (its body has been read before)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _still_running(job: Job, *, closing: bool) -> ApiError:
    what = "The server is closing" if closing else "The job takes longer than this request may"
    return ApiError(
        503 if closing else 504,
        f"{what}. Job {job.id} goes on: GET /v1/jobs/{job.id}?wait=60 waits for its result.",
        code="server_closing" if closing else "request_timeout",
        type="server_error",
        headers={**NO_RETRY, "x-job-id": job.id, "location": f"/v1/jobs/{job.id}"},
    )
