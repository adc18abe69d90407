"""Turns the finished sequences of a task into OpenAI's response object."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_rq.engine.interface import Task
from mlx_rq.engine.output.completions import ChatWriter, CompletionWriter
from mlx_rq.engine.output.logprobs import mean_logprob
from mlx_rq.engine.output.responses_api import ResponsesWriter
from mlx_rq.engine.output.token_count import TokenCountWriter
from mlx_rq.engine.output.writer import Finished, Writer
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import InvalidAnswer
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.requests import (
    ChatRequest,
    CompletionRequest,
    asked_model,
    is_any,
)
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.token_count import TokenCountRequest

WRITERS: Mapping[str, Writer[Any]] = {
    ChatRequest.kind: ChatWriter(),
    CompletionRequest.kind: CompletionWriter(),
    ResponsesRequest.kind: ResponsesWriter(),
    TokenCountRequest.kind: TokenCountWriter(),
}
"""By kind of job."""


def response_of(
    task: Task,
    sequences: Sequence[TokenSequence],
    token_bytes: TokenBytes,
    *,
    model_id: str,
    fingerprint: str,
) -> dict[str, Any]:
    """Writes the response object of a task, its sequences given in the order of the choices.

    A finished answer that is not of the form that was asked for makes the whole an error object.
    """
    request = task.request
    asked = asked_model(request.model, request.adapters)
    chosen = _best(sequences)
    try:
        readings = [sequence.read() for sequence in chosen]
    except InvalidAnswer as invalid:
        return {"error": invalid.error}
    finished = Finished(
        task,
        list(zip(chosen, readings, strict=True)),
        token_usage(sequences),
        token_bytes,
        model=model_id if is_any(asked) else asked,
        fingerprint=fingerprint,
    )
    response = WRITERS[request.kind].write(request, finished)
    warnings = {tuple(warning.items()): warning for r in readings for warning in r.warnings}
    if warnings:
        response["warnings"] = list(warnings.values())
    return response


def _best(sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
    """The sequences that are answered with: of each prompt's, with `best_of`, the likeliest `n`."""
    request = sequences[0].output_format.request
    if request.generated == request.returned:
        return sequences
    by_prompt: dict[int, list[TokenSequence]] = {}
    for sequence in sorted(sequences, key=mean_logprob, reverse=True):
        by_prompt.setdefault(sequence.prompt_index, []).append(sequence)
    return [
        sequence for index in sorted(by_prompt) for sequence in by_prompt[index][: request.returned]
    ]


def token_usage(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
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
