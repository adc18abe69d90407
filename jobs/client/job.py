"""The producer's end of a job: ask, wait, cancel, read."""

import math
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any, Literal

from redis import Redis
from rq.job import Job as RQJob
from rq.job import JobStatus
from rq.results import Result

from mlx_rq.jobs.openai.answers import finish_reason_of, text_of
from mlx_rq.jobs.openai.errors import (
    JobFailed,
    JobNotFound,
    NotParsed,
    ResultTimeout,
    error_in,
    error_object,
)
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.openai.schema_types import Schema, read_value
from mlx_rq.jobs.openai.surrogates import is_writable
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.finish import forget_job
from mlx_rq.jobs.queue.options import MAX_SECONDS, invalid_option
from mlx_rq.jobs.queue.payload import Payload, read_payload
from mlx_rq.jobs.queue.record import (
    JobRecord,
    ended_among,
    read_outcome,
    read_record,
)
from mlx_rq.jobs.queue.trace import note_fetched
from mlx_rq.jobs.queue.waiting import wait_for_end
from mlx_rq.jobs.queue.workers import workers_for

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]

STATUSES: Mapping[str, Status] = {
    JobStatus.QUEUED.value: "queued",
    JobStatus.STARTED.value: "in_progress",
    JobStatus.FINISHED.value: "completed",
    JobStatus.FAILED.value: "failed",
    JobStatus.STOPPED.value: "cancelled",
    JobStatus.CANCELED.value: "cancelled",
}
"""RQ's words for a job's states, and ours. RQ's other states mean that the job waits."""

UNFINISHED: tuple[Status, ...] = ("queued", "in_progress")
"""The states of a job that goes on."""

_LONGEST_BLOCK = 5.0
"""Seconds of one blocking read: how late an end that the stream did not tell is seen."""


class Job:
    """A job that was accepted. Cheap to make: it holds an id and asks Redis when it is asked."""

    def __init__(
        self,
        job_id: str,
        redis_url: str | None = None,
        *,
        schema: Schema | None = None,
    ) -> None:
        if not isinstance(job_id, str):
            raise TypeError(f"expected the id of a job, a text, but got {job_id!r}")
        if not is_writable(job_id):  # Redis could not even be asked
            raise JobNotFound(job_id)
        self.id = job_id
        self.redis_url = resolve_url(redis_url)
        self._schema = schema

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def _connection(self) -> Redis:
        return connect(self.redis_url)

    def status(self) -> Status:
        """Says where the job is: queued, in_progress, completed, failed or cancelled.

        Raises JobNotFound where there is no such job (any more).
        """
        return STATUSES.get(self._record().status, "queued")

    def _record(self) -> JobRecord:
        with reachable(self._connection):
            record = read_record(self._connection, self.id)
        if record is None:
            raise JobNotFound(self.id)
        return record

    def info(self, served: Collection[str] = ()) -> dict[str, Any]:
        """Tells all that is known of the job: status, model, place in the queue, attempts, times.

        `note` says what it waits for where no live worker serves its model, or all that do pause;
        for models that the caller knows to be `served`, that is not looked up.
        """
        record = self._record()
        status = STATUSES.get(record.status, "queued")
        try:
            model, priority = keys.model_and_priority(record.origin)
        except ValueError:  # another program's job in the same Redis
            raise JobNotFound(self.id) from None
        unknown = status == "queued" and model not in served
        with reachable(self._connection):
            note = self._note(model) if unknown else None
        return {
            "id": self.id,
            "status": status,
            "model": model,
            "priority": priority,
            "created_at": record.created_at,
            "started_at": record.started_at or None,
            "ended_at": record.ended_at or None,
            "worker": record.worker or None,
            "note": note,
        }

    def _note(self, model: str) -> str | None:
        reasons = [worker.get("paused") for worker in workers_for(self._connection, model)]
        if not all(reasons):
            return None
        if reasons:
            return f"no worker takes jobs of the model {model!r} now: {reasons[0]}"
        which = "" if model == ANY_MODEL else f" --model {model}"
        return f"no live worker serves the model {model!r}: start one with `mlx-rq worker{which}`"

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the answer and returns it, the OpenAI-shaped object.

        `timeout` in seconds; None waits as long as it takes, 0 only looks. Raises JobFailed where
        the job failed or was cancelled, ResultTimeout, JobNotFound, RedisUnavailable.
        """
        deadline = _deadline(timeout)
        with reachable(self._connection):
            while (outcome := self.outcome()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._timeout(timeout)
                _await_entry(self._connection, Result.get_key(self.id), b"0-0", left)
        note_fetched(self._connection, [self.id])
        if (error := error_in(outcome)) is not None:
            raise JobFailed(self.id, error)
        return outcome

    def _timeout(self, timeout: float | None) -> ResultTimeout:
        info = self.info()
        note = f" ({info['note']})" if info["note"] else ""
        return ResultTimeout(
            f"job {self.id} has no result within {timeout} s: {info['status']}{note}"
        )

    def outcome(self) -> dict[str, Any] | None:
        """Looks at what the job ended with: the answer, or `{"error": …}`; None until it has.

        It does not count as fetched by that (`mlx-rq trace`). Raises JobNotFound.
        """
        outcome, status = read_outcome(self._connection, self.id)
        if outcome is not None:
            return outcome
        if not status:
            raise JobNotFound(self.id)
        match STATUSES.get(status, "queued"):
            case "queued" | "in_progress":
                return None
            case "completed":
                message = "The result of the job is gone from Redis: it was evicted or deleted."
                return {"error": error_object(message, code="job_lost", type="server_error")}
            case ended:
                # RQ ended the job without us (somebody ran its commands): still one visible end.
                message = f"The job was ended by RQ itself ({ended}) and has no answer."
                return {"error": error_object(message, code="abandoned", type="server_error")}

    def parsed(self, timeout: float | None = None) -> Any:
        """Waits for a structured answer and returns it as what `schema` asked for.

        A type gives a value of it, a JSON schema the plain value. Raises as `result`
        does, and NotParsed, which carries the text, where that does not fit: the budget cut it off,
        or the type asks for more than its JSON schema says.
        """
        response = self.result(timeout)
        text = text_of(response)
        try:
            return read_value(text, self._schema)
        except ValueError as error:  # pydantic's ValidationError is one
            raise NotParsed(self.id, text, finish_reason_of(response), error) from error

    def cancel(self) -> bool:
        """Ends the job without an answer, also where a worker is at it already.

        Returns whether this call ended it: False where it had ended before. Raises JobNotFound.
        """
        with reachable(self._connection):
            cancelled = cancel_jobs(self._connection, [self.id])
        if self.id in cancelled.unknown:
            raise JobNotFound(self.id)
        return self.id in cancelled.ended

    def payload(self) -> Payload:
        """Reads what was submitted: its kind and its body. Raises JobNotFound."""
        with reachable(self._connection):
            data = reading.ask(self._connection.hget, RQJob.key_for(self.id), "data")
        if data is None or data is reading.WRONG_TYPE:
            raise JobNotFound(self.id)
        return read_payload(data)

    def delete(self) -> None:
        """Forgets the job, its body and its result; where it has not ended, it is cancelled first.

        Raises JobNotFound where there is no such job (any more).
        """
        self.cancel()
        with reachable(self._connection):
            forget_job(self._connection, self.id)

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Waits for the answer without blocking the event loop; raises as `result` does."""
        with reachable(self._connection):
            yield from wait_for_end(self.id, self.redis_url).__await__()
        return self.result(timeout=0)


