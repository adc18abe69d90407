"""Redis that is away for a while: tried again now and then, while everything else goes on."""

import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from mlx_rq.jobs.openai.errors import RedisUnavailable

RETRY_SECONDS = 1.0
"""Redis is left alone for so long after it failed: an attempt may take its whole timeout."""


class RedisRetry:
    """Whether Redis can be reached, as far as one thread knows.

    `failed` is told each error. Redis is then left alone for some `seconds` (None: RETRY_SECONDS).
    With a `ping`, a Redis that did not answer in time is left alone until it answers to that one,
    in a thread of its own: each attempt of this thread would take as long as the first.
    """

    def __init__(
        self,
        failed: Callable[[Exception], object],
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        ping: Callable[[], object] | None = None,
    ) -> None:
        self._failed = failed
        self._seconds = seconds
        self._clock = clock
        self._ping = ping
        self._hangs = False
        self._away_until: float | None = None

    @property
    def _pause_seconds(self) -> float:
        return RETRY_SECONDS if self._seconds is None else self._seconds

    @property
    def away(self) -> bool:
        """Redis failed a moment ago."""
        return self.pause > 0

    @property
    def pause(self) -> float:
        """Seconds until it is to be tried again, at the earliest."""
        if self._hangs:
            return self._pause_seconds
        return 0.0 if self._away_until is None else max(0.0, self._away_until - self._clock())

    def attempt(self, action: Callable[[], object]) -> bool:
        """Does something in Redis, unless that failed a moment ago; says whether it is done."""
        if self.away:
            return False
        try:
            action()
        except (RedisError, RedisUnavailable) as error:
            self._away_until = self._clock() + self._pause_seconds
            if self._ping is not None and isinstance(error, RedisTimeout):
                self._hangs = True
                threading.Thread(target=self._until_it_answers, name="ping", daemon=True).start()
            self._failed(error)
            return False
        return True

    def _until_it_answers(self) -> None:
        assert self._ping is not None
        while True:
            try:
                self._ping()
            except RedisTimeout:
                continue
            except (RedisError, OSError):
                pass  # it is away in another way, which takes no time to find out
            self._hangs = False
            return

    def until_done(self, action: Callable[[], object], wait: Callable[[float], bool]) -> None:
        """Does something in Redis, as often as it takes, or until `wait` says that it is enough.

        `wait` gets the seconds that it is to wait.
        """
        while not self.attempt(action):
            if wait(self.pause):
                return
