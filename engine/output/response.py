"""Turns the finished rows of a task into OpenAI's response object."""

import time
from collections.abc import Sequence
from typing import Any

from mlx_rq.engine.interface import Task
from mlx_rq.engine.output.logprobs import chat_logprobs, legacy_logprobs, mean_logprob
from mlx_rq.engine.output.responses_api import response_of
from mlx_rq.engine.scheduling.sequence import Row
from mlx_rq.engine.structured.output_format import InvalidAnswer, Reading, tool_calls
from mlx_rq.engine.text.token_bytes import Spelling
from mlx_rq.jobs.openai.requests import ANY_MODEL, ChatRequest, CompletionRequest, JobRequest
from mlx_rq.jobs.openai.responses import ResponsesRequest


def answer(
    task: Task,
    rows: Sequence[Row],
    spelling: Spelling,
    *,
    model_id: str,
    fingerprint: str,
) -> dict[str, Any]:
    """Writes the response object of a task, its rows given in the order of the choices.

    The ids are made of the task's id, so that a response names its job. A finished answer that is
    not of the form that was asked for makes the whole an error object.
    """
    request = task.request
    model = request.model if request.model not in (None, ANY_MODEL) else model_id
    chosen = _best(request, rows)
    try:
        readings = [row.read() for row in chosen]
    except InvalidAnswer as invalid:
        return {"error": invalid.error}
    if isinstance(request, ResponsesRequest):
        (row,), (reading,) = chosen, readings
        response = response_of(
            request,
            row,
            reading,
            spelling,
            model=model,
            usage=usage(rows),
            submitted_at=task.submitted_at,
        )
    else:
        chat = isinstance(request, ChatRequest)
        response = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{task.id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": [
                {"index": index, **_choice(request, row, reading, spelling), **_captures(row)}
                for index, (row, reading) in enumerate(zip(chosen, readings, strict=True))
            ],
            "usage": usage(rows),
        }
    warnings = {tuple(warning.items()): warning for r in readings for warning in r.warnings}
    if warnings:
        response["warnings"] = list(warnings.values())
    return response


def _best(request: JobRequest, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that are answered with: of each prompt's, with `best_of`, the likeliest `n`."""
    if not isinstance(request, CompletionRequest) or request.generated == (request.n or 1):
        return rows
    by_prompt: dict[int, list[Row]] = {}
    for row in sorted(rows, key=mean_logprob, reverse=True):
        by_prompt.setdefault(row.prompt_index, []).append(row)
    return [row for index in sorted(by_prompt) for row in by_prompt[index][: request.n or 1]]


def _choice(
    request: ChatRequest | CompletionRequest, row: Row, reading: Reading, spelling: Spelling
) -> dict[str, Any]:
    if isinstance(request, CompletionRequest):
        return _completion_choice(request, row, reading, spelling)
    return _chat_choice(request, row, reading, spelling)


def _chat_choice(
    request: ChatRequest, row: Row, reading: Reading, spelling: Spelling
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reading.content,
        "refusal": None,
        "annotations": [],
    }
    if reading.reasoning is not None:
        # Two names are in use for it; clients read the one or the other.
        message |= {"reasoning": reading.reasoning, "reasoning_content": reading.reasoning}
    if reading.calls:
        message["tool_calls"] = tool_calls(reading, row.task_id, row.index)
    called = bool(reading.calls) and not reading.named_call and row.finish_reason == "stop"
    return {
        "message": message,
        "logprobs": chat_logprobs(row, spelling) if request.logprobs else None,
        "finish_reason": "tool_calls" if called else row.finish_reason,
    }


def _completion_choice(
    request: CompletionRequest, row: Row, reading: Reading, spelling: Spelling
) -> dict[str, Any]:
    text = reading.content or ""
    prompt = row.prompt_text(request) if request.echo else ""
    asked = request.logprobs is not None
    return {
        "text": prompt + text,
        "logprobs": legacy_logprobs(row, spelling, text, prompt) if asked else None,
        "finish_reason": row.finish_reason,
    }


def _captures(row: Row) -> dict[str, Any]:
    """The named parts of a text that a Lark grammar captured, where there are any."""
    captures = row.constraint.captures if row.constraint is not None else []
    return {"captures": captures} if captures else {}


def usage(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts tokens: a prompt once, however many choices were made from it; completions summed.

    `cached_tokens` are prompt tokens that were not computed for this task, because another task or
    another choice had them computed.
    """
    by_prompt: dict[int, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt_index, []).append(row)
    prompt = sum(len(choices[0].prompt) for choices in by_prompt.values())
    cached = sum(min(row.cached_tokens for row in choices) for choices in by_prompt.values())
    completion = sum(len(row.text.tokens) for row in rows)
    reasoning = sum(row.form.reasoning_tokens(row.text.tokens, row.text.decode) for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
