"""/v1/jobs: the queue as plain HTTP, for people without an OpenAI client."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.door import JsonBody, TheDoor
from mlx_rq.api_stub.examples import any_body
from mlx_rq.api_stub.waiting import wait
from mlx_rq.jobs.errors import JobFailed
from mlx_rq.jobs.handle import UNFINISHED, Job
from mlx_rq.jobs.keys import Priority
from mlx_rq.jobs.options import DEFAULT_MAX_ATTEMPTS, DEFAULT_RESULT_TTL, JobOptions
from mlx_rq.jobs.validation import kind_of

router = APIRouter(tags=["jobs"])

LONGEST_WAIT = 300.0
_COME_AGAIN = {"retry-after": "1"}


def job_options(
    priority: Priority = "default",
    result_ttl: Annotated[int, Query(ge=1, lt=2**31)] = DEFAULT_RESULT_TTL,
    timeout: Annotated[float | None, Query(gt=0, lt=2**31)] = None,
    max_attempts: Annotated[int, Query(ge=1, le=100)] = DEFAULT_MAX_ATTEMPTS,
) -> JobOptions:
    """Reads what a producer may say about a job beside its body."""
    return JobOptions(priority, result_ttl, timeout, max_attempts)


@router.post("/v1/jobs", status_code=202, openapi_extra=any_body())
async def submit_job(
    request: Request,
    body: JsonBody,
    door: TheDoor,
    options: Annotated[JobOptions, Depends(job_options)],
) -> JSONResponse:
    """Put a job into the queue: `messages` make a chat, `prompt` a completion.

    Answers at once with the job's id; `Location` says where its result will be.
    """
    job = await door.submit(request, kind_of(body), body, options=options, any_model=True)
    view = await run_in_threadpool(_view, job)
    return JSONResponse(view, 202, {"location": f"/v1/jobs/{job.id}", **_COME_AGAIN})


JobId = Annotated[str, Path(examples=["0123456789abcdef0123456789abcdef"])]


@router.get("/v1/jobs/{job_id}")
async def get_job(
    request: Request,
    door: TheDoor,
    job_id: JobId,
    wait_seconds: Annotated[float, Query(alias="wait", ge=0, le=LONGEST_WAIT)] = 0.0,
) -> Response:
    """Tell a job's status, and its result once it has one; `?wait=30` waits for that."""
    job = Job(job_id, door.redis_url)
    view = await run_in_threadpool(_view, job)
    if wait_seconds and view["status"] in UNFINISHED:
        await wait(request, door, job, wait_seconds)
        view = await run_in_threadpool(_view, job)
    return JSONResponse(view, headers=_COME_AGAIN if view["status"] in UNFINISHED else None)


@router.delete("/v1/jobs/{job_id}")
async def cancel_job(door: TheDoor, job_id: JobId) -> JSONResponse:
    """End a job without an answer. One that has ended already stays as it is."""
    job = Job(job_id, door.redis_url)
    await run_in_threadpool(job.cancel)
    return JSONResponse(await run_in_threadpool(_view, job))


def _view(job: Job) -> dict[str, Any]:
    """Shows a job: what is known of it, and its result or error where it has ended."""
    view: dict[str, Any] = {"object": "job", **job.info(), "result": None, "error": None}
    if view["status"] not in UNFINISHED:
        try:
            view["result"] = job.result(timeout=0)
        except JobFailed as failure:
            view["error"] = failure.error
    return view
