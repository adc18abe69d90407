"""A worker that has lost track of something says so, and ends."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually, until_idle
from redis import Redis
from tiny import tiny_model

from mlx_rq import submit, submit_many
from mlx_rq.engine.interface import IntegrityError
from mlx_rq.worker import integrity
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.options import WorkerOptions

HI = [{"role": "user", "content": "Say hi."}]


def fault(worker: RunningWorker) -> str:
    """What the worker that ends by it says is wrong."""
    with pytest.raises(IntegrityError) as raised:
        worker.join()
    return str(raised.value)


@pytest.fixture
def every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "CHECK_TURNS", 1)


def test_an_idle_worker_whose_engine_contradicts_itself_ends(
    start_worker: StartWorker, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_worker()
    until_idle(connection)
    worker.engine.fault = "a sequence is nowhere"
    worker.ring()
    assert fault(worker) == "a sequence is nowhere"
    assert "integrity: a sequence is nowhere; the worker ends" in caplog.messages


@pytest.mark.usefixtures("every_turn")
def test_a_job_that_the_engine_has_forgotten_ends_a_busy_worker_and_goes_back(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(FakeEngine(hold=True))
    forgotten, other = submit_many([{"messages": HI}] * 2)
    worker.engine.wait_for_tasks(2)

    worker.engine.cancel(forgotten.id)

    assert fault(worker) == f"job {forgotten.id} is claimed, but has neither task nor answer"
    assert [job.status() for job in (forgotten, other)] == ["queued"] * 2


@pytest.mark.usefixtures("every_turn")
def test_a_task_that_nobody_asks_for_ends_a_worker(start_worker: StartWorker) -> None:
    worker = start_worker(FakeEngine(hold=True))
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    (task,) = worker.engine.added

    with worker.worker._held._lock:
        del worker.worker._held._jobs[job.id]

    assert fault(worker) == f"task {task.id} is of no claimed job"


def test_a_busy_worker_is_checked_now_and_then(start_worker: StartWorker) -> None:
    worker = start_worker(FakeEngine(hold=True))
    submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    worker.engine.fault = "two states"
    assert fault(worker) == "two states"
    assert worker.engine.steps % integrity.CHECK_TURNS == 0


def test_without_the_option_nothing_is_checked(start_worker: StartWorker) -> None:
    worker = start_worker(check=False)
    worker.engine.fault = "never looked at"
    assert submit(messages=HI).result(PATIENCE)["object"] == "chat.completion"
    assert worker.stop() == 1


def test_an_answer_on_its_way_is_no_fault(start_worker: StartWorker, connection: Redis) -> None:
    """A Redis that takes no writes keeps jobs here that the engine is done with."""
    worker = start_worker(FakeEngine(hold=True))
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    connection.config_set("min-replicas-to-write", 1)  # from now on it refuses every write
    try:
        worker.engine.release()
        eventually(lambda: job.id in worker.worker._outbox, "the answer")
        worker.worker._integrity.check([job.id])
    finally:
        connection.config_set("min-replicas-to-write", 0)
    assert job.result(PATIENCE)["object"] == "chat.completion"


@pytest.mark.parametrize("arguments", [[], ["--check"]], ids=["off", "on"])
def test_the_command_line_says_whether_a_worker_checks_itself(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], tmp_path: Path
) -> None:
    made: list[WorkerOptions] = []

    class Unborn:
        def __init__(self, *_: Any, options: WorkerOptions, **__: Any) -> None:
            made.append(options)

        def run(self) -> None: ...

    monkeypatch.setattr("mlx_rq.engine.models.load.load", lambda *_, **__: tiny_model("llama"))
    monkeypatch.setattr("mlx_rq.engine.engine.MLXEngine", lambda *_, **__: FakeEngine())
    monkeypatch.setattr("mlx_rq.worker.worker.MLXWorker", Unborn)
    monkeypatch.delenv("MLX_RQ_CHECK")
    command = ["worker", "--unsupervised", "--batch", "4", "--data-dir", str(tmp_path), *arguments]

    assert CliRunner().invoke(main, command).exit_code == 0

    assert [options.check for options in made] == [bool(arguments)]
