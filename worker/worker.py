"""The life of a job on this machine, top to bottom: claim → check → generate → commit.

One loop on one thread, because MLX's streams belong to the thread that made them:

1. `_take`: as far as the window has room, claim jobs with a lease, read and check each; what cannot
   be run ends at once with an error object.
2. `engine.step()`: a bounded piece of prefill and decode.
3. `_commit`: every task that ended by it gets its result, status and registries in one
   transaction, the moment it is finished. Answers that Redis did not take are kept and sent again.

Leases are renewed by a thread of their own; RQ's pubsub thread brings cancellations.
"""

import logging
import signal
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.suspension import is_suspended
from rq.worker import WorkerStatus

from mlx_rq.engine.interface import Engine, Outcome
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.worker.integrity import IntegrityChecks
from mlx_rq.worker.leases.cancellation import Cancellations
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.leases.keeper import LeaseKeeper
from mlx_rq.worker.leases.machine import this_process
from mlx_rq.worker.leases.name import NameLease, NameTaken
from mlx_rq.worker.leases.recovery import Count
from mlx_rq.worker.leases.rq_registration import RQRegistration
from mlx_rq.worker.live import LiveReport
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.pause import Pause
from mlx_rq.worker.process.chip import chip
from mlx_rq.worker.process.power import KeepAwake
from mlx_rq.worker.process.supervisor_pipe import SupervisorPipe
from mlx_rq.worker.process.throttle import Throttle
from mlx_rq.worker.results.outbox import Outbox
from mlx_rq.worker.results.spool import Spool
from mlx_rq.worker.results.stream import StreamPublisher
from mlx_rq.worker.stats import WindowStats
from mlx_rq.worker.tasks import no_answer, task_of
from mlx_rq.worker.window import Window

logger = logging.getLogger("mlx_rq.worker")

IDLE_SECONDS = 1
"""An idle worker looks for jobs this often even where nobody rang (RQ puts jobs back silently)."""


