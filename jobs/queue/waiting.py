"""Lets any number of coroutines wait for jobs through one blocking read.

Each event loop has one reader for each Redis: it follows the completions stream while somebody
waits, and wakes the futures of the jobs that the stream names.
"""

import asyncio
import time
from weakref import WeakKeyDictionary

from redis.asyncio import Redis

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.connection import new_async_connection
from mlx_rq.jobs.queue.record import ask_for_ends, ends_in

_BLOCK_MILLISECONDS = 2000

_readers: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Reader]]" = WeakKeyDictionary()


async def wait_for_end(job_id: str, redis_url: str) -> None:
    """Returns once the job has ended, however it ended (also where it does not exist)."""
    readers = _readers.setdefault(asyncio.get_running_loop(), {})
    reader = readers.setdefault(redis_url, _Reader(redis_url))
    await reader.wait(job_id)


class _Reader:
    """Follows the completions stream for all the waiters of one event loop."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._client: Redis | None = None  # there is one while somebody follows the stream
        self._new: list[str] = []  # jobs that somebody waits for since the last look
        self._look: asyncio.Task[None] | None = None

    async def wait(self, job_id: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(job_id, set()).add(future)
        if self._client is None:
            self._client = new_async_connection(self._redis_url)
            self._task = asyncio.create_task(self._follow(self._client))
        # The end may have come before anybody followed the stream. A task of its own looks for all
        # who come at once, also because redis-py can swallow the cancellation of who reads.
        self._new.append(job_id)
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_new(self._client))
        try:
            await future
        finally:
            waiters = self._waiters[job_id]
            waiters.discard(future)
            if not waiters:
                del self._waiters[job_id]

    async def _follow(self, client: Redis) -> None:
        try:
            newest = await reading.asked(client.xrevrange(keys.COMPLETIONS, count=1))
            position = reading.position(newest)
            # What ended after a waiter's own look and before this position, the stream won't tell.
            await self._wake_ended(client, list(self._waiters))
            looked = time.monotonic()
            while self._waiters:
                streams = await reading.asked(
                    client.xread({keys.COMPLETIONS: position}, block=_BLOCK_MILLISECONDS)
                )
                if streams is reading.WRONG_TYPE:
                    await asyncio.sleep(reading.PAUSE_SECONDS)
                last, job_ids = reading.entries(streams, "job")
                position = last or position
                for job_id in job_ids:
                    self._wake(job_id)
                # Ends that the stream did not tell: trimmed, or RQ's own.
                if time.monotonic() - looked >= _BLOCK_MILLISECONDS / 1000:
                    await self._wake_ended(client, list(self._waiters))
                    looked = time.monotonic()
        except Exception as error:
            self._fail(list(self._waiters), error)
        finally:
            self._client = None  # before the await: who comes now starts a reader of its own
            await client.aclose()

    async def _look_at_new(self, client: Redis) -> None:
        while self._new:
            job_ids, self._new = self._new, []
            try:
                await self._wake_ended(client, job_ids)
            except Exception as error:
                self._fail(job_ids, error)

    async def _wake_ended(self, client: Redis, job_ids: list[str]) -> None:
        async with client.pipeline(transaction=False) as pipe:
            ask_for_ends(pipe, job_ids)
            replies = reading.sift(await pipe.execute(raise_on_error=False))
        for job_id in ends_in(job_ids, replies):
            self._wake(job_id)

    def _wake(self, job_id: str) -> None:
        for future in self._waiters.get(job_id, ()):
            if not future.done():
                future.set_result(None)

    def _fail(self, job_ids: list[str], error: Exception) -> None:
        for job_id in job_ids:
            for future in self._waiters.get(job_id, ()):
                if not future.done():
                    future.set_exception(error)
