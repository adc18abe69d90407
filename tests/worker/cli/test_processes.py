"""Real worker processes: what signals do to them, and what is left when one is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import PATIENCE, StartWorker, eventually
from redis import Redis
from rq.command import send_shutdown_command

from mlx_rq import Job, as_completed, submit, submit_many
from mlx_rq.worker.cli.processes import child_process
from mlx_rq.worker.cli.signals import INTERRUPTED, ToldToStop, stopped_by_signals
from mlx_rq.worker.process.heard_once import heard_once

HI = [{"role": "user", "content": "Say hi."}]

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from fakes import FakeEngine
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.worker import MLXWorker

class Engine(FakeEngine):
    def add(self, tasks):
        refused = super().add(tasks)
        for task in tasks:
            if task.request.seed == 1:
                self.release(task.id)
        return refused

worker = MLXWorker(
    EngineSwitch.of(Engine(hold=True)), new_connection(), new_connection(), name="child",
    options=WorkerOptions(lease=1, grace=float(sys.argv[2])),
)
worker.run()
print("ended well", flush=True)
"""
"""A worker that answers the jobs with seed 1 and holds all others."""


class Child:
    """A worker in a process of its own."""

    def __init__(self, grace: float) -> None:
        tests = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tests, str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output.strip()


@pytest.fixture
def children(redis_url: str) -> Iterator[list[Child]]:
    """Children that a test starts; none outlives it."""
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
            child.process.communicate()


def in_progress(*jobs: Job) -> None:
    """Waits until jobs are worked on."""
    eventually(lambda: all(job.status() == "in_progress" for job in jobs), "the claim")


def test_a_signal_ends_it_in_good_order_and_hands_back_what_it_holds(
    children: list[Child], connection: Redis
) -> None:
    child = Child(grace=0.1)
    children.append(child)
    done = submit(messages=HI, seed=1)
    held = submit(messages=HI)
    done.result(PATIENCE)
    in_progress(held)

    child.process.send_signal(signal.SIGTERM)

    assert child.wait() == (0, "ended well")
    assert held.status() == "queued"
    assert connection.smembers("rq:workers") == set()


def test_a_second_signal_does_not_wait_for_the_grace(children: list[Child]) -> None:
    child = Child(grace=1000)
    children.append(child)
    held = submit(messages=HI)
    in_progress(held)
    child.process.send_signal(signal.SIGTERM)
    child.process.send_signal(signal.SIGINT)
    assert child.wait() == (0, "ended well")
    assert held.status() == "queued"


def test_rqs_shutdown_command_which_is_a_sigint_ends_it_in_good_order(
    children: list[Child], connection: Redis
) -> None:
    child = Child(grace=0.1)
    children.append(child)
    submit(messages=HI, seed=1).result(PATIENCE)
    send_shutdown_command(connection, "child")
    assert child.wait() == (0, "ended well")


def test_what_is_said_to_a_whole_group_does_not_reach_a_part(redis_url: str) -> None:
    with child_process("status", redis_url, {}) as part:
        assert os.getsid(part.pid) == part.pid  # so it is no terminal's, either
        part.kill()


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    heard: list[int] = []
    now = iter([0.0, 0.0001, 0.05, 0.1, 0.15])
    hear = heard_once(lambda signum, frame: heard.append(signum), clock=lambda: next(now))
    for signum in (15, 15, 2, 15, 15):
        hear(signum, None)
    assert heard == [15, 2, 15]


def test_a_command_that_timeout_tells_to_stop_is_told_once() -> None:
    with stopped_by_signals():
        with pytest.raises(ToldToStop):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_a_command_that_is_interrupted_while_it_is_imported_ends_without_a_word() -> None:
    program = """
import signal, sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "redis":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Impatient())
from mlx_rq.worker.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


def test_the_jobs_of_a_killed_worker_are_answered_by_another(
    children: list[Child], connection: Redis, start_worker: StartWorker
) -> None:
    child = Child(grace=0.1)
    children.append(child)
    held = submit_many([{"messages": HI}] * 5)
    in_progress(*held)

    child.process.kill()

    assert child.wait()[0] == -signal.SIGKILL
    start_worker(lease=1)
    assert set(as_completed(held, timeout=PATIENCE)) == set(held)
    assert [job.status() for job in held] == ["completed"] * 5
