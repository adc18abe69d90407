"""Turns the finished sequences of a task into OpenAI's response object."""

import time
from collections.abc import Sequence
from typing import Any

from mlx_rq.engine.interface import Task
from mlx_rq.engine.output.logprobs import chat_logprobs, legacy_logprobs, mean_logprob
from mlx_rq.engine.output.responses_api import response_of
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import InvalidAnswer, Reading, tool_calls
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.requests import ANY_MODEL, ChatRequest, CompletionRequest, JobRequest
from mlx_rq.jobs.openai.responses import ResponsesRequest


def answer(
    task: Task,
    sequences: Sequence[TokenSequence],
    token_bytes: TokenBytes,
    *,
    model_id: str,
    fingerprint: str,
) -> dict[str, Any]:
    """Writes the response object of a task, its sequences given in the order of the choices.

    The ids are made of the task's id, so that a response names its job. A finished answer that is
    not of the form that was asked for makes the whole an error object.
    """
    request = task.request
    model = request.model if request.model not in (None, ANY_MODEL) else model_id
    chosen = _best(request, sequences)
    try:
        readings = [sequence.read() for sequence in chosen]
    except InvalidAnswer as invalid:
        return {"error": invalid.error}
    if isinstance(request, ResponsesRequest):
        (sequence,), (reading,) = chosen, readings
        response = response_of(
            request,
            sequence,
            reading,
            token_bytes,
            model=model,
            usage=usage(sequences),
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
                {
                    "index": index,
                    **_choice(request, sequence, reading, token_bytes),
                    **_captures(sequence),
                }
                for index, (sequence, reading) in enumerate(zip(chosen, readings, strict=True))
            ],
            "usage": usage(sequences),
        }
    warnings = {tuple(warning.items()): warning for r in readings for warning in r.warnings}
    if warnings:
        response["warnings"] = list(warnings.values())
    return response


def _best(request: JobRequest, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
    """The sequences that are answered with: of each prompt's, with `best_of`, the likeliest `n`."""
    if not isinstance(request, CompletionRequest) or request.generated == (request.n or 1):
        return sequences
    by_prompt: dict[int, list[TokenSequence]] = {}
    for sequence in sorted(sequences, key=mean_logprob, reverse=True):
        by_prompt.setdefault(sequence.prompt_index, []).append(sequence)
    return [
        sequence for index in sorted(by_prompt) for sequence in by_prompt[index][: request.n or 1]
    ]


def _choice(
    request: ChatRequest | CompletionRequest,
    sequence: TokenSequence,
    reading: Reading,
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    if isinstance(request, CompletionRequest):
        return _completion_choice(request, sequence, reading, token_bytes)
    return _chat_choice(request, sequence, reading, token_bytes)


def _chat_choice(
    request: ChatRequest, sequence: TokenSequence, reading: Reading, token_bytes: TokenBytes
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
        message["tool_calls"] = tool_calls(reading, sequence.task_id, sequence.index)
    called = bool(reading.calls) and not reading.named_call and sequence.finish_reason == "stop"
    return {
        "message": message,
        "logprobs": chat_logprobs(sequence, token_bytes) if request.logprobs else None,
        "finish_reason": "tool_calls" if called else sequence.finish_reason,
    }


def _completion_choice(
    request: CompletionRequest, sequence: TokenSequence, reading: Reading, token_bytes: TokenBytes
) -> dict[str, Any]:
    text = reading.content or ""
    prompt = sequence.prompt_text(request) if request.echo else ""
    asked = request.logprobs is not None
    return {
        "text": prompt + text,
        "logprobs": legacy_logprobs(sequence, token_bytes, text, prompt) if asked else None,
        "finish_reason": sequence.finish_reason,
    }


def _captures(sequence: TokenSequence) -> dict[str, Any]:
    """The named parts of a text that a Lark grammar captured, where there are any."""
    captures = sequence.constraint.captures if sequence.constraint is not None else []
    return {"captures": captures} if captures else {}


def usage(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """Counts tokens: a prompt once, however many choices were made from it; completions summed.

    `cached_tokens` are prompt tokens that were not computed for this task, because another task or
    another choice had them computed.
    """
    by_prompt: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        by_prompt.setdefault(sequence.prompt_index, []).append(sequence)
    prompt = sum(len(choices[0].prompt) for choices in by_prompt.values())
    cached = sum(
        min(sequence.cached_tokens for sequence in choices) for choices in by_prompt.values()
    )
    completion = sum(len(sequence.text.tokens) for sequence in sequences)
    reasoning = sum(
        sequence.output_format.reasoning_tokens(sequence.text.tokens, sequence.text.decode)
        for sequence in sequences
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
