"""The life of a job on this machine, top to bottom: claim → check → generate → commit.

One loop on one thread, because MLX's streams belong to the thread that made them:

1. `_choose_model`: where it has several models, the one is loaded that is most worth it
   (`model_turn.py`).
2. `_take`: as far as the window has room, claim jobs with a lease, read and check each; what cannot
   be run ends at once with an error object.
3. `engine.step()`: a bounded piece of prefill and decode.
4. `_commit`: every task that ended by it gets its result, status and registries in one
   transaction, the moment it is finished. Answers that Redis did not take are kept and sent again.

Leases are renewed by a thread of their own; RQ's pubsub thread brings cancellations.
"""

import logging
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.suspension import is_suspended
from rq.worker import WorkerStatus

from mlx_rq.engine.interface import DeviceExhausted
from mlx_rq.jobs.openai.words import counted, in_a_sentence
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.signals import heeded
from mlx_rq.worker.held import HeldJobs
from mlx_rq.worker.intake import Intake
from mlx_rq.worker.integrity import IntegrityChecks
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.leases.in_flight import InFlightRecord
from mlx_rq.worker.leases.keeper import LeaseKeeper
from mlx_rq.worker.leases.machine import this_process
from mlx_rq.worker.leases.name import NameLease, NameTaken
from mlx_rq.worker.leases.recovery import Count
from mlx_rq.worker.leases.rq_registration import RQRegistration
from mlx_rq.worker.live import LiveReport
from mlx_rq.worker.model_turn import ModelTurn
from mlx_rq.worker.models.changes import ModelChanges
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.observed import backlogs_of, states_elsewhere
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.pause import Pause
from mlx_rq.worker.process.chip import chip
from mlx_rq.worker.process.heard_once import heard_once
from mlx_rq.worker.process.power import KeepAwake
from mlx_rq.worker.process.supervisor_pipe import SupervisorPipe
from mlx_rq.worker.process.throttle import Throttle
from mlx_rq.worker.results.outbox import Outbox
from mlx_rq.worker.results.spool import Spool
from mlx_rq.worker.results.stream import StreamPublisher
from mlx_rq.worker.stats import WindowStats
from mlx_rq.worker.stop import Stop

logger = logging.getLogger("mlx_rq.worker")

IDLE_SECONDS = 1
"""An idle worker looks for jobs this often even where nobody rang (RQ puts jobs back silently)."""


