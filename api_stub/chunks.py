"""The chunks of streamed completions: `chat.completion.chunk`, and `text_completion` again.

Source: OpenAI's API reference for streamed chat completions and legacy completions.
"""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from mlx_rq.api_stub.streaming import DONE, Sent, StreamOptions, data_event
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest, asked_model
from mlx_rq.jobs.queue.stream import Delta, Kind


class Chunks:
    """Writes the chunks of one answer."""

    request: ClassVar[type[JobRequest]]
    """The kind that they answer."""
    object_name: ClassVar[str]
    more_fields: ClassVar[Mapping[str, Any]] = {}
    """Fields that only chunks of one kind have."""

    def __init__(self, job: Job, body: Mapping[str, Any], options: StreamOptions) -> None:
        self._id = self.request.id_prefix + job.id
        self._model = asked_model(body.get("model"), body.get("adapters"))
        self._fingerprint: str | None = None  # the answer tells it
        self._created = int(time.time())
        self._usage = options.include_usage is True
        self._sent = Sent()

    def begin(self) -> list[str]:
        """Nothing: the first chunk of a choice comes with its first text."""
        return []

    def more(self, delta: Delta) -> list[str]:
        """Writes what a delta adds to what was sent; raises StartedOver where it contradicts."""
        new = self._sent.new(delta)
        return self._said(delta.choice, delta.kind, new) if new else []

    def end(self, result: Mapping[str, Any]) -> list[str]:
        """Writes what is missing, the reasons of the end, the usage where wanted, and the end."""
        self._model, self._fingerprint = result["model"], result.get("system_fingerprint")
        events: list[str] = []
        for choice in result["choices"]:
            events += self._finish(choice)
        if self._usage:
            events.append(self._chunk([], usage=result["usage"]))
        return [*events, DONE]

    def failed(self, error: Mapping[str, Any]) -> list[str]:
        """Writes the error by itself, as the client looks for it."""
        return [data_event({"error": error})]

    def _said(self, choice: int, kind: Kind, text: str) -> list[str]:
        raise NotImplementedError

    def _finish(self, choice: Mapping[str, Any]) -> list[str]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        chunk = {
            "id": self._id,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            **self.more_fields,
            "choices": choices,
            # With usage asked for, every chunk has the field.
            **({"usage": None} if self._usage else {}),
            **fields,
        }
        return data_event(chunk)


class ChatChunks(Chunks):
    """Writes the chunks of a chat."""

    request = ChatRequest
    object_name = f"{ChatRequest.object_name}.chunk"
    more_fields: ClassVar[Mapping[str, Any]] = {"service_tier": "default"}

    def __init__(self, job: Job, body: Mapping[str, Any], options: StreamOptions) -> None:
        super().__init__(job, body, options)
        self._begun: set[int] = set()

    def _said(self, choice: int, kind: Kind, text: str) -> list[str]:
        names = ("content",) if kind == "content" else ("reasoning", "reasoning_content")
        return [*self._begin(choice), self._one(choice, dict.fromkeys(names, text))]

    def _begin(self, choice: int) -> list[str]:
        if choice in self._begun:
            return []
        self._begun.add(choice)
        return [self._one(choice, {"role": "assistant", "content": ""})]

    def _finish(self, choice: Mapping[str, Any]) -> list[str]:
        index, message = choice["index"], choice["message"]
        events = self._begin(index)
        kinds: tuple[Kind, ...] = ("reasoning", "content")
        for kind in kinds:
            if rest := self._sent.rest(index, kind, message.get(kind)):
                events += self._said(index, kind, rest)
        if calls := message.get("tool_calls"):
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            events.append(self._one(index, {"tool_calls": numbered}))
        last = self._one(index, {}, choice["finish_reason"], choice.get("logprobs"))
        return [*events, last]

    def _one(
        self,
        choice: int,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        logprobs: Any = None,
    ) -> str:
        given = {"index": choice, "delta": delta, "logprobs": logprobs}
        return self._chunk([{**given, "finish_reason": finish_reason}])


class CompletionChunks(Chunks):
    """Writes the chunks of a legacy completion."""

    request = CompletionRequest
    object_name = CompletionRequest.object_name

    def _said(self, choice: int, kind: Kind, text: str) -> list[str]:
        return [self._one(choice, text)]

    def _finish(self, choice: Mapping[str, Any]) -> list[str]:
        rest = self._sent.rest(choice["index"], "content", choice["text"])
        return [self._one(choice["index"], rest, choice["finish_reason"], choice.get("logprobs"))]

    def _one(
        self, choice: int, text: str, finish_reason: str | None = None, logprobs: Any = None
    ) -> str:
        given = {"index": choice, "text": text, "logprobs": logprobs}
        return self._chunk([{**given, "finish_reason": finish_reason}])
