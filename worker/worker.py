"""The life of a job on this machine, top to bottom: claim → check → generate → commit.

One loop on one thread, because MLX's streams belong to the thread that made them:

1. `_take`: while the engine has room for more, claim jobs with a lease, read and check each; what
   cannot be run ends at once with an error object.
2. `engine.step()`: a bounded piece of prefill and decode.
3. `_commit`: every task that ended by it gets its result, status and registries in one
   transaction, the moment it is finished. Answers that Redis did not take are kept and sent again.

Leases are renewed by a thread of their own (`leases.py`); RQ's pubsub thread brings cancellations.
"""

import logging
import queue as thread_queue
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.suspension import is_suspended
from rq.worker import BaseWorker, WorkerStatus

from mlx_rq.engine.protocol import Engine, Outcome, Task
from mlx_rq.jobs import keys
from mlx_rq.jobs.errors import ErrorObject, RequestError, error_object
from mlx_rq.jobs.payload import SERIALIZER, read_payload
from mlx_rq.jobs.validation import validate
from mlx_rq.worker.claim import ClaimedJob, Claims
from mlx_rq.worker.commit import Finished, commit
from mlx_rq.worker.leases import LeaseKeeper
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.report import WindowReport

logger = logging.getLogger("mlx_rq.worker")

IDLE_SECONDS = 1.0
"""An idle worker looks for jobs this often even where nobody rang (RQ puts jobs back silently)."""

RETRY_SECONDS = 1.0
"""Pause after Redis failed, while nothing is there to generate."""


class NameTaken(ValueError):
    """A live worker has this name already."""


