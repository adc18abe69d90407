"""The supervisor: when it kills, when it starts again, when it gives up."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import all_answered, attempts_lost
from fakes import PATIENCE, FakeEngine, eventually, ignored, until_idle, worker_in_thread
from harness import Program, StartProgram
from redis import Redis
from rq.command import send_shutdown_command

from mlx_rq import submit, submit_many
from mlx_rq.worker import worker as worker_module
from mlx_rq.worker.process import supervisor_pipe
from mlx_rq.worker.process.supervisor import Supervisor, SupervisorOptions, _Life
from mlx_rq.worker.process.supervisor_pipe import PROGRESS, REDIS_AWAY, SupervisorPipe
from mlx_rq.worker.process.throttle import GROW_SECONDS, Throttle


def test_a_worker_that_hangs_is_killed_and_started_again(
    start: StartProgram, connection: Redis, redis_url: str
) -> None:
    job = submit(prompt="hang", max_attempts=1)
    program = start()
    program.until("hangs")
    program.until("log no progress")
    program.until("ready", 2)
    # it was no fault of memory
    assert not program.said("log it may have been memory")
    eventually(lambda: job.status() == "failed")


@pytest.mark.parametrize("role", ["supervise", "work"])
def test_one_in_the_background_of_a_script_is_stopped_by_rq_and_not_by_ctrl_c(
    start: StartProgram, connection: Redis, redis_url: str, role: str
) -> None:
    with ignored(signal.SIGINT):  # as a shell does there
        program = start(role)
    program.until("ready")
    program.process.send_signal(signal.SIGINT)
    for _ in range(3):
        all_answered(submit_many([{"prompt": "answer"}]))
    send_shutdown_command(connection, "child")
    assert program.wait() == 0


def test_a_worker_that_hangs_at_its_very_first_job_is_killed_too(
    start: StartProgram, redis_url: str
) -> None:
    submit(prompt="hang")
    program = start()
    # the second worker finds the job at the head of the queue before it has done anything else
    program.until("log no progress", 3)


def test_a_worker_that_is_idle_says_that_it_does_not_hang(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.01)  # until it gives up on a wake-up
    monkeypatch.setattr(supervisor_pipe, "_BEATS_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs, worker_in_thread(redis_url) as worker:
        until_idle(connection)
        worker.worker._supervisor_pipe = SupervisorPipe(theirs)
        ours.settimeout(PATIENCE)
        assert [ours.recv(1) for _ in range(3)] == [PROGRESS] * 3


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves no process behind, whatever comes of the test."""
    try:
        yield
    finally:
        process.kill()


def test_a_worker_is_killed_when_it_was_silent_for_too_long_and_not_before(
    connection: Redis,
) -> None:
    now = 1000.0
    watched = supervisor(connection, stall=60.0, clock=lambda: now)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    life = _Life(process, ours, now)
    watching = threading.Thread(target=watched._watch, args=(life,), daemon=True)
    with ours, theirs, process, ending(process):
        watching.start()
        for _ in range(5):
            now += 59.9
            theirs.send(PROGRESS)
            eventually(lambda heard=now: life.last_progress == heard, "hearing of it")  # type: ignore[misc]
        assert (process.poll(), life.stalled) == (None, False)

        now += 60.0
        watching.join(PATIENCE)

        assert (process.poll(), life.stalled) == (-signal.SIGKILL, True)


def test_the_batch_is_halved_after_a_crash_like_memory_and_grows_again(
    start: StartProgram, redis_url: str
) -> None:
    program = start(capacity=8, grow=0.2)
    for times, number in enumerate((signal.SIGKILL, signal.SIGABRT), start=1):
        program.until("ready", times)
        submit_many([{"prompt": "answer"}])
        os.kill(program.worker, number)
        program.until("started", times + 1)
        program.until("rows 4", times)
        program.until("rows 8", times + 1)  # which the supervisor was told
    rows = [found.string.partition(" ")[2] for found in program.said("rows")]
    assert rows == ["rows 8", "rows 4", "rows 8", "rows 4", "rows 8"]


