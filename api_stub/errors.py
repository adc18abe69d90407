"""Every error of the server in OpenAI's shape, whoever raised it."""

import logging
from collections.abc import Mapping, Set
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from mlx_rq.files import is_full
from mlx_rq.jobs.openai.errors import (
    ErrorObject,
    ErrorType,
    JobFailed,
    JobNotFound,
    RedisUnavailable,
    RequestError,
    error_object,
    http_status,
)
from mlx_rq.jobs.openai.requests import ANY_MODEL, is_any

logger = logging.getLogger("mlx_rq.api_stub")

NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""Keeps OpenAI's client from sending a request again by itself."""

RETRY_SECONDS = 5

_START = "`mlx-rq worker --model NAME` starts one"


class ApiError(Exception):
    """A refusal by the server itself, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        type: ErrorType = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error_object(message, code=code, param=param, type=type)
        self.headers = headers


def not_found(what: str, identity: str) -> ApiError:
    """Makes the error for an id that names nothing, as in `No such File object: file-x`."""
    return ApiError(404, f"No such {what} object: {identity}", code=None, param="id")


def never_known(model: str, served: Set[str], gone: Set[str]) -> ApiError:
    """Makes the error for a model that nobody has heard of; it tells which there are."""
    here, named = (sorted(name for name in names if not is_any(name)) for names in (served, gone))
    there = f"Served now: {', '.join(here)}." if here else f"No worker is alive; {_START}."
    if named:
        there += f" Away at the moment: {', '.join(named)}."
    return ApiError(
        404,
        f"The model {model!r} does not exist here: no live worker serves it. {there}",
        code="model_not_found",
        param="model",
    )


def away(model: str) -> ApiError:
    """Makes the error for a model that is not served at the moment, but was or will be."""
    which = "No worker is alive" if model == ANY_MODEL else f"No live worker serves {model!r}"
    return ApiError(
        503,
        f"{which} at the moment; {_START}. Try again soon, or send work that does not wait: "
        "a batch, a background response or POST /v1/jobs.",
        code="model_unavailable",
        param="model",
        type="server_error",
        headers={"retry-after": str(RETRY_SECONDS)},
    )


def error_response(
    status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Writes an error object as a response."""
    return JSONResponse({"error": error}, status, headers)


def _api_error(_: Request, error: ApiError) -> JSONResponse:
    return error_response(error.status, error.error, error.headers)


def _request_error(_: Request, error: RequestError) -> JSONResponse:
    status = http_status(error.error)
    headers = {409: NO_RETRY, 429: {"retry-after": str(RETRY_SECONDS)}}
    return error_response(status, error.error, headers.get(status))


def _job_failed(_: Request, failure: JobFailed) -> JSONResponse:
    """The queue has tried as often as is good: a client that tried again would only repeat it."""
    status = http_status(failure.error)
    return error_response(status, failure.error, {**NO_RETRY, "x-job-id": failure.job_id})


def _hung_up(*_: Any) -> Response:
    """The client went before its body had come; nobody reads this."""
    return Response(status_code=499)


def _job_not_found(_: Request, error: JobNotFound) -> JSONResponse:
    return error_response(404, error_object(str(error), code="job_not_found", param="id"))


def _redis_unavailable(_: Request, error: Exception) -> JSONResponse:
    return error_response(503, queue_unavailable(error), {"retry-after": str(RETRY_SECONDS)})


def queue_unavailable(error: Exception) -> ErrorObject:
    """Logs why Redis cannot be asked, and makes the error object that tells a client of it."""
    logger.error("%s", error)
    message = "The server has lost touch with its Redis for the moment. Try again soon."
    return error_object(message, code="queue_unavailable", type="server_error")


def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
    """Starlette's own refusals: no such path, wrong method, a form that cannot be read."""
    url = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message = f"Unknown request URL: {url}. {_where_to_go(request)}"
            code = "unknown_url"
        case 405:
            message, code = f"Not allowed to {url}: wrong method.", "method_not_allowed"
        case status:
            message = str(error.detail)
            code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return error_response(error.status_code, error_object(message, code=code), error.headers)


def _where_to_go(request: Request) -> str:
    """Says which URL was probably meant by one that is none."""
    path, root = request.url.path.rstrip("/"), request.base_url
    base, docs = f"The base URL of OpenAI's clients is {root}v1.", f"{root}docs lists the calls."
    bare = path.replace("/v1", "")
    if not bare:
        return f"{base} {docs}"
    if bare == "/conversations" or bare.startswith("/conversations/"):
        return "There are no conversations here: 'previous_response_id' goes on from a response."
    for meant in (path, f"/v1{bare}"):
        if meant != request.url.path and _is_known(request, meant):
            return f"Is {meant} meant? {base}"
    return docs


def _is_known(request: Request, path: str) -> bool:
    """Whether there is such a path for the request's method."""
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def _invalid_parameter(_: Request, error: RequestValidationError) -> JSONResponse:
    """A query or path parameter that FastAPI refused."""
    fault = error.errors()[0]
    param = str(fault["loc"][1])  # after where it is; behind it may come a place in a list
    if fault["type"] == "missing":
        message, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
    else:
        given = str(fault["input"])[:80]
        message, code = f"Invalid '{param}': {fault['msg']}, but got {given!r}.", "invalid_value"
    return error_response(400, error_object(message, code=code, param=param))


def internal_error(error: Exception, request_id: str) -> JSONResponse:
    """Logs what nobody expected and tells the client no more than that it happened.

    A full disk is nothing unexpected.
    """
    if isinstance(error, OSError) and is_full(error):
        logger.error("%s: %s", request_id, error)
        message = (
            "The disk of the server is full, and nothing was kept of this request. Whoever runs it "
            "makes room in its data folder (--data-dir)."
        )
        told = error_object(message, code="disk_full", type="server_error")
        return error_response(507, told, {"x-should-retry": "false"})
    logger.error("the server failed on %s", request_id, exc_info=error)
    message = f"The server failed on this request. Its log says why, under {request_id}."
    return error_response(500, error_object(message, code="internal_error", type="server_error"))


def install(app: FastAPI) -> None:
    """Makes the app answer every error in this shape."""
    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        RequestError: _request_error,
        JobFailed: _job_failed,
        JobNotFound: _job_not_found,
        RedisUnavailable: _redis_unavailable,
        ClientDisconnect: _hung_up,
        RedisError: _redis_unavailable,
        HTTPException: _http_exception,
        RequestValidationError: _invalid_parameter,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
