"""When a worker is to stop: told by a signal, and after a grace whatever still runs."""

import logging
import math
import time
from collections.abc import Callable

logger = logging.getLogger("mlx_rq.worker")


class Stop:
    """Whether no more is to be begun, and whether what runs is to be waited for no longer."""

    def __init__(self, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace = grace
        self._clock = clock
        self._at = math.inf
        self.asked = False
        """No more jobs are to be claimed."""

    @property
    def over(self) -> bool:
        """Whether what still runs is to be handed back."""
        return self._clock() > self._at

    def ask(self, jobs: str) -> None:
        """Called by a signal. First: finish `jobs` within the grace. Second: hand back and go."""
        if self.asked:
            self._at = -math.inf
            return
        logger.info("stopping: %s given %.0f s to finish", jobs, self._grace)
        self.asked, self._at = True, self._clock() + self._grace
