"""The kinds of jobs that there are. A new one needs a line here, and where its answers are written.

(`engine/output/response.py` has a writer for each; an endpoint of its own is up to the server.)
"""

from collections.abc import Mapping

from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.token_count import TokenCountRequest

KINDS: Mapping[str, type[JobRequest]] = {
    request.kind: request
    for request in (ChatRequest, CompletionRequest, ResponsesRequest, TokenCountRequest)
}
