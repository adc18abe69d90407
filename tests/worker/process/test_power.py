"""The machine is kept awake while there is work, by the system's own programs."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import PATIENCE, eventually

from mlx_rq.worker.process.power import LINGER_SECONDS, Child, KeepAwake, _Session, awake_command


class FakeChild:
    """A process that is there until it is told to end, or ends with a `code` by itself."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = -15

    def kill(self) -> None:
        self.code = -9

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None, "it was not told to end"
        return self.code


class Machine:
    """Notes what was started on it, and lets a test set the time."""

    def __init__(self) -> None:
        self.started: list[FakeChild] = []
        self.now = 100.0
        self.awake = KeepAwake(["awake", "7"], self.start, lambda: self.now)

    def start(self, command: Sequence[str]) -> Child:
        assert command == ["awake", "7"]
        self.started.append(FakeChild())
        return self.started[-1]

    @property
    def is_awake(self) -> bool:
        return any(child.code is None for child in self.started)


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended (nobody may have asked for its end yet)."""
    asked = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(asked.stdout.strip()) and not asked.stdout.startswith("Z")


def test_on_macos_it_is_caffeinate_that_ends_with_the_worker() -> None:
    assert awake_command(4711, "darwin") == ["/usr/bin/caffeinate", "-i", "-w", "4711"]


def test_on_linux_it_is_systemds_where_that_is_there() -> None:
    assert awake_command(4711, "linux", lambda name: f"/usr/bin/{name}") == [
        "/usr/bin/systemd-inhibit",
        "--what=sleep:idle",
        "--who=mlx-rq",
        "--why=Jobs are being generated",
        "--mode=block",
        "/usr/bin/tail",
        "--pid=4711",
        "-f",
        "/dev/null",
    ]
    assert awake_command(4711, "linux", lambda name: None) is None
    assert awake_command(4711, "freebsd14", lambda name: f"/usr/bin/{name}") is None


def test_it_is_held_once_while_there_is_work_and_let_go_a_while_after() -> None:
    machine = Machine()
    machine.awake.turn(False)
    assert machine.started == []

    machine.awake.turn(True)
    machine.now += 3600
    machine.awake.turn(True)
    machine.now += LINGER_SECONDS - 1
    machine.awake.turn(False)
    assert (len(machine.started), machine.is_awake) == (1, True)

    machine.now += 1
    machine.awake.turn(False)
    assert machine.started[0].code == -15
    machine.awake.turn(True)
    assert (len(machine.started), machine.is_awake) == (2, True)
    machine.awake.release()
    assert not machine.is_awake


def test_a_program_that_ends_by_itself_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As systemd-inhibit does over SSH, where it is not permitted to."""
    machine = Machine()
    machine.awake.turn(True)
    machine.started[0].code = 1
    for _ in range(3):
        machine.awake.turn(True)
    machine.awake.release()
    assert len(machine.started) == 1
    (said,) = caplog.messages
    assert said == "the machine may sleep while there is work: awake: it ended with code 1"


def test_a_program_that_is_not_there_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    awake = KeepAwake(["/no/such/caffeinate"])
    awake.turn(True)
    awake.turn(True)
    assert len(caplog.messages) == 1
    assert "No such file or directory: '/no/such/caffeinate'" in caplog.text


class Hanging(FakeChild):
    """A process that does not end, whatever it is told; `kills` counts how often that was."""

    kills = 0

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            pytest.fail("it is waited for without an end")
        raise subprocess.TimeoutExpired("awake", timeout)


def test_a_program_that_does_not_end_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    child = Hanging()
    awake = KeepAwake(["awake"], lambda command: child)
    awake.turn(True)
    awake.release()
    assert child.kills == 1
    assert caplog.messages == ["awake does not end; the machine may stay awake"]


def test_a_program_that_takes_no_notice_of_being_told_to_end_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    child = _Session(["sh", "-c", f"trap '' TERM; sleep 60 & echo $! > {started}; wait; wait"])
    grandchild = int(started.read_text())
    awake = KeepAwake(["sh"], lambda command: child)
    awake.turn(True)
    awake.release()
    assert child.poll() == -signal.SIGKILL
    eventually(lambda: not runs(grandchild), "the end of what it had started")


def test_without_a_command_nothing_is_done() -> None:
    awake = KeepAwake()
    awake.turn(True)
    awake.turn(False)
    awake.release()


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is that of GNU")
def test_what_holds_it_ends_when_the_worker_is_killed() -> None:
    """With the real programs, but for the one that needs a system bus."""
    worker = subprocess.Popen(["sleep", "60"])
    command = awake_command(worker.pid, "linux", lambda name: f"/usr/bin/{name}")
    assert command is not None
    child = _Session(command[5:])
    assert os.getsid(child.pid) == child.pid, "a Ctrl-C does not reach it"
    worker.kill()
    worker.wait()
    assert child.wait(PATIENCE) == 0


def test_what_holds_it_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """As systemd-inhibit has the program that it runs."""
    started = tmp_path / "started"
    os.mkfifo(started)
    child = _Session(["sh", "-c", f"sleep 60 & echo $! > {started}; wait"])
    grandchild = int(started.read_text())
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    eventually(lambda: not runs(grandchild), "the end of what it had started")
