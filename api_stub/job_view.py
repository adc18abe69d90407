"""A job as `/v1/jobs` and webhooks show it."""

from collections.abc import Collection
from typing import Any

from mlx_rq.jobs.client.job import UNFINISHED, Job
from mlx_rq.jobs.openai.errors import JobFailed


def job_view(job: Job, served: Collection[str] = ()) -> dict[str, Any]:
    """Shows a job: what is known of it, and its result or error where it has ended.

    `served` are models that are known to be. Raises JobNotFound.
    """
    view: dict[str, Any] = {"object": "job", **job.info(served), "result": None, "error": None}
    if view["status"] not in UNFINISHED:
        try:
            view["result"] = job.result(timeout=0)
        except JobFailed as failure:
            view["error"] = failure.error
    return view
