"""Keeps the machine awake while there is work: a Mac sleeps in the middle of a run else.

The system's own programs do it, for as long as they run: `caffeinate` on macOS, `systemd-inhibit`
on Linux where it is there. They end by themselves when this process is gone, however that came.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger("mlx_rq.worker")

LINGER_SECONDS = 10.0
"""The machine is kept awake so long after the last job: the next may come at once."""

_ENDS_WITHIN_SECONDS = 1.0
"""So long its end is waited for: the worker does nothing else meanwhile."""


class Child(Protocol):
    """What is asked of a started process."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def awake_command(
    pid: int,
    platform: str = sys.platform,
    which: Callable[[str], str | None] = shutil.which,
) -> list[str] | None:
    """Gives the command that keeps the machine awake until a process ends; None where none can.

    The screen may sleep.
    """
    if platform == "darwin":
        return ["/usr/bin/caffeinate", "-i", "-w", str(pid)]
    inhibit, tail = which("systemd-inhibit"), which("tail")
    if platform == "linux" and inhibit and tail:
        said = ["--what=sleep:idle", "--who=mlx-rq", "--why=Jobs are being generated"]
        return [inhibit, *said, "--mode=block", tail, f"--pid={pid}", "-f", "/dev/null"]
    return None


class _Session(subprocess.Popen[bytes]):
    """A process in a session of its own, which ends with what it has started.

    A Ctrl-C in the terminal must not end it: the jobs aboard are still being finished then.
    """

    def __init__(self, command: Sequence[str]) -> None:
        null = subprocess.DEVNULL
        super().__init__(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd=os.sep
        )

    def terminate(self) -> None:
        self._tell(signal.SIGTERM)

    def kill(self) -> None:
        self._tell(signal.SIGKILL)

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class KeepAwake:
    """Holds the machine awake by a `command`, or not at all where there is none."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        start: Callable[[Sequence[str]], Child] = _Session,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._start = start
        self._clock = clock
        self._child: Child | None = None
        self._worked_at = 0.0

    def turn(self, working: bool) -> None:
        """Called now and then: keeps the machine awake where there is work, else lets go of it."""
        if working:
            self._worked_at = self._clock()
            self._hold()
        elif self._clock() - self._worked_at >= LINGER_SECONDS:
            self.release()

    def release(self) -> None:
        """Lets the machine sleep when it wants to."""
        child, self._child = self._child, None
        if child is None:
            return
        for end in (child.terminate, child.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_ENDS_WITHIN_SECONDS)
                return
        assert self._command is not None
        logger.warning("%s does not end; the machine may stay awake", self._command[0])

    def _hold(self) -> None:
        if self._command is None or (self._child is not None and self._child.poll() is None):
            return
        if self._child is not None:
            self._give_up(f"it ended with code {self._child.wait()}")
            return
        try:
            self._child = self._start(self._command)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        assert self._command is not None
        logger.warning("the machine may sleep while there is work: %s: %s", self._command[0], why)
        self._command = self._child = None
