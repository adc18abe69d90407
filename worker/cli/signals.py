"""Signals that end a command which has started processes of its own: it must leave none behind."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlx_rq.signals import handling
from mlx_rq.worker.process.heard_once import heard_once

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


class ToldToStop(KeyboardInterrupt):
    """A signal that does as Ctrl-C does, but no person at the terminal."""


def hear_interrupts() -> None:
    """Makes a KeyboardInterrupt of Ctrl-C, which ended the command while it was imported."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers
    if callable(signal.getsignal(signal.SIGINT)):  # else it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP (a terminal that was closed) interrupt the block as Ctrl-C does."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            # The shell and the system may both say it; only a person means more by a second one.
            signal.signal(signum, signal.SIG_IGN)
        raise ToldToStop

    with handling(heard_once(stop), signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Makes signals wait until the block has ended: a child is started and known, or not started.

    An exception that a signal raises comes from the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers break in upon the main thread only
        return
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    # Others are left: what is ignored, a child ignores too.
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for signum in came:
            signal.raise_signal(signum)
