"""Every error that reaches a person, in one shape.

An error object has the four keys of OpenAI's (`message`, `type`, `param`, `code`), always all
four, so that a client which reads `error.code` never meets a missing key.
"""

from collections.abc import Mapping
from typing import Any, Literal

from mlx_rq.jobs.openai.words import counted

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error", "cancelled"]
ErrorObject = dict[str, str | None]

_STATUS_BY_CODE = {
    "model_not_found": 404,
    "cancelled": 409,
    "idempotency_conflict": 409,
    "request_too_large": 413,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "unreadable_result": 502,
    "request_timeout": 504,
}


def error_object(
    message: str,
    *,
    code: str | None,
    param: str | None = None,
    type: ErrorType = "invalid_request_error",
) -> ErrorObject:
    """Builds an error object with all four keys, in OpenAI's order."""
    return {"message": message, "type": type, "param": param, "code": code}


def http_status(error: Mapping[str, Any]) -> int:
    """Gives the HTTP status that goes with an error object."""
    other = 500 if error["type"] == "server_error" else 400
    return _STATUS_BY_CODE.get(error["code"], other)


def error_in(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Gives the error object of a job's result; None where the result is a response object.

    A response object may have a field `error` of its own, so its `object` tells them apart.
    """
    return None if "object" in result else result.get("error")


class _Portable(Exception):
    """An error that goes from one process to another as it is (`pickle`)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (type(self), self.args, vars(self))


def _as_it_was(kind: type[_Portable], said: tuple[Any, ...], fields: dict[str, Any]) -> _Portable:
    error = kind.__new__(kind, *said)  # what it was made of, it does not keep
    vars(error).update(fields)
    return error


class RequestError(_Portable, ValueError):
    """A request that cannot be honoured: names the field, the value and what would be right.

    Raised by `submit()`, before anything is queued; at the worker it becomes the job's result.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        type: ErrorType = "invalid_request_error",
    ) -> None:
        # It may quote names and values that UTF-8 cannot say, and goes into Redis, files and logs.
        message = message.encode(errors="backslashreplace").decode()
        param = param and param.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.error: ErrorObject = error_object(message, code=code, param=param, type=type)

    @property
    def code(self) -> str | None:
        return self.error["code"]

    @property
    def param(self) -> str | None:
        return self.error["param"]


class JobFailed(_Portable):
    """The job ended without an answer; `error` is the error object that says why."""

    def __init__(self, job_id: str, error: dict[str, Any]) -> None:
        super().__init__(f"job {job_id}: {error.get('message')}")
        self.job_id = job_id
        self.error = error


class NotParsed(_Portable, ValueError):
    """A structured answer does not fit what was asked for; `text` is the answer.

    `finish_reason` is `length` where the token budget cut it off.
    """

    def __init__(self, job_id: str, text: str, finish_reason: str, error: ValueError) -> None:
        if finish_reason == "length":
            reason = "the token budget cut it off; raise max_completion_tokens"
        else:
            reason = str(error)
        super().__init__(f"job {job_id}: the answer does not parse: {reason}: {text[:200]!r}")
        self.job_id = job_id
        self.text = text
        self.finish_reason = finish_reason


class ResultTimeout(TimeoutError):
    """No result came in time. The job itself goes on; its id still names it."""


class JobNotFound(_Portable, LookupError):
    """No such job: never submitted, or its result has passed its time to live."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id!r} not found: no such id, or its result has passed its time to live"
        )
        self.job_id = job_id


class IdempotencyConflict(RequestError):
    """The idempotency key was used before, for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"The idempotency key {key!r} was already used for a request with another body. "
            "Use a new key for a new request.",
            code="idempotency_conflict",
            param="idempotency_key",
        )


class QueueFull(RequestError):
    """The operator's limits leave no room: nothing was enqueued, and later it may well be.

    `share` says which part of the jobs, or of their bytes, there would have been room for.
    """

    def __init__(self, limit: Literal["jobs", "bytes"], used: int, most: int, coming: int) -> None:
        if limit == "jobs":
            wait = counted(used, "job waits", "jobs wait")
            why = f"{wait}, {coming:,} would come, and the limit is {most:,}."
        else:
            why = (
                f"Redis uses {used:,} bytes, bodies of {coming:,} would come, and the limit is "
                f"{most:,}."
            )
        super().__init__(
            f"The queue is full: {why} Nothing was enqueued. Try again later; whoever runs the "
            f"queue sets the limit with `mlx-rq limits --{limit}`.",
            code="queue_full",
            type="rate_limit_error",
        )
        self.share = max(0, most - used) / coming


class RedisUnavailable(ConnectionError):
    """Redis could not be reached, or refused: says what was tried and what to do."""