class MLXWorker(RQRegistration):
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
        supervisor_pipe: SupervisorPipe | None = None,
        pause: Pause | None = None,
        awake: KeepAwake | None = None,
    ) -> None:
        self.engine = engine
        engine.on_progress = self._progress
        self.options = options
        self.models = list(dict.fromkeys([engine.model_id, *served_names, ANY_MODEL]))
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
        self._window = Window(engine, options)
        self._jobs: dict[str, ClaimedJob] = {}
        self._in_flight: set[str] = set()
        self._stream = StreamPublisher(engine, connection)
        self._cancellations = Cancellations()
        self._outbox = Outbox(connection, Spool(options.spool), self.lost_data_since)
        self._integrity = IntegrityChecks(engine, self._outbox, self._say_in_flight)
        self._supervisor_pipe = supervisor_pipe or SupervisorPipe(None)
        self._redis_retry = RedisRetry(self._redis_failed)
        self._throttle = Throttle(engine, self._supervisor_pipe)
        self._pause = pause or Pause()
        self._awake = awake or KeepAwake()
        self._stop_at: float | None = None
        self._lock = threading.Lock()
        self._stats = WindowStats(lambda: engine.totals)
        holder = self._supervisor_pipe.holder
        self._name = NameLease(lease_connection, self.name, holder, seconds=2 * options.lease)
        self._leases = LeaseKeeper(
            lease_connection,
            self,
            lease_seconds=options.lease,
            stall_seconds=options.stall,
            jobs=self._held,
            describe=self.describe,
            recover=self.claims.queues,
            name=self._name,
        )
        self._live = LiveReport(engine, connection, self.name, ended=lambda: self._outbox.ended)

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
            "machine": self.options.machine,
            "chip": chip(),
            **this_process(),
            "prefix_sharing": self.engine.prefix_sharing,
            "capacity": self.engine.capacity,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "paused": self._pause.reason,
            "ended": self._outbox.ended,
            "discarded": self._outbox.discarded,
            "memory": dict(self.engine.memory()),
            "totals": asdict(self.engine.totals),
        }

    def run(self) -> int:
        """Works until it is told to stop (or has done what `burst` and `max_jobs` ask for).

        Returns how many jobs it ended. Raises NameTaken.
        """
        self.sign_on(self._name)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.request_stop)
        self._leases.renew()
        self._leases.say_in_flight(())  # that nothing is: a missing record says less
        self._leases.start()
        logger.info("worker %s serves %s", self.name, ", ".join(self.models))
        crashed = True
        try:
            while not self._done():
                self._progress()  # before the first turn too: from now on a silence is a stall
                self._turn()
            crashed = False
        except NameTaken:
            crashed = False
            raise
        finally:
            self._sign_off("in_flight" if crashed else "no")
        return self._outbox.ended

    def _turn(self) -> None:
        """One pass of the loop. A Redis that is away stops neither decoding nor the loop."""
        # What is finished goes first: else its job, whose lease ran out, may be claimed again.
        self._redis_retry.attempt(self._commit)
        self._redis_retry.attempt(self._heed_pause)
        self._redis_retry.attempt(self._take)
        self._redis_retry.attempt(self._give_to_idle)
        self._awake.turn(bool(self._jobs))
        self._end_interrupted()
        self._cancellations.began(in_flight := self.engine.in_flight)
        self._say_in_flight(in_flight)
        self._finish(self.engine.step())
        self._stats.busy()
        self._throttle.grow()
        if not self._redis_retry.away:
            self._stream.publish()
        self._redis_retry.attempt(self._live.turn)
        self._redis_retry.attempt(self._commit)
        if self.options.check:
            self._integrity.turn(self._jobs.keys())
        if self._redis_retry.away and not self.engine.running:
            time.sleep(self._redis_retry.pause)

    def _progress(self) -> None:
        self._leases.progress()
        self._supervisor_pipe.progress()

    def _redis_failed(self, error: Exception) -> None:
        logger.warning("Redis: %s; trying again", error)
        self._progress()  # waiting for Redis is no stall

    def _finish(self, outcomes: Iterable[Outcome]) -> None:
        """Takes the engine's outcomes; a job that it has forgotten without one ends too."""
        self._outbox.put(
            (self._jobs[outcome.id], outcome) for outcome in outcomes if outcome.id in self._jobs
        )
        if self.engine.running or self.engine.waiting or not self._jobs:
            return
        for job in self._held():
            if job.id not in self._outbox:
                logger.error("job %s: the engine has forgotten it", job.id)
                self._outbox.put([(job, no_answer(job.id))])

    def _done(self) -> bool:
        if self._name.lost:
            raise NameTaken(self.name)
        if self._stop_at is not None:
            return not self._jobs or time.monotonic() > self._stop_at
        if self._jobs:
            return False
        limit = self.options.max_jobs
        enough = limit is not None and self._outbox.ended >= limit
        return enough or (self.options.burst and self._idle)

    _idle = False
    """The last look into the queues found them empty."""

    def _take(self) -> None:
        """Claims a piece of the window, or waits where there is nothing to do."""
        if self._stop_at is not None:
            return
        if any(job.suspect for job in self._jobs.values()):
            return  # it is generated alone
        piece = self._window.next_piece(len(self._jobs), alone=self._alone)
        limit = piece.jobs
        if self.options.max_jobs is not None:
            limit = min(limit, self.options.max_jobs - self._outbox.ended - len(self._jobs))
        paused = self._pause.reason is not None
        suspended = limit <= 0 or paused or is_suspended(self.connection)
        claimed = []
        if not suspended:
            enough, idle = self.engine.capacity, not self._jobs
            claimed = self.claims.take(
                limit, nbytes=piece.nbytes, enough=enough, alone=self._alone, idle=idle
            )
            if not claimed:
                self._window.claimed(0)
        self._idle = not claimed and not self._jobs and not paused
        if claimed:
            self._start(claimed)
            self._window.claimed(len(claimed))
        elif not self._jobs and (paused or not self.options.burst):
            self._stats.idle()
            self.say_state(WorkerStatus.SUSPENDED if paused else WorkerStatus.IDLE)
            if lost := self.claims.newly_lost():
                logger.error("%d jobs were gone from Redis when their turn came", lost)
            if not suspended:
                self.claims.say_idle(IDLE_SECONDS)
            # A wake-up that comes in a pause is for the others.
            (time.sleep if paused else self.claims.wait)(IDLE_SECONDS)

    def _heed_pause(self) -> None:
        """Gives back the jobs that are not to stay here in a pause."""
        if self._pause.look():
            self._leases.say()
        leaving = self._pause.leaving(self._jobs, self.engine.in_flight, self.options.grace)
        jobs = [self._jobs[job_id] for job_id in leaving if job_id not in self._outbox]
        if jobs and self._stop_at is None:
            self._give_back(jobs)

    @property
    def _alone(self) -> bool:
        return self._leases.alone or self.options.burst

    def _give_to_idle(self) -> None:
        """Gives part of what has not begun here back, where other workers have nothing to do."""
        count = self._window.to_give_back()
        idle = self.claims.idle_models() if count else ()
        if not idle:
            return
        queues = {queue.name for queue in self.claims.queues_of(idle)}
        spare = [self._jobs[job_id] for job_id in self.engine.spare(count) if job_id in self._jobs]
        jobs = [job for job in reversed(spare) if job.queue_name in queues and not job.suspect]
        if not jobs:
            return
        returned = self._give_back(jobs)
        logger.info("gave %d jobs back for a worker that has nothing to do", returned)
        self._window.gave_back()

    def _give_back(self, jobs: Sequence[ClaimedJob]) -> int:
        """Leaves jobs that have not ended to other workers; returns how many were still ours."""
        returned = self.claims.hand_back(jobs, to_others=True)
        for job in jobs:  # only now: if Redis failed, they are still ours
            self.engine.cancel(job.id)
            self._forget(job)
        return returned

    def _start(self, claimed: Sequence[ClaimedJob]) -> None:
        """Checks claimed jobs and gives the good ones to the engine; the others end at once."""
        for job in claimed:
            if job.id in self._jobs:  # its lease ran out and we got it once more: begin afresh
                self.engine.cancel(job.id)
        with self._lock:
            self._jobs.update((job.id, job) for job in claimed)
        # Before they are read: a job may kill the worker by that too.
        self._say_in_flight(self._in_flight.union(job.id for job in claimed))
        tasks, outcomes = [], []
        for job in claimed:
            self._cancellations.watch(job)
            if job.stream:
                self._stream.watch(job.id)
            try:
                tasks.append(task_of(job))
            except RequestError as error:
                outcomes.append(Outcome(job.id, {"error": error.error}))
        self._finish(outcomes + self.engine.add(tasks))
        # Last, because Redis may fail here, and the claimed jobs are ours by now.
        self.say_state(WorkerStatus.BUSY)

    def request_stop_execution(self, execution_id: str) -> None:
        """Called by RQ's pubsub thread: somebody cancelled a job that is running here."""
        for job in self._held():
            if job.lease.execution_id == execution_id:
                self._cancellations.cancel(job.id)

    def _end_interrupted(self) -> None:
        """Takes jobs that were cancelled, or are out of time, out of the engine."""
        for job, error in self._cancellations.due():
            if job.id not in self._outbox:  # else it is finished already
                self.engine.cancel(job.id)
                self._outbox.put([(job, Outcome(job.id, {"error": error}))])

    def _say_in_flight(self, job_ids: Collection[str]) -> None:
        """Says before each piece of work whose attempt it is, should the worker die of it."""

        def say() -> None:
            self._leases.say_in_flight(job_ids)
            self._in_flight = set(job_ids)  # else it is said again when Redis is back

        if self._in_flight != set(job_ids):
            self._redis_retry.attempt(say)

    def _commit(self) -> None:
        """Writes every finished job; those whose lease was lost are discarded and counted."""
        if not self._outbox:
            return
        for job in self._outbox.send():
            if self._jobs.get(job.id) is job:  # not one that was claimed again since
                self._forget(job)
        self._leases.say()

    def _forget(self, job: ClaimedJob) -> None:
        self._cancellations.forget(job.id)
        self._stream.forget(job.id)
        with self._lock:
            del self._jobs[job.id]

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: claim no more, finish within the grace. Second: hand back and go."""
        if self._stop_at is None:
            jobs, grace = len(self._jobs), self.options.grace
            logger.info("stopping: %d jobs are given %.0f s to finish", jobs, grace)
            self._stop_at = time.monotonic() + grace
        else:
            self._stop_at = 0.0

    def _sign_off(self, count: Count) -> None:
        """Saves what is finished, hands back the rest, and leaves RQ's lists of workers."""
        try:
            self._commit()
        except Exception as error:
            logger.error("%d answers could not be saved: %s", len(self._outbox), error)
        self._stats.idle()
        self._awake.release()
        self._leases.stop()  # whatever happens: else it would keep the jobs from everybody
        try:
            if self._jobs:
                returned = self.claims.hand_back(self._jobs.values(), count=count)
                logger.info("handed back %d jobs", returned)
            if not self._name.lost:  # else the records are another's
                self._leases.forget()
                self._live.forget()
            self.sign_off(self._name)
        except RedisError as error:
            logger.error("Redis is away: leases of %d jobs run out (%s)", len(self._jobs), error)
        logger.info("worker %s ended %d jobs", self.name, self._outbox.ended)
