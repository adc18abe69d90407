"""What is done while MLX holds nearly all the memory that it may, and while there is nothing to do.

One thing a step, the cheapest first: free buffers and prefixes go, those first that nobody waits
for; then steps get smaller; then sequences go back to wait.
"""

import logging
from collections.abc import Callable

from mlx_rq.engine.models.device import Device
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.step_size import StepSize

logger = logging.getLogger("mlx_rq.engine")

_HIGH = 0.95
"""The part of the ceiling from which on there is too little room for what a step allocates."""

_REST_SECONDS = 600.0
"""An engine that had nothing to do for this long keeps no prefixes: the memory is others', too."""


class Pressure:
    """Keeps an engine's memory below its device's ceiling."""

    def __init__(
        self,
        device: Device,
        sequences: SequenceTable,
        step_size: StepSize,
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._sequences = sequences
        self._step_size = step_size
        self._clock = clock
        self._idle_since: float | None = None
        self._rests = False
        self.high = False
        """Whether there was too little room before the last step."""

    def relieve(self) -> None:
        """Before a step: makes some room, where there is too little."""
        self._idle_since, self._rests, self.high = None, False, False
        ceiling = self._device.ceiling
        if ceiling is None:
            return
        held = self._device.memory()
        most = int(_HIGH * ceiling)
        if held.active + held.cache > most and held.cache:
            self._device.clear_cache()
        if held.active <= most:
            return
        self.high = True
        running = self._sequences.running
        if running.evict(held.active - most, self._sequences.scheduler.next_use):
            self._device.clear_cache()
        elif len(running) > self._step_size.rows:
            logger.warning("MLX holds %d bytes of %d: a sequence waits again", held.active, ceiling)
            self._sequences.preempt(running.newest)
        elif not self._step_size.smallest:
            self._step_size.shrink(len(running))
            rows, chunk = self._step_size.rows, self._step_size.chunk
            logger.warning(
                "MLX holds %d bytes of %d: steps of at most %d sequences, %d prompt tokens",
                *(held.active, ceiling, rows, chunk),
            )

    def rest(self) -> None:
        """There is nothing to do: after a while, lets go of what was kept for later."""
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if not self._rests and now - self._idle_since >= _REST_SECONDS:
            self._rests = True
            prefix_cache = self._sequences.running.prefix_cache
            prefix_cache.abandon()  # one may be half done whose sequences were all cancelled
            prefix_cache.evict_all()
            self._device.clear_cache()
