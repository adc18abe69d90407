"""Text while it is generated: the worker publishes it, clients that stream follow it.

The contract of both sides:

- A producer asks for it with `JobOptions(stream=True)`; the job's meta then says `"stream": true`.
  Nothing is published for other jobs.
- While such a job is generated, the worker calls `publish` with what its rows have said since, at
  most some ten times a second for each job. Only text that stands is published: no part of what may
  become a stop string, no half of a character.
- `at` says how many characters of the same choice and kind came before. An attempt that starts over
  publishes from 0 again; followers compare it with what they have.
- Text may be left out: what is missing when the job ends, followers take from its result. So tool
  calls, or whatever is only known at the end, need not be published.
- The end is not told here. It is the job's end, which comes after its last text: publish in the
  same step before the commit, or not at all.
- Every follower gets every entry, in the same order, also one that comes when the job has ended; so
  events that are made of them alone can be numbered.
- The key goes STREAM_SECONDS after its last text.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.client import Pipeline
from redis.exceptions import RedisError
from rq.job import Job as RQJob

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.connection import connect, new_async_connection
from mlx_rq.jobs.queue.payload import read_meta
from mlx_rq.jobs.queue.waiting import wait_for_end

STREAM_SECONDS = 600
_BLOCK_MILLISECONDS = 100
"""How late a follower is heard that comes while others are being read for."""

_AGAIN_SECONDS = 1.0
"""How long nothing is read after Redis failed."""

Kind = Literal["content", "reasoning"]


class Delta(NamedTuple):
    """Some more text of one choice; `at` characters of the same kind came before it."""

    choice: int
    kind: Kind
    at: int
    text: str


def publish(pipe: Pipeline | Redis, job_id: str, deltas: list[Delta]) -> None:
    """Tells followers of a job what it has said since. The worker's side."""
    name = keys.stream(job_id)
    for delta in deltas:
        fields: Any = delta._asdict()
        pipe.xadd(name, fields)
    pipe.expire(name, STREAM_SECONDS)


def is_published(connection: Redis, job_id: str) -> bool:
    """Says whether a job's text is published: whether its producer asked for that."""
    meta = reading.ask(connection.hget, RQJob.key_for(job_id), "meta")
    return read_meta(meta).get("stream") is True


def is_kept(connection: Redis, job_id: str) -> bool:
    """Says whether there is published text of a job, still."""
    return bool(connection.exists(keys.stream(job_id)))


async def follow(job_id: str, redis_url: str) -> AsyncIterator[Delta]:
    """Yields the text of a job as it is published, from its start until the job has ended."""
    readers = _readers.setdefault(asyncio.get_running_loop(), {})
    reader = readers.setdefault(redis_url, _Reader(redis_url))
    end = asyncio.ensure_future(wait_for_end(job_id, redis_url))
    given, position = 0, b"0-0"
    try:
        with reader.text_of(job_id) as text:
            while not end.done():
                text.grown.clear()
                while given < len(text.entries):
                    position, delta = text.entries[given]
                    given += 1
                    yield delta
                growth = asyncio.ensure_future(text.grown.wait())
                await asyncio.wait({end, growth}, return_when=asyncio.FIRST_COMPLETED)
                growth.cancel()
        end.result()  # raises what went wrong with Redis
        for delta in await asyncio.to_thread(_rest, job_id, redis_url, position):
            yield delta
    finally:
        end.cancel()


def _rest(job_id: str, redis_url: str, after: bytes) -> list[Delta]:
    """Reads what was published last, before the end; nothing where Redis does not say."""
    with suppress(RedisError):
        streams: Any = connect(redis_url).xread({keys.stream(job_id): after})
        return [delta for _, entries in streams or () for _, delta in _deltas(entries)]
    return []


class _Text:
    """What was published of one job so far, for all who follow it here."""

    def __init__(self) -> None:
        self.position: Any = b"0-0"
        self.entries: list[tuple[bytes, Delta]] = []
        self.grown = asyncio.Event()
        self.followers = 0


_readers: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Reader]]" = WeakKeyDictionary()


class _Reader:
    """Reads the streams of all jobs that one event loop follows, through one blocking read."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._texts: dict[str, _Text] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def text_of(self, job_id: str) -> Iterator[_Text]:
        """Has a job read for as long as the block runs."""
        text = self._texts.setdefault(job_id, _Text())
        text.followers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
        try:
            yield text
        finally:
            text.followers -= 1
            if not text.followers:
                self._texts.pop(job_id, None)

    async def _read(self) -> None:
        """Reads as long as anybody follows; asked last, so that who comes meanwhile is read for.

        An error of Redis is not told here: the end of the job comes with it.
        """
        while self._texts:
            client = new_async_connection(self._redis_url)
            try:
                await self._read_by(client)
            except Exception:
                await asyncio.sleep(_AGAIN_SECONDS)
            finally:
                await client.aclose()

    async def _read_by(self, client: AsyncRedis) -> None:
        while self._texts:
            texts = {keys.stream(job_id).encode(): text for job_id, text in self._texts.items()}
            positions: Any = {name: text.position for name, text in texts.items()}
            streams = await reading.asked(client.xread(positions, block=_BLOCK_MILLISECONDS))
            if streams is reading.WRONG_TYPE:
                streams = await _read_each(client, positions)
            for name, entries in streams or ():
                text = texts[name]
                text.position = entries[-1][0]
                text.entries += _deltas(entries)
                text.grown.set()


async def _read_each(client: AsyncRedis, positions: Mapping[bytes, bytes]) -> list[Any]:
    """Reads streams one by one, because the key of one of them holds another type."""
    await asyncio.sleep(_BLOCK_MILLISECONDS / 1000)
    found: list[Any] = []
    for name, position in positions.items():
        streams = await reading.asked(client.xread({name: position}))
        if streams is not reading.WRONG_TYPE:
            found += streams
    return found


def _deltas(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[tuple[bytes, Delta]]:
    """Reads what was published, with the ids of the entries; what makes no sense is left out."""
    read = [(entry, _delta(fields)) for entry, fields in entries]
    return [(entry, delta) for entry, delta in read if delta is not None]


def _delta(fields: Mapping[bytes, bytes]) -> Delta | None:
    try:
        kind: Kind = "reasoning" if fields[b"kind"] == b"reasoning" else "content"
        choice, at = int(fields[b"choice"]), int(fields[b"at"])
        return Delta(choice, kind, at, fields[b"text"].decode()) if min(choice, at) >= 0 else None
    except (KeyError, ValueError):
        return None
