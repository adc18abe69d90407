"""Turns the finished sequences of chats and legacy completions into lists of choices."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from mlx_rq.engine.output.logprobs import chat_logprobs, legacy_logprobs
from mlx_rq.engine.output.tool_calls import tool_calls
from mlx_rq.engine.output.writer import Answer, Finished, Writer
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import Reading
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest

RequestType = TypeVar("RequestType", ChatRequest, CompletionRequest)


class _ChoicesWriter(Writer[RequestType]):
    """Writes answers that have choices."""

    more_fields: ClassVar[Mapping[str, Any]] = {}
    """Fields that only answers of one kind have."""

    def write(self, request: RequestType, finished: Finished) -> Answer:
        return {
            "id": f"{request.id_prefix}{finished.task.id}",
            "object": request.object_name,
            "created": int(time.time()),
            "model": finished.model,
            "system_fingerprint": finished.fingerprint,
            "choices": [
                {
                    "index": index,
                    **self._choice(request, sequence, reading, finished.token_bytes),
                    **_captures(sequence),
                }
                for index, (sequence, reading) in enumerate(finished.chosen)
            ],
            "usage": finished.usage,
            **self.more_fields,
        }

    def _choice(
        self,
        request: RequestType,
        sequence: TokenSequence,
        reading: Reading,
        token_bytes: TokenBytes,
    ) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(_ChoicesWriter[ChatRequest]):
    """Writes the answers of chats."""

    more_fields: ClassVar[Mapping[str, Any]] = {"service_tier": "default"}

    def _choice(
        self,
        request: ChatRequest,
        sequence: TokenSequence,
        reading: Reading,
        token_bytes: TokenBytes,
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


class CompletionWriter(_ChoicesWriter[CompletionRequest]):
    """Writes the answers of legacy completions."""

    def _choice(
        self,
        request: CompletionRequest,
        sequence: TokenSequence,
        reading: Reading,
        token_bytes: TokenBytes,
    ) -> dict[str, Any]:
        text, prompt = reading.content or "", sequence.echoed
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
