"""Turns the finished rows of a task into OpenAI's response object."""

import time
from collections.abc import Sequence
from typing import Any

from mlx_rq.engine.rows import Row
from mlx_rq.jobs.keys import ANY_MODEL
from mlx_rq.jobs.requests import ChatRequest, Request


def answer(
    task_id: str, request: Request, rows: Sequence[Row], *, model_id: str, fingerprint: str
) -> dict[str, Any]:
    """Writes the response object of a task, its rows given in the order of the choices.

    The ids are made of the task's id, so that a response names its job.
    """
    chat = isinstance(request, ChatRequest)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{task_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model if request.model not in (None, ANY_MODEL) else model_id,
        "system_fingerprint": fingerprint,
        "choices": [_chat_choice(row) if chat else _completion_choice(row) for row in rows],
        "usage": usage(rows),
    }


def _chat_choice(row: Row) -> dict[str, Any]:
    return {
        "index": row.index,
        "message": {
            "role": "assistant",
            "content": row.text.finish(),
            "refusal": None,
            "annotations": [],
        },
        "logprobs": None,
        "finish_reason": row.finish_reason,
    }


def _completion_choice(row: Row) -> dict[str, Any]:
    return {
        "index": row.index,
        "text": row.text.finish(),
        "logprobs": None,
        "finish_reason": row.finish_reason,
    }


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
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
