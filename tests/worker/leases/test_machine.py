"""Who is dead: a worker is buried by another process only where it is certain to have ended."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, StartWorker
from redis import Redis

from mlx_rq import submit
from mlx_rq.worker.leases import machine as module
from mlx_rq.worker.leases.machine import has_died, machine, this_process
from mlx_rq.worker.leases.recovery import reap_dead_of_this_machine

ONLY_LINUX_TELLS = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> str:
    return machine(tmp_path_factory.mktemp("data"))


@pytest.fixture
def ended() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended, and whose parent has not asked how."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process
    process.wait()


def said(here: str, **others: Any) -> dict[str, Any]:
    """What this process says of itself, if it is a worker, but for some of it."""
    return {"machine": here, **this_process(), **others}


def test_a_machine_keeps_its_name_and_two_folders_are_two_machines(tmp_path: Path) -> None:
    first = machine(tmp_path / "a")
    assert first
    assert machine(tmp_path / "a") == first != machine(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["machine-id"]


def test_a_folder_that_cannot_be_written_names_no_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine(tmp_path / "file" / "data") == ""
    assert not has_died(said("", pid=2**22 + 1), "")


def test_another_boot_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine(tmp_path)
    monkeypatch.setattr(module, "_boot_id", lambda: "another")
    assert machine(tmp_path) != before


@pytest.mark.parametrize("others", [{}, {"pid": None}, {"pid": "1"}, {"pid": 0}, {"pid": -1}])
def test_what_lives_or_says_nothing_has_not_died(here: str, others: dict[str, Any]) -> None:
    assert not has_died(said(here, **others), here)


def test_a_process_that_has_ended_has_died(here: str, ended: subprocess.Popen[bytes]) -> None:
    assert has_died(said(here, pid=ended.pid), here), "unburied"
    ended.wait()
    assert has_died(said(here, pid=ended.pid), here)
    assert not has_died(said("elsewhere", pid=ended.pid), here)
    assert not has_died(said(here, pid=ended.pid, process_start=None), here)


def test_another_process_that_got_the_number_is_not_the_worker(here: str) -> None:
    assert has_died(said(here, process_start="1"), here)


def test_what_cannot_be_told_is_no_death(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_of", lambda pid: None)
    assert not has_died(said(here), here)


@ONLY_LINUX_TELLS
def test_another_pid_namespace_is_another_machine(tmp_path: Path) -> None:
    here = machine(tmp_path)
    code = "import sys; from pathlib import Path; from mlx_rq.worker.leases.machine import machine"
    print_it = f"{code}; print(machine(Path(sys.argv[1])))"
    unshare = shutil.which("unshare") or "unshare"
    program = [unshare, "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    with suppress(OSError):
        done = subprocess.run(
            [*program, sys.executable, "-P", "-c", print_it, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            there = done.stdout.strip()
            assert there.split("/")[:2] == here.split("/")[:2], "one folder, one kernel"
            assert there != here
            return
    pytest.skip("no PID namespace can be made here")


def test_jobs_of_a_dead_worker_go_back_and_those_of_a_living_one_do_not(
    here: str, start_worker: StartWorker, connection: Redis, ended: subprocess.Popen[bytes]
) -> None:
    worker = start_worker(FakeEngine(hold=True), machine=here)
    job = submit(prompt="answer")
    worker.engine.wait_for_tasks(1)
    worker.claim_no_more()
    reap_dead_of_this_machine(connection, here)
    assert job.status() == "in_progress"

    describe = worker.worker._leases._describe
    worker.worker._leases._describe = lambda: {**describe(), "pid": ended.pid}
    worker.worker._leases.renew()
    reap_dead_of_this_machine(connection, here)

    assert job.status() == "queued"
