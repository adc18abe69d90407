"""Whether the machine is in a condition in which a worker is to pause: on battery, hot, in use.

It is read in the background, since programs of the system are asked, and one of them may hang: the
worker goes by the newest reading, and waits for none while it decodes.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection

from mlx_rq.worker.process.readings import Readings, readings

logger = logging.getLogger("mlx_rq.worker")

LOOK_SECONDS = 10.0
"""How often the machine is read."""

STALE_SECONDS = 60.0
"""A reading that is so old counts no more: what reads hangs."""

UNUSED_SECONDS = 300.0
"""A machine that nobody has touched for so long is not in use."""

_FIRST_SECONDS = 15.0
"""So long the first reading is waited for, before a worker takes its first jobs."""

_REASONS: dict[str, str] = {
    "battery": "the machine runs on its battery",
    "thermal": "the machine is too warm",
    "user": "somebody uses the machine",
}
CONDITIONS = tuple(_REASONS)


def unreadable(conditions: Collection[str], platform: str = sys.platform) -> str | None:
    """Names the condition that cannot be told on this system, if there is one."""
    return "user" if "user" in conditions and platform != "darwin" else None


def _in_a_thread(action: Callable[[], None]) -> None:
    threading.Thread(target=action, name="machine", daemon=True).start()


class MachineWatch:
    """Tells whether one of some `conditions` is met. `begin` has each reading done, as it likes."""

    def __init__(
        self,
        conditions: Collection[str] = (),
        machine: Readings | None = None,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], object] = _in_a_thread,
    ) -> None:
        self._conditions = [name for name in _REASONS if name in conditions]
        self._machine = machine or readings()
        self._clock = clock
        self._begin = begin
        self._begun_at: float | None = None
        self._over = threading.Event()
        self._newest: tuple[float, str | None] = (clock(), None)
        self._said: set[str] = set()

    def reason(self) -> str | None:
        """Says in words which condition is met, as of the newest reading; has another one made."""
        if not self._conditions:
            return None
        now = self._clock()
        if self._begun_at is None:
            self._read_again(now)
            self._over.wait(_FIRST_SECONDS)
        elif self._over.is_set() and now - self._begun_at >= LOOK_SECONDS:
            self._read_again(now)
        read_at, reason = self._newest
        if now - read_at < STALE_SECONDS:
            self._said.discard("stale")
            return reason
        asked = ",".join(self._conditions)
        self._say_once("stale", f"--pause-on {asked}: the system does not answer; taking jobs")
        return None

    def _read_again(self, now: float) -> None:
        self._begun_at = now
        self._over.clear()
        self._begin(self._read)

    def _read(self) -> None:
        try:
            met = (_REASONS[name] for name in self._conditions if self._is_met(name))
            self._newest = (self._clock(), next(met, None))
        finally:
            self._over.set()

    def _is_met(self, condition: str) -> bool:
        match condition:
            case "battery":
                met = self._machine.on_battery()
            case "thermal":
                met = self._machine.too_warm()
            case _:
                unused = self._machine.unused_seconds()
                met = None if unused is None else unused < UNUSED_SECONDS
        if met is None:
            self._say_once(condition, f"--pause-on {condition}: the system does not tell that here")
        return met is True

    def _say_once(self, key: str, what: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", what)
