"""The parent of a worker process: starts it, watches it, and starts it again when it dies.

A worker can die in ways that it cannot catch: the system kills it when memory runs out, a driver
aborts it, a kernel hangs. The supervisor holds no model and does nothing but watch. When the
worker ends it gives back the worker's jobs at once, instead of when the leases run out.
"""

import logging
import math
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from redis import Redis

from mlx_rq.jobs.openai.words import counted, in_a_sentence
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.signals import handling
from mlx_rq.worker.leases.name import NameLease, new_holder
from mlx_rq.worker.leases.recovery import reap, reap_dead_of_this_machine
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.process.supervisor_pipe import (
    FD_VARIABLE,
    GROWN,
    HOLDER_VARIABLE,
    NAME_TAKEN,
    REDIS_AWAY,
    SHRINK_VARIABLE,
)

logger = logging.getLogger("mlx_rq.worker")

_LIKE_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)
"""How a process ends that took too much: the system kills it, or a driver aborts it."""

_MOST_SHRINKS = 4
"""The batch is halved this often at most."""

_MOST_DOUBLINGS = 16
"""Of the pause between starts: far beyond the longest, far below what a float can say."""

_LOOK_SECONDS = 1.0
"""A worker whose end was not heard of is found out after so long."""

_STARTS = 3
"""A worker that is killed this often, and never was ready, is not started again."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How long a supervisor waits, in seconds.

    `stall`: without progress, until the worker is killed. `first_pause`, `longest_pause`: between
    starts, at first and at most. `healthy`: of good work, after which the next crash counts as the
    first.
    """

    stall: float = WorkerOptions().stall
    first_pause: float = 1.0
    longest_pause: float = 60.0
    healthy: float = 300.0


class _Stop:
    """A wish to stop, which signal handlers may make.

    An Event's lock could be held by whom they broke in upon.
    """

    def __init__(self) -> None:
        self._heard, self._said = socket.socketpair()
        self.wanted = False

    def ask(self) -> None:
        """From now on nothing is waited for."""
        if not self.wanted:
            self.wanted = True
            self._said.send(b".")

    def wait(self, seconds: float) -> bool:
        """Waits so long, or less; returns whether it is time to stop."""
        select.select([self._heard], [], [], seconds)
        return self.wanted


