"""Redis that is away for a while: tried again now and then, while everything else goes on."""

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

logger = logging.getLogger("mlx_rq.worker")

RETRY_SECONDS = 1.0
"""Redis is left alone for so long after it failed: an attempt may take its whole timeout."""


class RedisRetry:
    """Whether Redis can be reached, as far as the generation thread knows.

    `still_alive` is called when an attempt has failed: waiting for Redis is no stall.
    """

    def __init__(
        self, still_alive: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._still_alive = still_alive
        self._clock = clock
        self._away_until: float | None = None

    @property
    def away(self) -> bool:
        """Redis failed a moment ago."""
        return self.pause > 0

    @property
    def pause(self) -> float:
        """Seconds until it is to be tried again."""
        return 0.0 if self._away_until is None else max(0.0, self._away_until - self._clock())

    def attempt(self, action: Callable[[], None]) -> None:
        """Does something in Redis, unless that failed a moment ago. A failure is logged."""
        if self.away:
            return
        try:
            action()
        except RedisError as error:
            logger.warning("Redis: %s; trying again", error)
            self._away_until = self._clock() + RETRY_SECONDS
            self._still_alive()
