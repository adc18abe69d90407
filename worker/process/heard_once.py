"""Signals that come twice at once: `timeout` tells a process, and then all of its group."""

import time
from collections.abc import Callable
from types import FrameType

_ECHO_SECONDS = 0.1
"""The same signal within so long is an echo. A person who means more by it is slower."""

Handler = Callable[[int, FrameType | None], None]


def heard_once(handler: Handler, clock: Callable[[], float] = time.monotonic) -> Handler:
    """Makes a handler that takes no notice of a signal's echo."""
    heard_at: dict[int, float] = {}

    def hear(signum: int, frame: FrameType | None) -> None:
        now, before = clock(), heard_at.get(signum, float("-inf"))
        if now - before >= _ECHO_SECONDS:
            heard_at[signum] = now
            handler(signum, frame)

    return hear