@dataclass(slots=True)
class _Life:
    """What is known of one worker process."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    started_at: float
    last_progress: float | None = None  # None until it is ready for jobs
    stalled: bool = False


class Supervisor:
    """Keeps one worker process running. `command` starts it; `name` is the worker's in RQ.

    Others of this `machine` (`worker/leases/machine.py`) that died are reaped at the start.
    """

    def __init__(
        self,
        command: Sequence[str],
        connection: Redis,
        name: str,
        *,
        machine: str = "",
        environment: Mapping[str, str],
        options: SupervisorOptions = SupervisorOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = list(command)
        self._connection = connection
        self._name = name
        self._machine = machine
        self._environment = dict(environment)
        self._options = options
        self._clock = clock
        self._holder = new_holder()
        self._name_lease = NameLease(connection, name, self._holder)
        self._life: _Life | None = None
        self._stop = _Stop()
        self._shrink = 0
        self._was_ready = False  # what worked once is tried again and again
        self._crashes = 0  # since it last worked well

    def run(self) -> int:
        """Runs the worker until it ends in good order or cannot run at all; returns its exit code.

        A worker that dies on the way is started again.
        """
        with handling(self._forward, signal.SIGINT, signal.SIGTERM):
            return self._run()

    def _run(self) -> int:
        self._until_redis_answers(self._reap_others)
        while True:
            life = self._start()
            try:
                code = self._watch(life)
            finally:
                self._end(life)
            self._was_ready = self._was_ready or life.last_progress is not None
            may_work_later = self._was_ready or code == REDIS_AWAY
            if code in (0, NAME_TAKEN) or (code > 0 and not may_work_later):
                return code  # it has said itself why
            was_told = self._stop.wanted
            self._until_redis_answers(self._reap)
            if was_told:
                # A worker that is not ready yet ends by the signal itself.
                return 0 if code == -signal.SIGTERM else 1
            self._learn(life, code)
            if not may_work_later and self._crashes >= _STARTS:
                logger.error("the worker died %d times while it started: giving up", self._crashes)
                return 1
            if self._stop.wait(self._pause()):
                return 0

    def _start(self) -> _Life:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self._command,
                env={
                    **self._environment,
                    FD_VARIABLE: str(theirs.fileno()),
                    SHRINK_VARIABLE: str(self._shrink),
                    HOLDER_VARIABLE: self._holder,
                },
                pass_fds=[theirs.fileno()],
                # Signals of the terminal come to us, and we pass them on, once.
                start_new_session=True,
            )
        self._life = _Life(process, ours, self._clock())
        if self._stop.wanted:  # told to stop before there was anybody to tell
            process.terminate()
        return self._life

    def _watch(self, life: _Life) -> int:
        """Returns the worker's exit code; one that makes no progress is killed."""
        with selectors.DefaultSelector() as selector:
            selector.register(life.line, selectors.EVENT_READ)
            while True:
                if selector.select(min(_LOOK_SECONDS, self._patience(life))):
                    said = life.line.recv(4096)
                    if not said:  # it closed the line by ending
                        return self._exit_code(life)
                    life.last_progress = self._clock()
                    self._shrink = max(0, self._shrink - said.count(GROWN))
                elif life.process.poll() is not None:
                    # It has ended, but a process that it started holds the line.
                    return life.process.returncode
                elif self._patience(life) == 0:
                    logger.error("no progress for %.0f s: killing it", self._options.stall)
                    life.stalled = True
                    life.process.kill()
                    return self._exit_code(life)

    def _patience(self, life: _Life) -> float:
        """Seconds that the worker may still be silent: without end while it loads its model."""
        if life.last_progress is None:
            return math.inf
        return max(0.0, life.last_progress + self._options.stall - self._clock())

    def _exit_code(self, life: _Life) -> int:
        try:
            return life.process.wait(self._options.stall)
        except subprocess.TimeoutExpired:  # it hangs in its own end
            life.process.kill()
            return life.process.wait()

    def _end(self, life: _Life) -> None:
        self._life = None
        life.line.close()
        if life.process.poll() is None:
            life.process.kill()
            life.process.wait()

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        """Tells the worker to stop: the first time in good order, the second at once."""
        self._stop.ask()
        if self._life is not None:
            self._life.process.send_signal(signal.SIGTERM)

    def _reap(self) -> None:
        if self._name_lease.is_anothers():  # then the worker never was what its name says
            return
        returned = reap(self._connection, self._name)
        if returned or not self._stop.wanted:
            jobs = counted(returned, "job of the dead worker is", "jobs of the dead worker are")
            logger.warning("%s queued again", jobs)

    def _reap_others(self) -> None:
        reap_dead_of_this_machine(self._connection, self._machine)

    def _until_redis_answers(self, action: Callable[[], None]) -> None:
        """Does something in Redis, as often as it takes, unless it is time to stop."""
        redis = RedisRetry(self._redis_failed, seconds=self._options.first_pause)
        redis.until_done(action, self._stop.wait)

    @staticmethod
    def _redis_failed(error: Exception) -> None:
        logger.warning("Redis: %s; trying again", in_a_sentence(error))

    def _learn(self, life: _Life, code: int) -> None:
        """Draws conclusions from a crash."""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        logger.error("the worker %s", "made no progress" if life.stalled else how)
        was_ready = life.last_progress is not None
        if was_ready and self._clock() - life.started_at > self._options.healthy:
            self._crashes = 0
        self._crashes += 1
        if code in _LIKE_MEMORY and not life.stalled:
            self._shrink = min(self._shrink + 1, _MOST_SHRINKS)
            times = counted(self._shrink, "time")
            logger.warning("it may have been memory: the batch is halved %s", times)

    def _pause(self) -> float:
        doublings = min(self._crashes - 1, _MOST_DOUBLINGS)
        return min(self._options.first_pause * 2.0**doublings, self._options.longest_pause)
