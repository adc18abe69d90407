"""`mlx-rq up` and `demo` as real processes: how they end, and that they leave nothing running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from fakes import eventually, free_port
from models import small_folder
from redis import Redis

from mlx_rq.api_stub.file_store import lock_folder
from mlx_rq.files import lock
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.discovery import embedded_url

pytestmark = pytest.mark.slow

LOADING = 60.0
"""Seconds within which a command has loaded its model, or has ended, on a busy machine."""


def processes(words: str) -> Iterator[tuple[int, int]]:
    """Finds processes by what is in their command lines; gives each one's id and its parent's."""
    command = ["ps", "-ww", "-A", "-o", "pid=,ppid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        pid, parent, arguments = line.split(maxsplit=2)
        if words in arguments:
            yield int(pid), int(parent)


class Command:
    """One of our commands in a terminal of its own, and all that it says."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._said = folder / "said"
        with self._said.open("wb") as out:
            lock(out)  # until all who write to it have ended
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mlx_rq.worker", *arguments],
                env={**os.environ, "MLX_RQ_DATA_DIR": str(folder), "PYTHONUNBUFFERED": "1"},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def until(self, words: str) -> None:
        """Waits until it has said something."""
        deadline = time.monotonic() + LOADING
        while words not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def child(self, words: str, parent: int | None = None) -> int:
        """Waits until a child runs whose command line has some words; gives its process id."""
        found: list[int] = []

        def look() -> bool:
            assert self.process.poll() is None, self.said
            above = parent or self.process.pid
            found[:] = [pid for pid, its_parent in processes(words) if its_parent == above]
            return bool(found)

        eventually(look, words)
        return found[0]

    def until_supervised(self) -> None:
        """Waits until its worker has a parent that has begun to watch it."""
        self.child("--unsupervised", self.child(" worker "))

    def wait(self) -> int:
        return self.process.wait(LOADING)

    def all_gone(self) -> bool:
        """Tells whether the command and all whom it started have ended."""
        with self._said.open("rb") as said:
            return lock(said) and embedded_url(self.folder) is None

    def close(self) -> None:
        """Leaves no process behind: with the last of the others, Valkey ends, too."""
        if not self.all_gone():
            self.process.kill()
            for pid, _ in processes(str(small_folder())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


StartCommand = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartCommand]:
    """Starts a command with the tests' model and a data folder of its own."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    model = ["--model", str(small_folder()), "--batch", "2", "--grace", "0"]
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Command:
            return stack.enter_context(closing(Command(tmp_path, name, *model, *arguments)))

        yield start


@pytest.fixture
def start_up(start: StartCommand) -> StartCommand:
    """Starts `up` on free ports."""

    def start_up(http_port: int | None = None) -> Command:
        ports = ["--queue-port", str(free_port()), "--port", str(http_port or free_port())]
        return start("up", *ports)

    return start_up


def alone(up: Command, number: int) -> None:
    """What `kill` does."""
    os.kill(up.process.pid, number)


def together(up: Command, number: int) -> None:
    """What a terminal does that is closed: the system says it, and then the shell."""
    os.killpg(up.process.pid, number)
    os.killpg(up.process.pid, number)


def ended_well(up: Command) -> None:
    assert up.wait() == 0, up.said
    assert up.all_gone()
    assert embedded_url(up.folder) is None
    assert "Traceback" not in up.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_it_alone_ends_all(start_up: StartCommand, number: int) -> None:
    up = start_up()
    up.until_supervised()
    alone(up, number)
    ended_well(up)


def test_a_terminal_that_is_closed_ends_all_in_good_order(start_up: StartCommand) -> None:
    up = start_up()
    up.until("serves")
    together(up, signal.SIGHUP)
    ended_well(up)
    assert "ended 0 jobs" in up.said, "the worker signed off"
    assert "Redis" not in up.said, "Valkey was there until it had"


def test_a_signal_while_it_starts_ends_all_too(start_up: StartCommand) -> None:
    up = start_up()
    up.until("server:")
    alone(up, signal.SIGTERM)
    assert up.wait() in (0, 1)
    assert up.all_gone()
    assert embedded_url(up.folder) is None
    assert "Traceback" not in up.said


def test_what_nohup_started_goes_on_when_the_terminal_is_closed(
    start: StartCommand, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        up = start("up", "--queue-port", str(free_port()), "--no-http")
    finally:
        signal.signal(signal.SIGHUP, before)
    up.until_supervised()
    together(up, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        up.process.wait(0.5)
    alone(up, signal.SIGTERM)
    ended_well(up)


def test_a_port_of_the_server_that_is_taken_is_said_at_once(
    start_up: StartCommand, redis_url: str
) -> None:
    taken = int(redis_url.rpartition(":")[2].partition("/")[0])
    up = start_up(taken)
    assert up.wait() == 1
    assert f"Error: --port {taken} is taken" in up.said
    assert "server:" not in up.said
    assert up.all_gone()


def test_a_server_that_cannot_open_ends_all_with_an_error(
    start_up: StartCommand, tmp_path: Path
) -> None:
    with lock_folder(tmp_path / "http"):
        up = start_up()
        assert up.wait() == 1
    assert "Error: Another server uses" in up.said
    assert "Error: the HTTP server ended with code 1" in up.said
    assert up.all_gone()


def test_a_server_that_dies_ends_all_with_an_error(start_up: StartCommand) -> None:
    up = start_up()
    up.until_supervised()
    os.kill(up.child(" serve "), signal.SIGKILL)
    assert up.wait() == 1
    assert "Error: the HTTP server ended with code -9" in up.said
    assert up.all_gone()
    assert embedded_url(up.folder) is None


def test_a_valkey_that_dies_ends_all_with_an_error(start_up: StartCommand) -> None:
    up = start_up()
    up.until_supervised()
    with Redis.from_url(embedded_url(up.folder) or "") as connection:
        os.kill(connection.info("server")["process_id"], signal.SIGKILL)
    assert up.wait() == 1
    assert "Error: the embedded Valkey ended" in up.said
    assert "Traceback" not in up.said
    assert up.all_gone()


def test_one_that_is_killed_takes_all_its_parts_along(start_up: StartCommand) -> None:
    up = start_up()
    up.until_supervised()
    alone(up, signal.SIGKILL)
    up.wait()
    eventually(up.all_gone, "the end of all")
    assert embedded_url(up.folder) is None
    assert "Redis" not in up.said, "Valkey was there until the others had gone"
    assert "Traceback" not in up.said


def test_a_demo_that_is_killed_leaves_nothing_behind(start: StartCommand) -> None:
    demo = start("demo")
    demo.until("jobs submitted to")
    alone(demo, signal.SIGTERM)
    assert demo.wait() == 1
    eventually(demo.all_gone, "the end of all")
    assert "Traceback" not in demo.said
