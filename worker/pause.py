"""When a worker takes no jobs, though there are some: the machine is somebody's, too.

What waits in the worker then goes back into its queue at once, what runs after a while.
"""

import logging
import re
import sys
import time as clocks
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, time

from mlx_rq.worker.process.machine_watch import MachineWatch

logger = logging.getLogger("mlx_rq.worker")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A part of the day, by the clock on the wall; where it ends before it starts, of the night."""

    start: time
    end: time

    @classmethod
    def read(cls, text: str) -> "QuietHours":
        """Reads `09:00-18:00`; raises ValueError."""
        times = re.fullmatch(r"(\d\d:\d\d)-(\d\d:\d\d)", text.strip())
        if times is None:
            raise ValueError(f"{text!r} is no part of the day, as 09:00-18:00 or 22:00-06:00")
        # Midnight is the end of a day, or its beginning.
        start, end = (cls._time(part) for part in times.groups())
        start = time.min if start == time.max else start
        if start == end:
            raise ValueError(f"{text!r} starts when it ends: no part of the day is left, or all is")
        return cls(start, end)

    @staticmethod
    def _time(text: str) -> time:
        try:
            return time.max if text == "24:00" else time.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text!r} is no time of the day (00:00 to 24:00)") from None

    def __contains__(self, moment: datetime) -> bool:
        now = moment.time()
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end

    def __str__(self) -> str:
        end = "24:00" if self.end == time.max else f"{self.end:%H:%M}"
        return f"{self.start:%H:%M}-{end}"


def wall_clock() -> datetime:
    """Reads the clock on the wall, also after its owner has gone to another time zone."""
    if sys.platform != "win32":
        clocks.tzset()
    return datetime.now()


class Pause:
    """Whether a worker is to pause now. By itself it never is."""

    def __init__(
        self,
        machine: MachineWatch | None = None,
        quiet_hours: Sequence[QuietHours] = (),
        *,
        now: Callable[[], datetime] = wall_clock,
        clock: Callable[[], float] = clocks.monotonic,
    ) -> None:
        self._machine = machine or MachineWatch()
        self._quiet_hours = quiet_hours
        self._now = now
        self._clock = clock
        self._since = 0.0
        self.reason: str | None = None
        """Why it pauses, in words; None where it does not. As of the last look."""

    def leaving(self, jobs: Iterable[str], in_flight: Collection[str], grace: float) -> list[str]:
        """Names the jobs that are not to stay: those that wait, and after the grace all."""
        if self.reason is None:
            return []
        late = self._clock() - self._since > grace
        return [job_id for job_id in jobs if late or job_id not in in_flight]

    def look(self) -> None:
        """Finds out whether to pause."""
        reason = self._quiet() or self._machine.reason()
        if reason == self.reason:
            return
        if self.reason is None:
            self._since = self._clock()
        self.reason = reason
        logger.info("taking jobs again" if reason is None else f"taking no jobs: {reason}")

    def _quiet(self) -> str | None:
        if not self._quiet_hours:
            return None
        # The wall's clock, each time: it shows what a person means by nine, in summer and winter.
        now = self._now()
        return next((f"quiet hours {hours}" for hours in self._quiet_hours if now in hours), None)
