"""/v1/jobs: the queue as plain HTTP, for people without an OpenAI client."""

from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import JobView
from mlx_rq.api_stub.bodies import JsonBody
from mlx_rq.api_stub.job_view import job_view
from mlx_rq.api_stub.long_poll import wait
from mlx_rq.api_stub.openapi import answers, any_body
from mlx_rq.api_stub.service import TheClient, TheService
from mlx_rq.api_stub.webhooks import check_target
from mlx_rq.jobs.client.job import UNFINISHED, Job
from mlx_rq.jobs.openai.token_count import TokenCountRequest, counting
from mlx_rq.jobs.openai.validation import kind_of, validate
from mlx_rq.jobs.queue.options import JobOptions

router = APIRouter(tags=["jobs"])

LONGEST_WAIT = 300.0
_COME_AGAIN = {"retry-after": "1"}

Flag = Annotated[bool, BeforeValidator(lambda given: True if given == "" else given)]
"""A query parameter that is true where its name stands alone, as in `?dry_run`."""


async def job_options(**given: Any) -> JobOptions:
    """Reads what a producer may say about a job beside its body."""
    return JobOptions(**given)


# FastAPI takes the query's parameters from here.
job_options.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[field.type, Query(**field.metadata["http"])],
        )
        for field in fields(JobOptions)
        if field.metadata["http"] is not None
    ]
)


@router.post(
    "/v1/jobs", responses=answers(JobView, status=202), status_code=202, openapi_extra=any_body()
)
async def submit_job(
    request: Request,
    body: JsonBody,
    service: TheService,
    options: Annotated[JobOptions, Depends(job_options)],
    dry_run: Flag = False,
) -> JSONResponse:
    """Put a job into the queue: `messages` make a chat, `prompt` a completion, `input` a response.

    Answers at once with the job's id; `Location` says where its result will be. A `webhook` is
    called with the job once that has ended. With `dry_run`, the job only counts the tokens of the
    prompt.
    """
    if dry_run:
        body = _dry(body)
    if options.webhook is not None:
        check_target(options.webhook, service.settings)
    job = await service.submit(request, kind_of(body), body, options=options, any_model=True)
    view = await run_in_threadpool(job_view, job, service.served)
    return JSONResponse(view, 202, {"location": f"/v1/jobs/{job.id}", **_COME_AGAIN})


def _dry(body: dict[str, Any]) -> dict[str, Any]:
    """Makes a body of one that counts; raises RequestError where it is wrong, in its own names."""
    wanted = validate(kind_of(body), body)
    return body if wanted.kind == TokenCountRequest.kind else counting(body)


JobId = Annotated[str, Path(examples=["0123456789abcdef0123456789abcdef"])]


async def _find_job(service: TheService, client: TheClient, job_id: JobId) -> Job:
    """Finds a job that the client may see; raises JobNotFound for another's."""
    return await service.find(client, job_id)


TheJob = Annotated[Job, Depends(_find_job)]


@router.get("/v1/jobs/{job_id}", responses=answers(JobView))
async def get_job(
    request: Request,
    service: TheService,
    job: TheJob,
    wait_seconds: Annotated[float, Query(alias="wait", ge=0, le=LONGEST_WAIT)] = 0.0,
) -> Response:
    """Tell a job's status, and its result once it has one; `?wait=30` waits for that."""
    view = await run_in_threadpool(job_view, job)
    if wait_seconds and view["status"] in UNFINISHED:
        await wait(request, service, job, wait_seconds)
        view = await run_in_threadpool(job_view, job)
    return JSONResponse(view, headers=_COME_AGAIN if view["status"] in UNFINISHED else None)


@router.delete("/v1/jobs/{job_id}", responses=answers(JobView))
async def cancel_job(job: TheJob) -> JSONResponse:
    """End a job without an answer. One that has ended already stays as it is."""
    await run_in_threadpool(job.cancel)
    return JSONResponse(await run_in_threadpool(job_view, job))
