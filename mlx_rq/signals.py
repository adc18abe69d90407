"""Signals, as far as whoever started this process lets it hear them.

Imports nothing of ours: every room may use it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Picks the signals that may be handled: those that are not ignored.

    `nohup` has a program ignore SIGHUP, a script's shell has what it starts with `&` ignore SIGINT:
    Ctrl-C is for what is in front. Programs leave that as it is. None where this is not the main
    thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handling(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Has a handler called in the block for those of the signals that are heeded."""
    before = {number: signal.signal(number, handler) for number in heeded(*numbers)}
    try:
        yield
    finally:
        for number, others in before.items():
            signal.signal(number, others)