def fetch(
    job_id: str,
    *,
    schema: Schema | None = None,
    redis_url: str | None = None,
) -> Job:
    """Finds a job again by its id. Raises JobNotFound where there is none."""
    job = Job(job_id, redis_url, schema=schema)
    job.status()
    return job


def as_completed(jobs: Iterable[Job], *, timeout: float | None = None) -> Iterator[Job]:
    """Yields jobs as they end, however they end. All must live in one Redis.

    `timeout` in seconds for all together: ResultTimeout is raised where some have not ended then.
    """
    waiting = {job.id: job for job in distinct_jobs(jobs)}
    if not waiting:
        return
    connection = connect(one_url(waiting.values()))
    deadline = _deadline(timeout)
    with reachable(connection):
        newest = reading.ask(connection.xrevrange, keys.COMPLETIONS, count=1)
        position = reading.position(newest)
        ended = ended_among(connection, list(waiting))
        look_at = time.monotonic() + _LONGEST_BLOCK
        while True:
            for job_id in ended:
                if job := waiting.pop(job_id, None):
                    yield job
            if not waiting:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                still = counted(len(waiting), "job has", "jobs have")
                raise ResultTimeout(f"{still} not ended within {timeout} s")
            left = min(left, look_at - time.monotonic())
            streams = _await_entry(connection, keys.COMPLETIONS, position, left)
            last, ended = reading.entries(streams, "job")
            position = last or position
            if time.monotonic() >= look_at:
                # Ends that the stream does not tell: trimmed, RQ's own, or the job is gone.
                ended += ended_among(connection, list(waiting))
                look_at = time.monotonic() + _LONGEST_BLOCK


def _deadline(timeout: float | None) -> float:
    """Gives when a wait is over; raises RequestError where the timeout is no length of time."""
    if timeout is None:
        return math.inf
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or (isinstance(timeout, float) and math.isnan(timeout)):
        raise invalid_option("timeout", timeout, "seconds, or None for no limit")
    return time.monotonic() + min(timeout, MAX_SECONDS)


def distinct_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Gives jobs in their order, each once; raises TypeError where one is no job."""
    distinct = list(dict.fromkeys(jobs))
    for job in distinct:
        if not isinstance(job, Job):
            raise TypeError(f"expected jobs, as `submit` and `fetch` return them, but got {job!r}")
    return distinct


def one_url(jobs: Iterable[Job]) -> str:
    """Gives the URL of the one Redis that jobs live in; raises ValueError where there are more."""
    urls = {job.redis_url for job in jobs}
    if len(urls) > 1:
        raise ValueError(f"the jobs live in {len(urls)} Redis servers; wait for each server's jobs")
    return urls.pop()


def _await_entry(connection: Redis, stream: str, position: bytes, seconds: float) -> Any:
    """Waits for an entry after a position, not longer than `_LONGEST_BLOCK`; gives the reply."""
    seconds = min(seconds, _LONGEST_BLOCK)
    block = max(1, int(1000 * seconds))
    streams = reading.ask(connection.xread, {stream: position}, block=block)
    if streams is reading.WRONG_TYPE:
        time.sleep(min(seconds, reading.PAUSE_SECONDS))
    return streams
