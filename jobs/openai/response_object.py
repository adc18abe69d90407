"""Writes OpenAI's Response object, of a job in any state."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mlx_rq.jobs.openai.responses import ResponsesRequest

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_FAILURES = {
    # OpenAI's list of codes is closed; the client parses no other.
    "rate_limit_exceeded": "rate_limit_exceeded",
    "context_length_exceeded": "invalid_prompt",
}

_NOTHING_HERE = (
    *("conversation", "moderation", "prompt", "safety_identifier", "user"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Fields of OpenAI's object that a local model has no use for: null."""


def response_id(job_id: str) -> str:
    """Names the response of a job."""
    return ResponsesRequest.id_prefix + job_id


def job_of(response: str) -> str | None:
    """Gives the id of a response's job; None where it is no response's id."""
    prefix = ResponsesRequest.id_prefix
    return response.removeprefix(prefix) if response.startswith(prefix) else None


def response_object(
    request: ResponsesRequest,
    job_id: str,
    *,
    status: ResponseStatus,
    model: str,
    created_at: float,
    completed_at: float | None = None,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the Response object of a job.

    `error`, the error object of a job that failed, is told in the words that a Response has.
    """
    text, reasoning = request.text, request.reasoning
    given_format = text.format if text else None
    wanted = {"type": "text"} if given_format is None else _dump(given_format)
    return {
        "id": response_id(job_id),
        "object": ResponsesRequest.object_name,
        "created_at": int(created_at),
        "status": status,
        "background": bool(request.background),
        "completed_at": None if completed_at is None else int(completed_at),
        "error": None if error is None else _error(error),
        "incomplete_details": ({"reason": "max_output_tokens"} if status == "incomplete" else None),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        **dict.fromkeys(_NOTHING_HERE),
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": _or(request.temperature, 1.0),
        "top_p": _or(request.top_p, 1.0),
        "text": {"format": wanted, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": _choice(request.tool_choice),
        "tools": [
            {"description": None, "parameters": None, "strict": None, **_dump(tool)}
            for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "usage": None if usage is None else _usage(usage),
        "metadata": request.metadata or {},
        "presence_penalty": _or(request.presence_penalty, 0.0),
        "frequency_penalty": _or(request.frequency_penalty, 0.0),
    }


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _dump(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(by_alias=True, exclude_none=True)
    return dumped


def _choice(choice: Any) -> Any:
    return "auto" if choice is None else choice if isinstance(choice, str) else _dump(choice)


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    client = error["type"] == "invalid_request_error"
    code = _FAILURES.get(error["code"], "invalid_prompt" if client else "server_error")
    return {"code": code, "message": error["message"]}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Renames a chat's usage."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": dict(usage["completion_tokens_details"]),
        "total_tokens": usage["total_tokens"],
    }
