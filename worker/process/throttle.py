"""How much of the batch is used: less after a crash that looked like memory, then more again."""

import logging
import time
from collections.abc import Callable

from mlx_rq.engine.interface import Engine
from mlx_rq.worker.process.supervisor_pipe import SupervisorPipe

logger = logging.getLogger("mlx_rq.worker")

GROW_SECONDS = 600.0
"""A batch that was halved after a crash is doubled after so long without another."""


class Throttle:
    """Halves an engine's batch as often as the supervisor says, and doubles it now and then."""

    def __init__(
        self,
        engine: Engine,
        supervisor_pipe: SupervisorPipe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._supervisor_pipe = supervisor_pipe
        self._clock = clock
        self._changed_at = clock()
        engine.throttle(0.5**supervisor_pipe.shrink)

    def grow(self) -> None:
        """Doubles the batch when its time has come, up to what it was before any crash."""
        if not self._supervisor_pipe.shrink or self._clock() - self._changed_at < GROW_SECONDS:
            return
        self._changed_at = self._clock()
        self._supervisor_pipe.grown()
        self._engine.throttle(0.5**self._supervisor_pipe.shrink)
        logger.info("the batch has room for %d sequences again", self._engine.capacity)
