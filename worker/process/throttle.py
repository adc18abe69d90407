"""How much of the batch is used: less after a crash that looked like memory, then more again."""

import logging
import time
from collections.abc import Callable

from mlx_rq.engine.interface import Engine
from mlx_rq.worker.process.supervisor_pipe import Lifeline

logger = logging.getLogger("mlx_rq.worker")

GROW_SECONDS = 600.0
"""A batch that was halved after a crash is doubled after so long without another."""


class Throttle:
    """Halves an engine's batch as often as the supervisor says, and doubles it now and then."""

    def __init__(
        self, engine: Engine, lifeline: Lifeline, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._lifeline = lifeline
        self._clock = clock
        self._changed_at = clock()
        engine.throttle(0.5**lifeline.shrink)

    def grow(self) -> None:
        """Doubles the batch when its time has come, up to what it was before any crash."""
        if not self._lifeline.shrink or self._clock() - self._changed_at < GROW_SECONDS:
            return
        self._changed_at = self._clock()
        self._lifeline.grown()
        self._engine.throttle(0.5**self._lifeline.shrink)
        logger.info("the batch has %d rows again", self._engine.capacity)