class MLXWorker(BaseWorker):
    """An RQ worker that generates many jobs at once with one engine."""

    def __init__(
        self,
        engine: Engine,
        connection: Redis,
        lease_connection: Redis,
        *,
        served_names: Iterable[str] = (),
        options: WorkerOptions = WorkerOptions(),  # noqa: B008 (frozen)
        name: str | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.models = list(dict.fromkeys([engine.model_id, *served_names, keys.ANY_MODEL]))
        super().__init__(
            [], name=name, connection=connection, serializer=SERIALIZER, worker_ttl=options.lease
        )
        self.claims = Claims(
            connection,
            self.name,
            self.models,
            lease_seconds=options.lease,
            max_wait=options.max_wait,
        )
        self.queues = self._ordered_queues = self.claims.queues
        self._jobs: dict[str, ClaimedJob] = {}
        self._deadlines: dict[str, float] = {}
        self._unsaved: list[Finished] = []
        self._cancelled: thread_queue.SimpleQueue[str] = thread_queue.SimpleQueue()
        self._stop_at: float | None = None
        self._ended_jobs = 0
        self._discarded = 0
        self._lock = threading.Lock()
        self._report = WindowReport(lambda: engine.totals)
        self._leases = LeaseKeeper(
            lease_connection,
            self,
            lease_seconds=options.lease,
            stall_seconds=options.stall,
            jobs=self._held,
            describe=self.describe,
            recover=self.claims.queues,
        )

    def _held(self) -> list[ClaimedJob]:
        with self._lock:
            return list(self._jobs.values())

    def describe(self) -> dict[str, Any]:
        """What this worker says of itself to `mlx-rq status` and to producers."""
        return {
            "model": self.engine.model_id,
            "serves": self.models,
            "fingerprint": self.engine.fingerprint,
            "host": self.hostname,
            "pid": self.pid,
            "capacity": self.engine.capacity,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "ended": self._ended_jobs,
            "discarded": self._discarded,
            "totals": asdict(self.engine.totals),
        }

    def run(self) -> int:
        """Works until it is told to stop (or has done what `burst` and `max_jobs` ask for).

        Returns how many jobs it ended.
        """
        try:
            self.register_birth()  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise NameTaken(f"{error}: choose another --name") from None
        self.subscribe()  # type: ignore[no-untyped-call]
        self.set_state(WorkerStatus.STARTED)
        if threading.current_thread() is threading.main_thread():
            self._install_signal_handlers()
        self._leases.renew()
        self._leases.start()
        logger.info("worker %s serves %s", self.name, ", ".join(self.models))
        try:
            while not self._done():
                self._turn()
                self._leases.progress()
        finally:
            self._sign_off()
        return self._ended_jobs

    def _turn(self) -> None:
        """One pass of the loop. A Redis that is away stops neither decoding nor the loop."""
        try:
            self._take()
        except RedisError as error:
            self._redis_failed(error)
        self._forget_cancelled()
        outcomes = self.engine.step()
        self._unsaved += [
            (self._jobs[outcome.id], outcome) for outcome in outcomes if outcome.id in self._jobs
        ]
        self._check_deadlines()
        self._report.busy()
        try:
            self._commit()
        except RedisError as error:
            self._redis_failed(error)

    def _redis_failed(self, error: RedisError) -> None:
        logger.warning("Redis: %s; %d answers wait for it", error, len(self._unsaved))
        if not self.engine.running:
            time.sleep(RETRY_SECONDS)

    def _done(self) -> bool:
        if self._stop_at is not None:
            return not self._jobs or time.monotonic() > self._stop_at
        if self._jobs:
            return False
        limit = self.options.max_jobs
        if limit is not None and self._ended_jobs >= limit:
            return True
        return self.options.burst and self._idle

    _idle = False
    """The last look into the queues found them empty."""

    def _take(self) -> None:
        """Claims jobs while the engine has less waiting than a full batch; waits when idle."""
        if self._stop_at is not None or self.engine.waiting >= self.engine.capacity:
            return
        limit = self.options.window - len(self._jobs)
        if self.options.max_jobs is not None:
            limit = min(limit, self.options.max_jobs - self._ended_jobs - len(self._jobs))
        may_claim = limit > 0 and not is_suspended(self.connection)
        claimed = []
        if may_claim:
            enough = self.engine.capacity
            alone = self._leases.alone or self.options.burst
            claimed = self.claims.take(limit, enough=enough, alone=alone)
        self._idle = not claimed
        if claimed:
            self._start(claimed)
        elif not self._jobs and not self.options.burst:
            self._report.idle()
            if self.get_state() != WorkerStatus.IDLE:
                self.set_state(WorkerStatus.IDLE)
            self.claims.wait(IDLE_SECONDS)

    def _start(self, claimed: Sequence[ClaimedJob]) -> None:
        """Checks claimed jobs and gives the good ones to the engine; the others end at once."""
        again = [job.id for job in claimed if job.id in self._jobs]
        for job_id in again:
            # Its lease ran out and the queue gave it to us once more: begin afresh.
            self.engine.cancel(job_id)
        with self._lock:
            self._jobs.update((job.id, job) for job in claimed)
        tasks, outcomes = [], []
        for job in claimed:
            if job.timeout is not None:
                self._deadlines[job.id] = time.monotonic() + job.timeout
            try:
                tasks.append(self._task(job))
            except RequestError as error:
                outcomes.append(Outcome(job.id, {"error": error.error}))
        outcomes += self.engine.add(tasks)
        self._unsaved += [(self._jobs[outcome.id], outcome) for outcome in outcomes]
        # Last, because Redis may fail here, and the claimed jobs are ours by now.
        if self.get_state() != WorkerStatus.BUSY:
            self.set_state(WorkerStatus.BUSY)

    def _task(self, job: ClaimedJob) -> Task:
        if job.attempt > job.max_attempts:
            raise RequestError(
                f"The job was given up after {job.max_attempts} attempts: each time its worker "
                "died. Submit it again, perhaps with fewer tokens.",
                code="max_attempts_exceeded",
                type="server_error",
            )
        payload = read_payload(job.data)
        return Task(job.id, validate(payload.kind, payload.body), rank=job.rank)

    def request_stop_execution(self, execution_id: str) -> None:
        """Called by RQ's pubsub thread: somebody cancelled a job that is running here."""
        for job in self._held():
            if job.lease.execution_id == execution_id:
                self._cancelled.put(job.id)

    def _forget_cancelled(self) -> None:
        while not self._cancelled.empty():
            job_id = self._cancelled.get()
            if job := self._jobs.get(job_id):
                # Usually the producer has ended it already; RQ's own stop command has not.
                error = error_object("The job was cancelled.", code="cancelled", type="cancelled")
                self._give_up(job, error)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for job_id in [job_id for job_id, end in self._deadlines.items() if end < now]:
            del self._deadlines[job_id]
            job = self._jobs[job_id]
            if any(unsaved.id == job_id for unsaved, _ in self._unsaved):
                continue
            error = error_object(
                f"The job did not finish within its timeout of {job.timeout} seconds.",
                code="request_timeout",
                param="timeout",
                type="server_error",
            )
            self._give_up(job, error)

    def _give_up(self, job: ClaimedJob, error: ErrorObject) -> None:
        """Takes a job out of the engine; it ends with an error."""
        self.engine.cancel(job.id)
        self._unsaved.append((job, Outcome(job.id, {"error": error})))

    def _commit(self) -> None:
        """Writes every finished job; those whose lease was lost are discarded and counted."""
        if not self._unsaved:
            return
        finished, self._unsaved = self._unsaved, []
        try:
            self._unsaved, ended = commit(self.connection, finished)
        except RedisError:
            self._unsaved = finished
            raise
        self._ended_jobs += ended
        self._discarded += len(finished) - len(self._unsaved) - ended
        kept = {id(job) for job, _ in self._unsaved}
        for job, _ in finished:
            # Neither one that has to be sent again, nor one that was claimed again since.
            if id(job) not in kept and self._jobs.get(job.id) is job:
                self._deadlines.pop(job.id, None)
                with self._lock:
                    del self._jobs[job.id]
        self._leases.say()

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: claim no more, finish within the grace. Second: hand back and go."""
        if self._stop_at is None:
            logger.info(
                "stopping: %d jobs are given %.0f s to finish", len(self._jobs), self.options.grace
            )
            self._stop_at = time.monotonic() + self.options.grace
        else:
            self._stop_at = 0.0

    def unsubscribe(self) -> None:
        """Ends the thread that listens for commands.

        It is told before it gets its last message; RQ tells it afterwards, and often waits a second
        in vain.
        """
        if self.pubsub_thread is not None:
            self.pubsub_thread.stop()
        super().unsubscribe()  # type: ignore[no-untyped-call]

    def _install_signal_handlers(self) -> None:
        signal.signal(signal.SIGINT, self.request_stop)
        signal.signal(signal.SIGTERM, self.request_stop)

    def _sign_off(self) -> None:
        """Saves what is finished, hands back the rest, and leaves RQ's lists of workers."""
        try:
            self._commit()
        except Exception as error:
            logger.error("%d answers could not be saved: %s", len(self._unsaved), error)
        self._report.idle()
        self._leases.stop()  # whatever happens: else it would keep the jobs from everybody
        try:
            if self._jobs:
                returned = self.claims.hand_back(self._jobs.values())
                logger.info("handed back %d jobs", returned)
            self.teardown()  # type: ignore[no-untyped-call]
        except RedisError as error:
            logger.error("Redis is away: leases of %d jobs run out (%s)", len(self._jobs), error)
        logger.info("worker %s ended %d jobs", self.name, self._ended_jobs)
