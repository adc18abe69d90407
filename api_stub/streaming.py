"""Server-sent events: an answer as it is generated, in the events that OpenAI's clients know.

The text comes from the worker through Redis (`mlx_rq.jobs.queue.stream`). What was not published
is taken from the result at the end: an answer is whole whether or not its worker publishes. How
events look is for the writers: `chunks.py` for completions, `response_events.py` for responses.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.errors import queue_unavailable
from mlx_rq.api_stub.service import Service
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobFailed, RedisUnavailable, RequestError, error_object
from mlx_rq.jobs.openai.fields import Strict
from mlx_rq.jobs.openai.json_line import json_line
from mlx_rq.jobs.openai.validation import read_as
from mlx_rq.jobs.queue.results import unreadable
from mlx_rq.jobs.queue.stream import Delta, Kind, follow

FIRST_SECONDS = 1.0
"""How long a failure can still be told by the status of the answer; then the stream begins."""

KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = ": waiting\n\n"
DONE = "data: [DONE]\n\n"

_STARTED_OVER = error_object(
    "The worker died, and another one began the answer again, differently. Send the request again.",
    code="generation_restarted",
    type="server_error",
)


class StreamOptions(Strict):
    """What a client may say about its stream. Obfuscation is a hosted service's."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _StreamFields(Strict):
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def without_stream(body: Mapping[str, Any]) -> tuple[dict[str, Any], StreamOptions | None]:
    """Takes the wish for a stream out of a body; None where there is none.

    Raises RequestError where the stream's fields are wrong.
    """
    names = _StreamFields.model_fields
    given = read_as(_StreamFields, {name: body[name] for name in names if name in body})
    rest = {name: value for name, value in body.items() if name not in names}
    if given.stream:
        return rest, given.stream_options or StreamOptions()
    if given.stream_options is not None:
        raise RequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            code="invalid_value",
            param="stream_options",
        )
    return rest, None


class Writer(Protocol):
    """Writes the events of one answer, each as the text that is sent."""

    def begin(self) -> Sequence[str]:
        """What comes before all else; nothing where it has been written."""

    def more(self, delta: Delta) -> Sequence[str]:
        """What a delta adds; raises StartedOver where it contradicts what was sent."""

    def end(self, result: Mapping[str, Any]) -> Sequence[str]:
        """What is missing of the answer, and the end; raises StartedOver as `more` does."""

    def failed(self, error: Mapping[str, Any]) -> Sequence[str]:
        """The end of a stream whose job failed when something had been sent already."""


class StartedOver(Exception):
    """A worker died, and the next attempt says something else than what was sent already."""


class Sent:
    """What was sent of the texts of an answer, by choice and kind."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, Kind], str] = {}

    def text(self, choice: int, kind: Kind) -> str:
        """What was sent of one text."""
        return self._texts.get((choice, kind), "")

    def new(self, delta: Delta) -> str:
        """Gives what a delta adds, and counts it as sent; raises StartedOver."""
        sent = self.text(delta.choice, delta.kind)
        known = sent[delta.at : delta.at + len(delta.text)]
        if not delta.text.startswith(known):
            raise StartedOver
        if delta.at > len(sent):
            return ""  # a gap: the result fills it at the end
        new = delta.text[len(known) :]
        self._texts[delta.choice, delta.kind] = sent + new
        return new

    def rest(self, choice: int, kind: Kind, whole: str | None) -> str:
        """Gives what is missing of a text, and counts it as sent; raises StartedOver."""
        sent, whole = self.text(choice, kind), whole or ""
        if not whole.startswith(sent):
            raise StartedOver
        self._texts[choice, kind] = whole
        return whole[len(sent) :]


async def stream(
    service: Service, job: Job, writer: Writer, *, keep: bool, begun: bool = False
) -> StreamingResponse:
    """Answers with the events of a job. Raises JobFailed where it fails at once.

    A client that goes away takes its job with it, as at the endpoints that wait, unless that is
    to be kept. With `begun`, a failure is an event whenever it came.
    """
    events = _events(service, job, writer, keep=keep, started=begun)
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


async def _events(
    service: Service, job: Job, writer: Writer, *, keep: bool, started: bool
) -> AsyncIterator[str]:
    deltas = follow(job.id, service.redis_url)
    coming = asyncio.ensure_future(anext(deltas, None))
    ended = False
    try:
        if started:
            yield "".join(writer.begin()) or _KEEP_ALIVE
        while True:
            await asyncio.wait({coming}, timeout=KEEP_ALIVE_SECONDS if started else FIRST_SECONDS)
            if not coming.done():
                started = True
                yield "".join(writer.begin()) or _KEEP_ALIVE
                continue
            if (delta := coming.result()) is None:
                break
            coming = asyncio.ensure_future(anext(deltas, None))
            if events := "".join(writer.more(delta)):
                started = True
                yield events
        result = await run_in_threadpool(job.result, 0)
        ended = True
        yield "".join(_end(writer, job, result))
    except JobFailed as failure:
        ended = True
        if not started:
            raise
        yield "".join(writer.failed(failure.error))
    except (RedisError, RedisUnavailable) as error:
        ended = True  # as far as can be told here: the job goes on
        if not started:
            raise
        yield "".join(writer.failed(queue_unavailable(error)))
    except StartedOver:
        yield "".join(writer.failed(_STARTED_OVER))
    finally:
        coming.cancel()
        if not ended and not keep:
            # Not awaited: who hung up has cancelled this coroutine.
            asyncio.get_running_loop().run_in_executor(None, job.cancel)


def _end(writer: Writer, job: Job, result: Mapping[str, Any]) -> Sequence[str]:
    """Writes the end; raises JobFailed where the result is that of another kind of job."""
    try:
        return writer.end(result)
    except (KeyError, TypeError, IndexError, AttributeError):
        outcome = unreadable(job.id, "the answer to another kind of job")
        raise JobFailed(job.id, outcome["error"]) from None


def data_event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Writes one event."""
    text = json_line(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
