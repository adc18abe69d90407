"""Redis that is away for a while: tried again now and then, while everything else goes on."""

import time
from collections.abc import Callable

from redis.exceptions import RedisError

from mlx_rq.jobs.openai.errors import RedisUnavailable

RETRY_SECONDS = 1.0
"""Redis is left alone for so long after it failed: an attempt may take its whole timeout."""


def in_a_sentence(error: Exception) -> str:
    """Gives what an error says as a part of a sentence: some of Redis' end with a full stop."""
    return str(error).rstrip(".")


class RedisRetry:
    """Whether Redis can be reached, as far as one thread knows.

    `failed` is told each error. Redis is then left alone for some `seconds` (None: RETRY_SECONDS).
    """

    def __init__(
        self,
        failed: Callable[[Exception], object],
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failed = failed
        self._seconds = seconds
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

    def attempt(self, action: Callable[[], object]) -> bool:
        """Does something in Redis, unless that failed a moment ago; says whether it is done."""
        if self.away:
            return False
        try:
            action()
        except (RedisError, RedisUnavailable) as error:
            pause = RETRY_SECONDS if self._seconds is None else self._seconds
            self._away_until = self._clock() + pause
            self._failed(error)
            return False
        return True

    def until_done(self, action: Callable[[], object], wait: Callable[[float], bool]) -> None:
        """Does something in Redis, as often as it takes, or until `wait` says that it is enough.

        `wait` gets the seconds that it is to wait.
        """
        while not self.attempt(action):
            if wait(self.pause):
                return