class MLXWorker(RQRegistration):
    """An RQ worker that generates many jobs at once, with one engine, of one model at a time."""

    def __init__(
        self,
        engine: EngineSwitch,
        connection: Redis,
        lease_connection: Redis,
        *,
        options: WorkerOptions = WorkerOptions(),  # noqa: B008 (frozen)
        name: str | None = None,
        supervisor_pipe: SupervisorPipe | None = None,
        pause: Pause | None = None,
        awake: KeepAwake | None = None,
    ) -> None:
        self.engine = engine
        engine.on_progress = self._progress
        self.options = options
        models = engine.models.values()
        self.models = list(dict.fromkeys(name for model in models for name in model.names))
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
        self._changes = ModelChanges(
            engine,
            lambda: backlogs_of(connection, models),
            max_wait=options.max_wait,
            unload_after=options.unload_after,
            beat=self._progress,
            others=lambda: (
                {} if self._leases.alone else states_elsewhere(connection, models, self.name)
            ),
            notes=LoadingNotes(options.loading),
        )
        self._stream = StreamPublisher(engine, connection)
        self._outbox = Outbox(connection, Spool(options.spool), self.lost_data_since)
        self._held = HeldJobs(engine, self.claims, self._outbox, self._stream)
        self._redis_retry = RedisRetry(self._redis_failed, ping=connection.ping)
        self._in_flight = InFlightRecord(connection, self.name, options.lease, self._redis_retry)
        self._integrity = IntegrityChecks(engine, self._outbox, self._in_flight.say)
        self._supervisor_pipe = supervisor_pipe or SupervisorPipe(None)
        self._throttle = Throttle(engine, self._supervisor_pipe)
        self._pause = pause or Pause()
        self._intake = Intake(
            engine,
            self.claims,
            self._held,
            self._changes,
            self._pause,
            options,
            alone=lambda: self._leases.alone,
            suspended=lambda: is_suspended(connection),
        )
        self._awake = awake or KeepAwake()
        self._model_turn = ModelTurn(
            engine,
            self.claims,
            self._held,
            self._intake,
            self._changes,
            self._awake,
            lambda: self._leases.say(),
        )
        self._stop = Stop(options.grace)
        self._said_paused: str | None = None
        self._stats = WindowStats(lambda: engine.totals)
        holder = self._supervisor_pipe.holder
        self._name = NameLease(lease_connection, self.name, holder, seconds=2 * options.lease)
        self._leases = LeaseKeeper(
            lease_connection,
            self,
            lease_seconds=options.lease,
            stall_seconds=options.stall,
            jobs=lambda: list(self._held),
            describe=self.describe,
            recover=self.claims.queues,
            name=self._name,
        )
        self._live = LiveReport(
            engine, connection, self.name, held=self._held, ended=lambda: self._outbox.ended
        )

    def describe(self) -> dict[str, Any]:
        """What this worker says of itself to `mlx-rq status` and to producers."""
        return {
            **self.engine.describe(),
            **self._changes.describe(),
            "serves": self.models,
            "host": self.hostname,
            "machine": self.options.machine,
            "chip": chip(),
            **this_process(),
            "paused": self._paused,
            "ended": self._outbox.ended,
            "discarded": self._outbox.discarded,
        }

    @property
    def _paused(self) -> str | None:
        """Why no jobs are taken now, in words."""
        return self._pause.reason or self._intake.suspended

    def run(self) -> int:
        """Works until it is told to stop (or has done what `burst` and `max_jobs` ask for).

        Returns how many jobs it ended. Raises NameTaken.
        """
        self.sign_on(self._name)
        for number in heeded(signal.SIGINT, signal.SIGTERM):  # to the end of the process
            signal.signal(number, heard_once(self.request_stop))
        self._leases.renew()
        self._in_flight.say(())  # that nothing is: a missing record says less
        self._leases.start()
        logger.info("worker %s serves %s", self.name, ", ".join(self.models))
        crashed = True
        try:
            while not self._done():
                self._progress()  # before the first turn too: from now on a silence is a stall
                self._turn()
            crashed = False
        except (NameTaken, DeviceExhausted):
            crashed = False  # no job is to blame
            raise
        finally:
            self._sign_off("in_flight" if crashed else "no")
        return self._outbox.ended

    def _turn(self) -> None:
        """One pass of the loop. A Redis that is away stops neither decoding nor the loop."""
        # What is finished goes first: else its job, whose lease ran out, may be claimed again.
        sent = self._redis_retry.attempt(self._commit)
        self._redis_retry.attempt(self._heed_pause)
        self._redis_retry.attempt(self._choose_model)
        if sent:
            self._redis_retry.attempt(self._take)
        self._redis_retry.attempt(self._intake.give_to_idle)
        self._awake.turn(bool(self._held))
        self._held.end_interrupted()
        self._held.began(in_flight := self.engine.in_flight)
        self._in_flight.say(in_flight)
        self._held.finish(self.engine.step())
        self._stats.busy()
        self._throttle.grow()
        if not self._redis_retry.away:
            self._stream.publish()
        self._redis_retry.attempt(self._live.turn)
        self._redis_retry.attempt(self._commit)
        if self.options.check:
            self._integrity.turn(self._held.ids)
        if self._redis_retry.away:
            self._outbox.keep()
            if not self.engine.running:
                time.sleep(self._redis_retry.pause)

    def _progress(self) -> None:
        self._leases.progress()
        self._supervisor_pipe.progress()

    def _redis_failed(self, error: Exception) -> None:
        logger.warning("Redis: %s; trying again", in_a_sentence(error))
        self._progress()  # waiting for Redis is no stall

    def _done(self) -> bool:
        if self._name.lost:
            raise NameTaken(self.name)
        if self._stop.asked:
            return not self._held or self._stop.over
        if self._held:
            return False
        limit = self.options.max_jobs
        enough = limit is not None and self._outbox.ended >= limit
        return enough or (self.options.burst and self._intake.empty)

    def _heed_pause(self) -> None:
        """Finds out whether to pause, and gives back what is not to stay here then."""
        self._pause.look()
        if self._said_paused != self._paused:
            self._leases.say()
            self._said_paused = self._paused
        if not self._stop.asked:
            self._intake.heed_pause()

    def _choose_model(self) -> None:
        if not self._stop.asked:
            self._model_turn.look()

    def _take(self) -> None:
        """Claims a piece of the window, or waits where there is nothing to do."""
        if self._stop.asked:
            return
        most = self.options.max_jobs
        if most is not None:
            most -= self._outbox.ended + len(self._held)
        if claimed := self._intake.claim(most):
            self._start(claimed)
            self._intake.began(len(claimed))
        elif not self._held and (self._intake.waits or not self.options.burst):
            self._wait()

    def _wait(self) -> None:
        """Waits for a wake-up; one that comes in a pause is for the others."""
        self._stats.idle()
        self.say_state(WorkerStatus.SUSPENDED if self._paused else WorkerStatus.IDLE)
        if self._intake.open:
            self.claims.say_idle(IDLE_SECONDS, self._changes.able)
        self.claims.wait(IDLE_SECONDS, () if self._pause.reason else self._changes.awaited)

    def _start(self, claimed: Sequence[ClaimedJob]) -> None:
        """Gives claimed jobs to the engine."""
        self._held.take_in(claimed)
        self._held.begin(claimed, self._in_flight.about_to_read)
        # Last, because Redis may fail here, and the claimed jobs are ours by now.
        self.say_state(WorkerStatus.BUSY)

    def request_stop_execution(self, execution_id: str) -> None:
        """Called by RQ's pubsub thread: somebody cancelled a job that is running here.

        RQ names it by its execution, or by its own id.
        """
        self._held.cancel(execution_id)

    def _commit(self) -> None:
        """Writes every finished job, and says so."""
        if self._outbox:
            self._held.commit()
            self._leases.say()

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: claim no more, finish within the grace. Second: hand back and go.

        A model that is being loaded is not waited for.
        """
        self._stop.ask(counted(len(self._held), "job is", "jobs are"))
        self._changes.interrupt()

    def _sign_off(self, count: Count) -> None:
        """Saves what is finished, hands back the rest, and leaves RQ's lists of workers."""
        try:
            self._commit()
        except Exception as error:
            answers = counted(len(self._outbox), "answer")
            logger.error("%s could not be saved: %s", answers, error)
        self._stats.idle()
        self._awake.release()
        self._leases.stop()  # whatever happens: else it would keep the jobs from everybody
        try:
            if self._held:
                returned = self.claims.hand_back(self._held, count=count)
                logger.info("handed back %s", counted(returned, "job"))
            if not self._name.lost:  # else the records are another's
                self._leases.forget()
                self._live.forget()
            self.sign_off(self._name)
        except RedisError as error:
            held = counted(len(self._held), "job runs out", "jobs run out")
            logger.error("Redis is away: leases of %s (%s)", held, error)
        logger.info("worker %s ended %s", self.name, counted(self._outbox.ended, "job"))
