"""The line between a worker and the supervisor that started it.

The worker says on it that it makes progress; each of them learns by its end that the other died.
"""

import os
import signal
import socket
import threading
import time
from contextlib import suppress

FD_VARIABLE = "MLX_RQ_SUPERVISOR_PIPE"
"""Names the file descriptor of the worker's end."""

SHRINK_VARIABLE = "MLX_RQ_SHRINK"
"""How many times the batch is to be halved at the start, after crashes that looked like memory."""

HOLDER_VARIABLE = "MLX_RQ_NAME_HOLDER"
"""As who the worker holds its name: the same after each start."""

NAME_TAKEN = 73
"""The exit code of a worker whose name another one has (EX_CANTCREAT): it is not tried again."""

REDIS_AWAY = 75
"""The exit code of a worker that found no Redis (EX_TEMPFAIL of sysexits.h): worth another try."""

PROGRESS = b"."
GROWN = b"+"
"""The batch was doubled again."""

_BEATS_SECONDS = 0.5


class SupervisorPipe:
    """The worker's end. Says nothing where there is no supervisor."""

    def __init__(
        self, line: socket.socket | None, shrink: int = 0, holder: str | None = None
    ) -> None:
        self._line = line
        self.holder = holder
        self._last = 0.0
        self.shrink = shrink

    @classmethod
    def from_environment(cls) -> "SupervisorPipe":
        """Takes the line that the supervisor left in the environment, so that no child gets it."""
        number = os.environ.pop(FD_VARIABLE, None)
        shrink = int(os.environ.pop(SHRINK_VARIABLE, "0"))
        holder = os.environ.pop(HOLDER_VARIABLE, None)
        return cls(None if number is None else socket.socket(fileno=int(number)), shrink, holder)

    def stop_with_supervisor(self) -> None:
        """From now on this process gets a SIGTERM when its supervisor dies: nobody watches it."""
        if self._line is not None:
            threading.Thread(target=self._watch, name="supervisor-pipe", daemon=True).start()

    def _watch(self) -> None:
        assert self._line is not None
        with suppress(OSError):
            self._line.recv(1)  # nothing is ever sent: this returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    def progress(self) -> None:
        """Called by the generation thread whenever it has done a piece of work."""
        now = time.monotonic()
        if now - self._last >= _BEATS_SECONDS:
            self._last = now
            self._say(PROGRESS)

    def grown(self) -> None:
        """The batch has room for twice as many sequences."""
        self.shrink -= 1
        self._say(GROWN)

    def _say(self, what: bytes) -> None:
        if self._line is None:
            return
        # A supervisor that was paused reads nothing: the worker must not wait for it. One that is
        # dead is found out by `_watch`.
        with suppress(OSError):
            self._line.send(what, socket.MSG_DONTWAIT)
