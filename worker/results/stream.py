"""Publishes what streamed jobs say while they are generated (rules: `jobs/queue/stream.py`)."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from redis import Redis

from mlx_rq.engine.interface import Engine, Partial
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.jobs.queue.stream import Delta, Kind, publish

logger = logging.getLogger("mlx_rq.worker")

INTERVAL_SECONDS = 0.1
"""How often a job's text is looked at: it comes in some larger pieces, not token by token."""

_PAUSE_SECONDS = 5.0
"""How long nothing is published after Redis refused; followers get the text at the end."""

_Told = dict[tuple[int, Kind], str]


class StreamPublisher:
    """Follows the streamed jobs of one worker. Without any, `publish` costs nothing."""

    def __init__(
        self, engine: Engine, connection: Redis, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._due = clock()
        self._redis = RedisRetry(self._redis_failed, seconds=_PAUSE_SECONDS, clock=clock)

    def watch(self, job_id: str) -> None:
        """Publishes a job from now on, from its beginning."""
        self._told[job_id] = {}

    def forget(self, job_id: str) -> None:
        """Publishes no more of a job. Does nothing for one that is not watched."""
        self._told.pop(job_id, None)

    def publish(self) -> None:
        """Publishes what has been said since the last time, once the interval has passed.

        A Redis that takes nothing stops nothing: what it did not take is sent again later.
        """
        if not self._told or self._clock() < self._due or self._redis.away:
            return
        self._due = self._clock() + INTERVAL_SECONDS
        news = {
            job_id: deltas
            for job_id, said in self._engine.partial(self._told.keys()).items()
            if (deltas := _since(self._told[job_id], said))
        }
        if news and self._redis.attempt(lambda: self._send(news)):
            for job_id, deltas in news.items():
                told = self._told[job_id]
                for choice, kind, at, text in deltas:
                    told[choice, kind] = told.get((choice, kind), "")[:at] + text

    def _send(self, news: Mapping[str, list[Delta]]) -> None:
        if self._put(news):
            return
        for job_id, deltas in news.items():  # again, which followers do not mind
            if not self._put({job_id: deltas}):
                self._connection.delete(keys.stream(job_id))  # what is there is no good to anybody
                self._put({job_id: deltas})

    def _put(self, news: Mapping[str, list[Delta]]) -> bool:
        """Sends it; says whether each of the keys was a stream."""
        with self._connection.pipeline() as pipe:
            for job_id, deltas in news.items():
                publish(pipe, job_id, deltas)
            return reading.WRONG_TYPE not in reading.ask_all(pipe)

    def _redis_failed(self, error: Exception) -> None:
        logger.warning(
            "Redis did not take the text of %s: %s", counted(len(self._told), "job"), error
        )


def _since(told: _Told, said: Sequence[Partial]) -> list[Delta]:
    """What is new in what was said: the reasoning of a choice before its content.

    An engine that began a choice again says less than before for a while. Where it then says
    something else, all of it is new, from its beginning.
    """
    deltas: list[Delta] = []
    for partial in said:
        texts: tuple[tuple[Kind, str], ...] = (
            ("reasoning", partial.reasoning),
            ("content", partial.content),
        )
        for kind, text in texts:
            before = told.get((partial.choice, kind), "")
            if before.startswith(text):
                continue
            at = len(before) if text.startswith(before) else 0
            deltas.append(Delta(partial.choice, kind, at, text[at:]))
    return deltas
