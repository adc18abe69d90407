"""Puts lines into the queue and takes their endings out, with a bounded number on the way.

`Flight.run` reads lines only as fast as jobs end, so that neither this process nor Redis ever holds
more than a window of them, however long the input is.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from redis.exceptions import RedisError
from rq.job import Job as RQJob
from rq.results import Result

from mlx_rq.jobs.batch.lines import Line, prepare_line
from mlx_rq.jobs.batch.lookup import decoding_among, note_of, result_of, submitted_before
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.client.conversation import with_history
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.answers import Usage, usage_of
from mlx_rq.jobs.openai.errors import QueueFull, RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.enqueue import JOBS_PER_STEP, enqueue
from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.jobs.queue.prepare import Prepared
from mlx_rq.jobs.queue.record import ended_among
from mlx_rq.jobs.queue.results import read_result
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.jobs.queue.trace import note_fetched

DEFAULT_WINDOW = 2000
"""Jobs on the way: enough for a few workers to plan with, little for Redis to hold."""

FORGET_SECONDS = 3600
"""How long Redis keeps a job whose answer is safely written elsewhere."""

_TURN_SECONDS = 1.0
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 2.0

KeyOf = Callable[[Line], str]


class Flight:
    """Lines on their way through the queue.

    `key_of` gives a line its idempotency key: a line that was submitted before under its key is
    found again, not submitted twice. `batch` names in Redis what they are a part of. `note` says
    what everything waits for, if anything; `answers` and `usage` tell what has been generated.
    """

    def __init__(
        self,
        options: JobOptions,
        *,
        redis_url: str | None = None,
        window: int = DEFAULT_WINDOW,
        ordered: bool = True,
        key_of: KeyOf | None = None,
    ) -> None:
        self._options, self._owner = options, options.owner
        self._redis_url = redis_url
        self._connection = connect(redis_url)
        self._window = window
        self._ordered = ordered
        self._key_of = key_of
        self._more = False  # lines to read
        self._number = 0  # of the next line that is read
        self._next = 0  # the number of the line that is given out next, where order matters
        self._unsent: list[tuple[int, Line]] = []
        self._prepared: dict[int, Prepared] = {}  # what is sent of a line, by its number
        self._running: dict[str, tuple[int, Line]] = {}
        self._held: dict[int, Ended] = {}
        self._position: Any = None
        self._look_at = 0.0
        self._send_at = 0.0
        self._full: str | None = None  # why Redis takes no more lines at the moment
        self._stopped: RequestError | None = None
        self._unwanted: list[str] = []  # jobs that are taken out of the queue if no worker has them
        self.batch: str | None = None
        self.note: str | None = None
        self.answers = 0
        self.usage = Usage(0, 0, 0)

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Lines that have ended and wait for those before them."""
        return len(self._held)

    def decoding(self) -> int:
        """Counts those of the jobs that have not ended which decode, as workers last said."""
        with reachable(self._connection):
            return decoding_among(self._connection, self._running.keys())

    def run(self, lines: Iterable[Line]) -> Iterator[list[Ended]]:
        """Yields what has ended since, at least once a second, even where that is nothing.

        A Redis that goes away is waited for. Raises RedisUnavailable where there was none from the
        start.
        """
        with reachable(self._connection):
            newest = reading.ask(self._connection.xrevrange, keys.COMPLETIONS, count=1)
        self._position = reading.position(newest)
        redis = RedisRetry(self._redis_failed, seconds=_RETRY_SECONDS)
        lines, self._more = iter(lines), True
        while self._more or self._unsent or self._running or self._held:
            if not redis.attempt(lambda: self._turn(lines)):
                time.sleep(redis.pause)
            yield self._take_ready()

    def _turn(self, lines: Iterator[Line]) -> None:
        with reachable(self._connection):
            self._fill(lines)
            self._collect()

    def _redis_failed(self, error: Exception) -> None:
        self.note = f"{error} Trying again."

    def forget(self, ended: Sequence[Ended]) -> None:
        """Lets Redis drop answers soon, because they lie safely elsewhere. Errors stay.

        So do answers that were asked to be stored: they are read, and gone on from, by their ids.
        """
        done = [
            item
            for item in ended
            if item.job_id is not None and item.error is None and not item.line.is_stored
        ]
        # Without Redis they go at their own time to live.
        with suppress(RedisError), self._connection.pipeline(transaction=False) as pipe:
            for item in done:
                job_id = str(item.job_id)
                names = [keys.result(job_id), RQJob.key_for(job_id), Result.get_key(job_id)]
                if self._key_of is not None:
                    names.append(keys.idempotency(self._key_of(item.line), self._owner))
                for name in names:
                    pipe.expire(name, FORGET_SECONDS)
            pipe.execute()
        job_ids = [item.job_id for item in ended if item.job_id is not None]
        note_fetched(self._connection, job_ids)

    def cancel(self) -> None:
        """Ends the jobs that are on their way, because nobody will read their answers."""
        with suppress(RedisError):
            cancel_jobs(self._connection, self._running)

    def stop(self, error: RequestError) -> None:
        """Lets what a worker has begun finish; all other lines end with this error.

        So do, with a `key_of`, lines that an earlier flight submitted: what was answered stands.
        The next turn of `run` does it.
        """
        self._stopped = error
        self._unwanted = list(self._running)

    def _fill(self, lines: Iterator[Line]) -> None:
        """Reads and sends lines where a fair part of the window is free."""
        free = self._window - len(self._unsent) - len(self._running) - len(self._held)
        if self._more and (free >= self._window // 8 or not self._running):
            chunk = list(islice(lines, free))
            self._more = len(chunk) == free
            for line in chunk:
                self._take_in(line)
        if self._stopped is not None:
            self._wind_up(self._stopped)
        while self._unsent and time.monotonic() >= self._send_at:
            self._send(self._unsent[:JOBS_PER_STEP])

    def _take_in(self, line: Line) -> None:
        """Makes a line ready, unless nothing is sent any more; ends it where it cannot be sent."""
        number, self._number = self._number, self._number + 1
        if self._stopped is None:
            try:
                self._prepared[number] = prepare_line(line)
            except RequestError as error:
                self._held[number] = Ended(line, {"error": error.error})
                return
        self._unsent.append((number, line.without_body()))

    def _wind_up(self, error: RequestError) -> None:
        """Ends the lines that were never submitted, and takes jobs that wait out of the queue.

        Lines that an earlier flight submitted have jobs, which may have ended, or go on.
        """
        self._prepared.clear()
        while chunk := self._unsent[:JOBS_PER_STEP]:
            job_ids: Sequence[str | None] = [None] * len(chunk)
            if self._key_of is not None:
                line_keys = [self._key_of(line) for _, line in chunk]
                job_ids = submitted_before(self._connection, line_keys, self._owner)
            del self._unsent[: len(chunk)]
            for (number, line), job_id in zip(chunk, job_ids, strict=True):
                if job_id is None:
                    self._held[number] = Ended(line, {"error": error.error})
                else:
                    self._running[job_id] = number, line
                    self._unwanted.append(job_id)
        cancel_jobs(self._connection, self._unwanted, only_waiting=True)
        self._unwanted.clear()  # not before: Redis may go away meanwhile

    def _send(self, chunk: Sequence[tuple[int, Line]]) -> None:
        line_keys = None if self._key_of is None else [self._key_of(line) for _, line in chunk]
        try:
            jobs = [with_history(self._prepared[n], self._redis_url, self._owner) for n, _ in chunk]
            job_ids = enqueue(self._connection, jobs, self._options, line_keys, self.batch)
        except QueueFull as error:
            self._wait_for_room(chunk, error)
            return
        except RequestError as error:
            self._refused(chunk, error)
            return
        self._full = None
        del self._unsent[: len(chunk)]
        for job_id, (number, line) in zip(job_ids, chunk, strict=True):
            self._running[job_id] = number, line
            del self._prepared[number]

    def _wait_for_room(self, chunk: Sequence[tuple[int, Line]], error: QueueFull) -> None:
        """Sends as many as there is room for now, and the others later: none is lost."""
        fitting = int(len(chunk) * error.share)
        if 0 < fitting < len(chunk):
            self._send(chunk[:fitting])
        else:
            self.note = self._full = str(error)
            self._send_at = time.monotonic() + _TURN_SECONDS

    def _refused(self, chunk: Sequence[tuple[int, Line]], error: RequestError) -> None:
        """Ends the line that only Redis shows to be wrong, as one that goes on from a lost answer.

        Where it is one of many, they are sent one by one.
        """
        if len(chunk) > 1:
            for one in chunk:
                self._send([one])
                if self._unsent[:1] == [one]:  # no room: those behind it wait with it
                    return
            return
        ((number, line),) = chunk
        del self._unsent[:1], self._prepared[number]
        self._held[number] = Ended(line, {"error": error.error})

    def _collect(self) -> None:
        """Waits up to a second for jobs to end, unless some have, and takes their results."""
        if not self._running:
            if self._unsent:
                time.sleep(max(0.0, self._send_at - time.monotonic()))
            return
        ready = self._next in self._held if self._ordered else bool(self._held)
        block = None if ready else int(1000 * _TURN_SECONDS)
        streams = reading.ask(
            self._connection.xread, {keys.COMPLETIONS: self._position}, count=1000, block=block
        )
        if streams is reading.WRONG_TYPE:
            time.sleep(reading.PAUSE_SECONDS)
        last, job_ids = reading.entries(streams, "job")
        self._position = last or self._position
        self._take_results(job_ids)
        if time.monotonic() >= self._look_at:
            self._look_again()
            self._look_at = time.monotonic() + _LOOK_SECONDS

    def _take_results(self, job_ids: Iterable[str]) -> None:
        """Ends those of the jobs that are ours, have not ended yet, and have a result."""
        ours = [job_id for job_id in job_ids if job_id in self._running]
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id in ours:
                pipe.get(keys.result(job_id))
            replies = reading.ask_all(pipe)
        for job_id, reply in zip(ours, replies, strict=True):
            if (result := read_result(job_id, reply)) is not None:
                self._end(job_id, result)

    def _look_again(self) -> None:
        """Looks for ends that nobody heard of.

        A job that was found again had ended before, the stream was trimmed, RQ ended a job, or it
        is lost.
        """
        job_ids = list(self._running)
        for start in range(0, len(job_ids), JOBS_PER_STEP):
            self._take_results(job_ids[start : start + JOBS_PER_STEP])
        for job_id in ended_among(self._connection, list(self._running)):
            self._end(job_id, result_of(Job(job_id, self._redis_url)))
        oldest = next(iter(self._running), None)
        self.note = self._full or (oldest and note_of(Job(oldest, self._redis_url)))

    def _end(self, job_id: str, result: Any) -> None:
        number, line = self._running.pop(job_id)
        ended = Ended(line, result, job_id)
        if self._stopped is not None and ended.error and ended.error["type"] == "cancelled":
            ended = replace(ended, result={"error": self._stopped.error})
        self._held[number] = ended
        if ended.error is None:
            self.answers += 1
            self.usage = self.usage.plus(usage_of(result))

    def _take_ready(self) -> list[Ended]:
        if not self._ordered:
            ready = list(self._held.values())
            self._held.clear()
            return ready
        ready = []
        while (ended := self._held.pop(self._next, None)) is not None:
            ready.append(ended)
            self._next += 1
        return ready
