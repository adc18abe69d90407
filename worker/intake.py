"""What a worker claims, and what it gives back before it has begun.

Claimed are jobs of the loaded model, as many as the window says. Where adapters are loaded with it,
each claim begins with another one's jobs. Given back is what another worker might as well do, and
what does not stay in a pause.
"""

import logging
from collections.abc import Callable

from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.held import HeldJobs
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.models.changes import ModelChanges
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.pause import Pause
from mlx_rq.worker.window import Window

logger = logging.getLogger("mlx_rq.worker")

_SUSPENDED = "RQ's workers are suspended (`rq resume` ends that)"


class Intake:
    """Moves jobs from the queues to those that are held, and back. Its methods raise RedisError.

    `suspended` tells whether RQ's workers are to rest, `alone` whether no other shares the queues.
    """

    def __init__(
        self,
        engine: EngineSwitch,
        claims: Claims,
        held: HeldJobs,
        changes: ModelChanges,
        pause: Pause,
        options: WorkerOptions,
        *,
        alone: Callable[[], bool],
        suspended: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._held = held
        self._changes = changes
        self._pause = pause
        self._options = options
        self._is_alone = alone
        self._is_suspended = suspended
        self._window = Window(engine, options)
        self._turn = 0
        self.empty = False
        """The last look into the queues found nothing, and nothing is held."""
        self.suspended: str | None = None
        """That all of RQ's workers are to rest, in words. As of the last look."""

    def claim(self, most: int | None) -> list[ClaimedJob]:
        """Claims a piece of the window, or up to `most` jobs."""
        if self._changes.due or any(job.suspect for job in self._held):
            return []  # a suspect is generated alone
        piece = self._window.next_piece(len(self._held), alone=self._alone)
        limit = piece.jobs if most is None else min(piece.jobs, most)
        claimed = []
        if (names := self._names) and limit > 0 and self.open:
            claimed = self._claims.take(
                limit,
                nbytes=piece.nbytes,
                enough=self._engine.capacity,
                alone=self._alone,
                idle=not self._held,
                models=names,
            )
            self._turn += 1
            if not claimed:
                self._window.claimed(0)
            self._changes.claimed(len(claimed))
        paused = self._pause.reason is not None
        self.empty = not (claimed or self._held or paused or self._changes.more)
        return claimed

    @property
    def _names(self) -> list[str]:
        """Names of the models whose jobs may be begun, first those of the one whose turn it is."""
        present = self._engine.present
        first = self._turn % max(1, len(present))
        return [name for model in present[first:] + present[:first] for name in model.names]

    def began(self, jobs: int) -> None:
        """So many claimed jobs are in the engine now; how long that took, counts for the next."""
        self._window.claimed(jobs)

    @property
    def open(self) -> bool:
        """Whether jobs may be claimed now."""
        if self._pause.reason is not None:
            return False
        self.suspended = _SUSPENDED if self._is_suspended() else None
        return self.suspended is None

    @property
    def _alone(self) -> bool:
        return self._is_alone() or self._options.burst

    @property
    def waits(self) -> bool:
        """Whether there are jobs that may not be begun yet."""
        return self._pause.reason is not None or self._changes.later

    def heed_pause(self) -> None:
        """Gives back the jobs that are not to stay here in a pause."""
        if self._pause.reason is None:
            return  # what is in flight takes a plan to tell, and this is asked before each step
        held, in_flight = self._held.ids, self._engine.in_flight
        self._held.give_back(self._pause.leaving(held, in_flight, self._options.grace))

    def give_to_idle(self) -> None:
        """Gives part of what has not begun here back, where other workers have nothing to do."""
        count = self._window.to_give_back()
        idle = self._claims.idle_models() if count else ()
        if not idle:
            return
        queues = {queue.name for queue in self._claims.queues_of(idle)}
        spare = reversed(list(self._engine.spare(count)))
        if returned := self._held.give_back(spare, queues=queues):
            jobs = counted(returned, "job")
            logger.info("gave %s back for a worker that has nothing to do", jobs)
            self._window.gave_back()
