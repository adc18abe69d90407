"""How many jobs a worker claims, and when.

The window is what a worker has claimed and plans together. Where it is the only one, the window is
kept full: the more the plan sees, the less is computed twice. Where several share the queues, each
claims only when less than a batch waits in it; and what one has too much of, it gives back as soon
as another is idle. Beside decoding, it is filled in small pieces that take about as long as a step,
since every job is read and rendered at once and the sequences that run have to wait for that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_rq.engine.interface import Engine
from mlx_rq.worker.options import WorkerOptions

_REFILL = 64
"""A window that is kept full is filled up once so many places are free."""
_SHARED = 256
"""Jobs that a worker holds, at most, where others share the queues."""
_LOOK_SECONDS = 1.0
"""Where enough waits here, Redis is asked this often for more jobs, and for idle workers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one claim may take: jobs, and bytes of their bodies (one job more, at most)."""

    jobs: int
    nbytes: int


_IDLE = Piece(jobs=256, nbytes=8 * 2**20)
_IDLE_SHARED = Piece(jobs=64, nbytes=8 * 2**20)
"""Where others share the queues, a worker claims next when it has done nearly all of this: a lone
job that comes in between waits as long."""
_AHEAD = Piece(jobs=64, nbytes=64 * 2**10)
_HUNGRY = 16
"""Jobs that are claimed at once where less than a batch waits, however long that takes."""
_IN_VAIN = 10
"""Beside what runs, claims that bring nothing take at most this part (1/10) of the time: they take
longer, the more models and adapters there are. But a job that comes waits no longer for that than
`_LOOK_SECONDS`."""
_NOTHING = Piece(jobs=0, nbytes=0)


class Window:
    """Decides for one worker, from what its engine has and what its last claim brought."""

    def __init__(
        self,
        engine: Engine,
        options: WorkerOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._options = options
        self._clock = clock
        self._filling = False
        self._ahead = _HUNGRY
        self._asked = self._since = clock()
        self._step_seconds = 0.0
        self._claim_after = self._in_vain_until = 0.0
        self._yield_until = 0.0
        self._share_after = 0.0

    def next_piece(self, held: int, *, alone: bool) -> Piece:
        """Says what to claim now, by a worker that holds so many jobs already."""
        engine, now, window = self._engine, self._clock(), self._options.window
        self._step_seconds, self._asked = now - self._since, now
        self._since = now
        if engine.running and now < self._in_vain_until:
            return _NOTHING
        free = (window if alone else min(window, _SHARED)) - held
        hungry = engine.waiting < engine.capacity
        if hungry or (free >= _REFILL and now >= self._claim_after):
            self._filling = True
        others_first = engine.waiting > 0 and now < self._yield_until
        if free <= 0 or others_first or not (alone or hungry):
            self._filling = False
        if not self._filling or engine.waiting_tokens >= self._options.window_tokens:
            return _NOTHING
        if not engine.running:
            idle = _IDLE if alone else _IDLE_SHARED
            return Piece(min(free, idle.jobs), idle.nbytes)
        jobs = max(_HUNGRY, self._ahead) if hungry else self._ahead
        return Piece(min(free, jobs), _AHEAD.nbytes)

    def claimed(self, jobs: int) -> None:
        """Takes note of how many jobs a claim brought, once they are in the engine.

        Where none, the queue is empty. Where it took longer than a step, the next piece is smaller.
        """
        now = self._clock()
        spent, self._since = now - self._asked, now
        if not jobs:
            self._filling = False
            self._claim_after = now + _LOOK_SECONDS
            self._in_vain_until = now + min(_LOOK_SECONDS, (_IN_VAIN - 1) * spent)
        elif spent > self._step_seconds:
            self._ahead = max(1, self._ahead // 2)
        elif spent < self._step_seconds / 4 and jobs >= self._ahead:
            self._ahead = min(2 * self._ahead, _AHEAD.jobs)

    def to_give_back(self) -> int:
        """Says, once a second, how many sequences an idle worker might as well generate."""
        engine, now = self._engine, self._clock()
        too_many = engine.waiting - max(0, engine.capacity - engine.running)
        if too_many <= 0 or now < self._share_after:
            return 0
        self._share_after = now + _LOOK_SECONDS
        return (too_many + 1) // 2

    def gave_back(self) -> None:
        """Leaves the queues to others for a while, unless nothing waits here."""
        self._yield_until = self._clock() + 2 * _LOOK_SECONDS
