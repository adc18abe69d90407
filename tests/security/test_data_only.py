"""What lies in the queue is data: another function's job is refused, and nothing of it is run."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, StartWorker
from redis import Redis
from rq import Callback, Queue
from rq.job import Job as RQJob

from mlx_rq import Job, JobFailed
from mlx_rq.jobs.openai.sizes import MAX_BODY_VARIABLE
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER

MODULE = "module_that_must_not_be_imported"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported, and leaves a file where that is done."""
    sprung = tmp_path / "sprung"
    text = f"open({str(sprung)!r}, 'w')\ndef run(*a, **k): pass\n"
    (tmp_path / f"{MODULE}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield sprung
    assert MODULE not in sys.modules
    assert not sprung.exists()


def put(connection: Redis, function: str, serializer: Any = SERIALIZER, **options: Any) -> Job:
    """Puts a job into our queue as a stock RQ producer would."""
    name = keys.queue_name("default", "default")
    queue = Queue(name, connection=connection, serializer=serializer)
    body = {"kind": "chat", "body": {"messages": [{"role": "user", "content": "Hi"}]}}
    return Job(queue.enqueue(function, kwargs=body, **options).id)


def error_of(job: Job) -> dict[str, Any]:
    with pytest.raises(JobFailed) as failed:
        job.result(PATIENCE)
    return failed.value.error


@pytest.mark.parametrize("serializer", [SERIALIZER, pickle], ids=["JSON", "pickle"])
def test_another_functions_job_fails_and_is_not_imported(
    redis_url: str, connection: Redis, start_worker: StartWorker, trap: Path, serializer: Any
) -> None:
    worker = start_worker()
    job = put(connection, f"{MODULE}.run", serializer)
    error = error_of(job)
    assert (error["code"], error["type"]) == ("invalid_payload", "invalid_request_error")
    assert "Submit jobs with mlx_rq.submit() or the command line." in error["message"]
    assert worker.engine.added == []
    assert job.status() == "failed"


def test_our_functions_job_is_answered_and_its_callbacks_are_not_called(
    redis_url: str, connection: Redis, start_worker: StartWorker, trap: Path
) -> None:
    start_worker()
    callback = Callback(f"{MODULE}.run")
    job = put(connection, FUNCTION, on_success=callback, on_failure=callback, on_stopped=callback)
    assert job.result(PATIENCE)["object"] == "chat.completion"
    job.delete()


def test_our_function_itself_does_nothing_where_a_stock_worker_calls_it(connection: Redis) -> None:
    job = RQJob.fetch(put(connection, FUNCTION).id, connection, serializer=SERIALIZER)
    with pytest.raises(RuntimeError, match="start `mlx-rq worker` on this queue"):
        job.perform()


def test_a_body_that_is_too_big_is_refused_by_the_worker_too(
    redis_url: str,
    connection: Redis,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = put(connection, FUNCTION)
    monkeypatch.setenv(MAX_BODY_VARIABLE, "40")
    start_worker()
    error = error_of(job)
    assert error["code"] == "request_too_large"
    assert error["message"] == "The body has 45 bytes; the limit is 40."