def test_a_batch_grows_when_its_time_has_come_and_not_before() -> None:
    now = 0.0
    engine, supervisor_pipe = FakeEngine(capacity=16), SupervisorPipe(None, shrink=2)
    throttle = Throttle(engine, supervisor_pipe, clock=lambda: now)
    seen = []
    for now in (  # noqa: B007 (the clock)
        0.0,
        GROW_SECONDS - 1,
        GROW_SECONDS,
        2 * GROW_SECONDS - 1,
        2 * GROW_SECONDS,
        1e9,
    ):
        throttle.grow()
        seen.append(engine.capacity)
    assert seen == [4, 4, 8, 8, 16, 16]


def supervisor(
    connection: Redis, clock: Callable[[], float] = time.monotonic, **options: float
) -> Supervisor:
    return Supervisor(
        ["false"],
        connection,
        "x",
        machine="",
        environment={},
        options=SupervisorOptions(**options),
        clock=clock,
    )


def test_pauses_double_up_to_the_longest_and_never_overflow(connection: Redis) -> None:
    watched = supervisor(connection, first_pause=1.0, longest_pause=60.0)
    pauses = []
    for crashes in (1, 2, 3, 6, 7, 8, 5000):
        watched._crashes = crashes
        pauses.append(watched._pause())
    assert pauses == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0, 60.0]


def test_it_gives_up_when_the_worker_is_killed_thrice_before_it_is_ready(
    start: StartProgram,
) -> None:
    program = start("echo $$ started; kill -9 $$")
    assert program.wait() == 1
    program.silence()
    assert len(program.said("started")) == 3
    assert len(program.said("log the worker died 3 times while it started: giving up")) == 1


def test_a_worker_that_says_itself_why_it_cannot_run_is_not_started_again(
    start: StartProgram,
) -> None:
    program = start("echo $$ started; exit 7")  # a model that is not there, a name that is taken
    assert program.wait() == 7
    program.silence()
    assert len(program.said("started")) == 1


def test_a_worker_that_finds_no_redis_is_started_again_until_it_does(
    start: StartProgram, tmp_path: Path
) -> None:
    # given one that finds it the fifth time
    times = tmp_path / "times"
    tried = f"echo >> {times}; [ $(wc -l < {times}) -ge 5 ] && exit 0; exit {REDIS_AWAY}"
    program = start(f"echo $$ started; {tried}", supervisor={"first_pause": 0.01})
    assert program.wait() == 0
    program.silence()
    assert len(program.said("started")) == 5


def test_the_end_of_a_worker_is_found_out_while_a_process_that_it_started_lives(
    start: StartProgram,
) -> None:
    program = start("echo $$ started; sleep 30 >/dev/null 2>&1 & exit 7")
    assert program.wait() == 7


def test_a_name_that_is_taken_ends_it_and_the_holder_works_on(
    start: StartProgram, redis_url: str, connection: Redis
) -> None:
    with worker_in_thread(redis_url, FakeEngine(), name="child"):
        until_idle(connection)
        program = start()
        assert program.wait() == 1
        assert len(program.said("started")) == 1
        all_answered(submit_many([{"prompt": "answer"}]))


def test_a_worker_that_worked_once_is_started_again_and_again(
    start: StartProgram, connection: Redis
) -> None:
    program = start()
    for times in range(1, 5):
        program.until("ready", times)
        program.kill_worker()
    program.until("ready", 5)
    program.terminate()
    assert program.wait() == 0


@pytest.mark.parametrize("moment", ["while it starts", "in a pause"])
def test_a_stop_that_finds_no_worker_at_work_ends_it_well(start: StartProgram, moment: str) -> None:
    pause = {"first_pause": 60.0, "longest_pause": 60.0}
    if moment == "while it starts":
        program: Program = start("echo $$ started; exec sleep 60", supervisor=pause)
        program.until("started")
    else:
        program = start(supervisor=pause)
        program.until("ready")
        program.kill_worker()
        program.until("log 0 jobs of the dead worker")
    program.terminate()
    assert program.wait() == 0


def test_what_is_finished_when_it_is_told_to_stop_is_answered(
    start: StartProgram, connection: Redis
) -> None:
    jobs = submit_many([{"prompt": "slow 30"}] * 3)
    program = start(pace=0.01)
    program.until("began", 3)
    program.terminate()
    assert program.wait() == 0
    all_answered(jobs)
    assert attempts_lost(connection, jobs) == [0] * 3
