"""Sends the page what has changed, as server-sent events, for as long as it is open."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.page.view import Event, View
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.history import read_history

LOOK_SECONDS = 2.0
"""How often it is looked for changes."""

_MOST_OF_THE_TIME = 9
"""Looks that take long are taken seldom: so many times as long lies between two of them."""

_KEEP_ALIVE_SECONDS = 15.0

COLUMNS = (
    *("at", "workers", "queued", "in_progress", "jobs_ended"),
    *("prompt_tokens", "prefilled_tokens", "decoded_tokens"),
    *("memory_active", "memory_cache", "memory_ceiling"),
)


class Events:
    """The events of one open page: each is sent when it differs from the last one of its name.

    The page has the samples up to `after`, a Unix time in seconds, already.
    """

    def __init__(self, view: View, redis_url: str, closing: asyncio.Event, after: int = 0) -> None:
        self._view = view
        self._redis_url = redis_url
        self._closing = closing
        self._sent: dict[str, str] = {}
        self._sampled_until = after

    async def run(self) -> AsyncIterator[str]:
        """Gives the text of the stream, until the server closes or nobody reads it any more."""
        spoken = time.monotonic()
        while not self._closing.is_set():
            began = time.monotonic()
            text = await run_in_threadpool(self._look)
            if not text and began > spoken + _KEEP_ALIVE_SECONDS:
                text = ": nothing new\n\n"
            if text:
                spoken = began
                yield text
            pause = max(LOOK_SECONDS, _MOST_OF_THE_TIME * (time.monotonic() - began))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)

    def _look(self) -> str:
        try:
            events = [*self._view.look(), *self._history(), ("away", None)]
        except RedisUnavailable as error:
            events = [("away", str(error))]
        return "".join(map(self._changed, events))

    def _history(self) -> list[Event]:
        connection = connect(self._redis_url)
        with reachable(connection):
            samples = read_history(connection, self._sampled_until)
        if not samples and self._sampled_until:
            return []
        rows = [[at, *(getattr(sample, name) for name in COLUMNS[1:])] for at, sample in samples]
        if samples:
            self._sampled_until = samples[-1][0]
        return [("history", {"columns": COLUMNS, "rows": rows})]

    def _changed(self, event: Event) -> str:
        name, data = event
        written = json.dumps(data, separators=(",", ":"))
        if self._sent.get(name) == written:
            return ""
        self._sent[name] = written
        return f"event: {name}\ndata: {written}\n\n"
