"""How fast a worker is: tokens and jobs a second, now and over the last quarter of an hour."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mlx_rq.engine.interface import Totals

_SAMPLE_SECONDS = 2.0
_NOW_SECONDS = 10.0
_RECENT_SECONDS = 900.0


class _Sample(NamedTuple):
    """What a worker had done at one moment; `worked` are the seconds in which it had jobs."""

    at: float
    worked: float
    prompt_tokens: int
    generated_tokens: int
    jobs: int


class Rates:
    """Keeps samples of what a worker has done, and says what that comes to in a second."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        ended: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._totals, self._ended = totals, ended
        self._clock = clock
        self._looked_at = clock()
        self._worked = 0.0
        self._samples = deque([self._look()], maxlen=int(_RECENT_SECONDS / _SAMPLE_SECONDS) + 1)

    def look(self, *, busy: bool) -> None:
        """Takes a sample where it is time to. `busy`: it had jobs since the last look."""
        now = self._clock()
        if busy:
            self._worked += now - self._looked_at
        self._looked_at = now
        if now - self._samples[-1].at >= _SAMPLE_SECONDS:
            self._samples.append(self._look())

    def said(self) -> dict[str, dict[str, float] | float | None]:
        """Says tokens and jobs a second: `now`, in `recent` minutes, and jobs of one at work."""
        newest, oldest = self._samples[-1], self._samples[0]
        since = newest.at - _NOW_SECONDS
        before = next((one for one in reversed(self._samples) if one.at <= since), oldest)
        worked = newest.worked - oldest.worked
        jobs = newest.jobs - oldest.jobs
        return {
            "now": _between(before, newest),
            "recent": _between(oldest, newest),
            "jobs_at_work": round(jobs / worked, 4) if jobs and worked > 0 else None,
        }

    def _look(self) -> _Sample:
        totals = self._totals()
        tokens = totals.prompt_tokens, totals.decoded_tokens
        return _Sample(self._looked_at, self._worked, *tokens, self._ended())


def _between(before: _Sample, after: _Sample) -> dict[str, float]:
    seconds = after.at - before.at
    return {
        # An engine that begins afresh counts from nothing again.
        name: round(max(0, getattr(after, name) - getattr(before, name)) / seconds, 2)
        if seconds
        else 0.0
        for name in ("prompt_tokens", "generated_tokens", "jobs")
    }
