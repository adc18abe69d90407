"""Server-sent events: an answer as it is generated, in the chunks that OpenAI's clients know.

The text comes from the worker through Redis (`mlx_rq.jobs.deltas`). What was not published is taken
from the result at the end: an answer is whole whether or not its worker publishes.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.door import Door
from mlx_rq.api_stub.waiting import keeps_its_job
from mlx_rq.jobs.deltas import Delta, follow
from mlx_rq.jobs.errors import JobFailed, error_object
from mlx_rq.jobs.fields import Strict
from mlx_rq.jobs.handle import Job
from mlx_rq.jobs.keys import ANY_MODEL
from mlx_rq.jobs.validation import read_as

STREAMING = False
"""Whether `stream: true` is taken. Off until workers publish: the endpoints refuse it by name."""

FIRST_SECONDS = 1.0
"""How long a failure can still be told by the status of the answer; then the stream begins."""

_KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = ": waiting\n\n"
_DONE = "data: [DONE]\n\n"


class StreamOptions(Strict):
    """What a client may say about its stream. Obfuscation is a hosted service's."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _StreamFields(Strict):
    stream_options: StreamOptions | None = None


def without_stream(body: Mapping[str, Any]) -> tuple[dict[str, Any], StreamOptions | None]:
    """Takes the wish for a stream out of a body; None where there is none (or it is refused).

    Raises RequestError where the stream's options are wrong.
    """
    if not STREAMING or body.get("stream") is not True:
        return dict(body), None
    rest = {name: value for name, value in body.items() if not name.startswith("stream")}
    given = read_as(_StreamFields, {"stream_options": body.get("stream_options")})
    return rest, given.stream_options or StreamOptions()


async def stream(
    request: Request, door: Door, job: Job, body: Mapping[str, Any], options: StreamOptions
) -> StreamingResponse:
    """Answers with the events of a job. Raises JobFailed where it fails at once.

    A client that goes away takes its job with it, as at the endpoints that wait.
    """
    chat = "messages" in body
    writer = _ChatChunks(job, body, options) if chat else _CompletionChunks(job, body, options)
    events = _events(door, job, writer, keep=keeps_its_job(request, door))
    first = await anext(events)
    return StreamingResponse(
        _chained(first, events),
        media_type="text/event-stream",
        headers={"x-job-id": job.id, "cache-control": "no-cache"},
    )


async def _chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _events(door: Door, job: Job, writer: "_Chunks", *, keep: bool) -> AsyncIterator[str]:
    deltas = follow(job.id, door.redis_url)
    coming = asyncio.ensure_future(anext(deltas, None))
    finished = started = False
    try:
        while True:
            await asyncio.wait({coming}, timeout=_KEEP_ALIVE_SECONDS if started else FIRST_SECONDS)
            if not coming.done():
                started = True
                yield _KEEP_ALIVE
                continue
            if (delta := coming.result()) is None:
                break
            coming = asyncio.ensure_future(anext(deltas, None))
            for event in writer.more(delta):
                started = True
                yield event
        finished = True
        result = await run_in_threadpool(job.result, 0)
        for event in writer.end(result):
            yield event
    except (JobFailed, _StartedOver) as error:
        if not started and isinstance(error, JobFailed):
            raise
        details = error.error if isinstance(error, JobFailed) else _STARTED_OVER
        yield f"data: {json.dumps({'error': details})}\n\n"
    finally:
        coming.cancel()
        if not finished and not keep:
            # Not awaited: who hung up has cancelled this coroutine.
            asyncio.get_running_loop().run_in_executor(None, job.cancel)


class _StartedOver(Exception):
    """A worker died, and the next attempt says something else than what was sent already."""


_STARTED_OVER = error_object(
    "The worker died, and another one began the answer again, differently. Send the request again.",
    code="generation_restarted",
    type="server_error",
)


class _Chunks:
    """Writes the chunks of one answer and knows what was sent of it."""

    object = ""

    def __init__(self, job: Job, body: Mapping[str, Any], options: StreamOptions) -> None:
        self._id = job.id
        self._model = body.get("model") or ANY_MODEL
        self._created = int(time.time())
        self._usage = options.include_usage is True
        self._sent: dict[tuple[int, str], str] = {}

    def more(self, delta: Delta) -> list[str]:
        """Writes what a delta adds to what was sent; raises _StartedOver where it contradicts."""
        sent = self._sent.setdefault((delta.choice, delta.kind), "")
        known = sent[delta.at : delta.at + len(delta.text)]
        if not delta.text.startswith(known):
            raise _StartedOver
        new = delta.text[len(known) :]
        if delta.at > len(sent) or not new:
            return []  # a gap: the result fills it at the end
        self._sent[delta.choice, delta.kind] = sent + new
        return self._said(delta.choice, delta.kind, new)

    def end(self, result: Mapping[str, Any]) -> list[str]:
        """Writes what is missing, the reasons of the end, the usage where wanted, and the end."""
        self._model = result["model"]
        events: list[str] = []
        for choice in result["choices"]:
            events += self._finish(choice)
        if self._usage:
            events.append(self._chunk([], usage=result["usage"]))
        return [*events, _DONE]

    def _rest(self, choice: int, kind: str, whole: str | None) -> str:
        sent = self._sent.get((choice, kind), "")
        if whole is None or not whole.startswith(sent):
            if sent:
                raise _StartedOver
            return ""
        return whole[len(sent) :]

    def _said(self, choice: int, kind: str, text: str) -> list[str]:
        raise NotImplementedError

    def _finish(self, choice: Mapping[str, Any]) -> list[str]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        chunk = {
            "id": self._id,
            "object": self.object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            # With usage asked for, every chunk has the field.
            **({"usage": None} if self._usage else {}),
            **fields,
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _ChatChunks(_Chunks):
    object = "chat.completion.chunk"

    def __init__(self, job: Job, body: Mapping[str, Any], options: StreamOptions) -> None:
        super().__init__(job, body, options)
        self._id = f"chatcmpl-{job.id}"
        self._begun: set[int] = set()

    def _said(self, choice: int, kind: str, text: str) -> list[str]:
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
        for kind in ("reasoning", "content"):
            if rest := self._rest(index, kind, message.get(kind)):
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


class _CompletionChunks(_Chunks):
    object = "text_completion"

    def __init__(self, job: Job, body: Mapping[str, Any], options: StreamOptions) -> None:
        super().__init__(job, body, options)
        self._id = f"cmpl-{job.id}"

    def _said(self, choice: int, kind: str, text: str) -> list[str]:
        return [self._one(choice, text)]

    def _finish(self, choice: Mapping[str, Any]) -> list[str]:
        rest = self._rest(choice["index"], "content", choice["text"])
        return [self._one(choice["index"], rest, choice["finish_reason"], choice.get("logprobs"))]

    def _one(
        self, choice: int, text: str, finish_reason: str | None = None, logprobs: Any = None
    ) -> str:
        given = {"index": choice, "text": text, "logprobs": logprobs}
        return self._chunk([{**given, "finish_reason": finish_reason}])
