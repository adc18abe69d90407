"""What we write in Lua is what RQ writes itself: `rq info` and dashboards must show the truth.

A worker of ours runs one job, and RQ's own SimpleWorker another. What both have in Redis while the
job runs, and leave there when it has ended, must have the same keys, fields and kinds of values. A
new RQ that writes something else is found out here.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, answer, eventually, failure, worker_in_thread
from redis import Redis
from rq import Queue, Retry, SimpleWorker
from rq.job import Job as RQJob
from rq.job import JobStatus
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from rq.worker import BaseWorker

from mlx_rq import submit, submit_many
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.payload import SERIALIZER

HI = [{"role": "user", "content": "Say hi."}]
QUEUE = keys.queue_name("default", "default")
NAME = "worker-1"

KINDS = [
    ("nothing", r""),
    ("whole number", r"-?\d+"),
    ("decimal", r"-?\d+\.\d+(e-?\d+)?"),
    ("time", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"),
    ("id", r"[0-9a-f]{32}"),
]
"""What kinds of values there are, apart from text."""


def kind_of(value: bytes) -> str:
    text = value.decode(errors="replace")
    return next((kind for kind, pattern in KINDS if re.fullmatch(pattern, text)), "text")


def records(connection: Redis, *, job_id: str) -> dict[str, Any]:
    """All that RQ has in Redis: for each key its fields and what kind of value each has."""
    seen: dict[str, Any] = {}
    for key in connection.scan_iter("rq:*"):
        name = key.decode().replace(job_id, "<job>")
        name = re.sub("[0-9a-f]{32}", "<execution>", name)
        match connection.type(key).decode():
            case "hash":
                fields = connection.hgetall(key)
                seen[name] = {field.decode(): kind_of(value) for field, value in fields.items()}
                if b"status" in fields:
                    seen[name]["status"] = fields[b"status"].decode()
            case "zset":
                seen[name] = [
                    (re.sub("[0-9a-f]{32}", "<id>", member.decode()), kind_of(b"%.1f" % score))
                    for member, score in connection.zrange(key, 0, -1, withscores=True)
                ]
            case "set":
                members = [member.decode() for member in connection.smembers(key)]
                seen[name] = sorted(re.sub("[0-9a-f]{32}", "<id>", member) for member in members)
            case "stream":
                seen[name] = [
                    {field.decode(): kind_of(value) for field, value in entry.items()}
                    | {"type": entry[b"type"].decode()}
                    for _, entry in connection.xrange(key)
                ]
            case other:
                seen[name] = other
        if name.startswith(("rq:job:", "rq:results:")):
            seen[f"{name} expires"] = connection.ttl(key) != -1
    return seen


during: dict[str, Any] = {}
"""What was in Redis while RQ's own worker ran a job."""


def look_around(url: str, job_id: str, fails: bool) -> str:
    """The job that RQ's own worker runs."""
    with Redis.from_url(url) as connection:
        during.update(records(connection, job_id=job_id))
    if fails:
        raise RuntimeError("no luck")
    return "done"


@contextmanager
def signals_kept() -> Iterator[None]:
    """RQ's workers install handlers of their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rqs_own(connection: Redis, url: str, *, fails: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What RQ's SimpleWorker writes while a job runs, and what it leaves."""
    job_id = "a" * 32
    queue = Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    data = Queue.prepare_data(
        f"{__name__}.look_around",
        kwargs={"url": url, "job_id": job_id, "fails": fails},
        job_id=job_id,
        description="a job",
        timeout=-1,
        result_ttl=600,
        failure_ttl=600,
        meta={"max_attempts": 3},
        retry=Retry(max=5) if not fails else None,
    )
    queue.enqueue_many([data])
    during.clear()
    with signals_kept():
        worker = SimpleWorker([queue], connection=connection, name=NAME, serializer=SERIALIZER)
        worker.work(burst=True, logging_level="CRITICAL")
    after = records(connection, job_id=job_id)
    for seen in (during, after):
        seen.pop("rq:clean_groups", None)  # paces RQ's own maintenance
    return dict(during), after


def ours(connection: Redis, url: str, *, fails: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a worker of ours writes while a job runs, and what it leaves."""
    job = submit(messages=HI, result_ttl=600)
    during: dict[str, Any] = {}

    def look_around(task: Any) -> Any:
        during.update(records(connection, job_id=job.id))
        return failure("no_luck") if fails else answer(task)

    engine = FakeEngine(answer_with=look_around)
    with worker_in_thread(url, engine, burst=True, name=NAME) as worker:
        assert worker.join() == 1
    return during, records(connection, job_id=job.id)


def alike(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compares record by record, so that a failure names the one that differs."""
    for name in ("rq:queues", f"rq:workers:{QUEUE}"):  # a worker of ours reads several queues
        theirs.pop(name, None)
        ours.pop(name, None)
    for name in [name for name in ours if name.startswith("rq:workers:")]:
        del ours[name]
    for name in sorted(theirs.keys() | ours.keys()):
        assert ours.get(name) == theirs.get(name), name


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
def test_what_we_leave_in_redis_is_what_rq_leaves(
    redis_url: str, connection: Redis, fails: bool
) -> None:
    _, theirs = rqs_own(connection, redis_url, fails=fails)
    connection.flushall()
    _, our = ours(connection, redis_url, fails=fails)
    # Ours keeps the retries of a failed job; RQ fails one at once only where it had none.
    if fails:
        for field in ("retries_left", "retry_intervals"):
            del our["rq:job:<job>"][field]
    alike(theirs, our)


def test_what_is_in_redis_while_a_job_runs_is_what_rq_has_there(
    redis_url: str, connection: Redis
) -> None:
    theirs, _ = rqs_own(connection, redis_url, fails=False)
    connection.flushall()
    our, _ = ours(connection, redis_url, fails=False)
    alike(theirs, our)


def registries(connection: Redis) -> dict[str, list[str]]:
    """The jobs of every registry of the queue, as RQ reads them."""
    queue = Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    by_name: dict[str, Callable[[], list[str]]] = {
        "queued": lambda: queue.job_ids,
        "started": StartedJobRegistry(queue=queue).get_job_ids,
        "finished": FinishedJobRegistry(queue=queue).get_job_ids,
        "failed": FailedJobRegistry(queue=queue).get_job_ids,
        "canceled": CanceledJobRegistry(queue=queue).get_job_ids,
    }
    return {name: sorted(read()) for name, read in by_name.items() if read()}


class TestRead:
    """RQ's own objects read what we wrote."""

    def test_a_job_is_in_the_registry_of_its_state_and_in_no_other(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        assert registries(connection) == {"queued": [job.id]}
        worker = start_worker(FakeEngine(hold=True))
        worker.engine.wait_for_tasks(1)
        assert registries(connection) == {"started": [job.id]}
        worker.engine.release()
        job.result(PATIENCE)
        assert registries(connection) == {"finished": [job.id]}

        worker.engine.answer_with = lambda task: failure("no")
        failed = submit(messages=HI)
        eventually(lambda: failed.status() == "failed")
        worker.engine.hold()
        cancelled = submit(messages=HI)
        cancelled.cancel()
        assert registries(connection) == {
            "finished": [job.id],
            "failed": [failed.id],
            "canceled": [cancelled.id],
        }

    def test_an_answered_job(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        start_worker(name=NAME)
        job = submit(messages=HI, model="fake")
        job.result(PATIENCE)
        read = RQJob.fetch(job.id, connection=connection, serializer=SERIALIZER)
        assert read.get_status() == JobStatus.FINISHED
        assert read.is_finished
        assert read.worker_name == NAME
        assert read.started_at is not None
        assert read.ended_at is not None
        assert read.ended_at >= read.started_at
        assert read.description == "chat for fake"
        result = read.latest_result()
        assert result is not None
        assert result.type == Result.Type.SUCCESSFUL
        # not the answer again: that would be kept twice
        assert read.return_value() == {"result_key": keys.result(job.id)}
        assert (result.worker_name, result.exc_string) == (NAME, None)

    def test_a_failed_job_says_why(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine(answer_with=lambda task: failure("no_luck", "No such luck.")))
        job = submit(messages=HI)
        eventually(lambda: job.status() == "failed")
        read = RQJob.fetch(job.id, connection=connection, serializer=SERIALIZER)
        assert read.is_failed
        result = read.latest_result()
        assert result is not None
        assert result.type == Result.Type.FAILED
        assert result.exc_string == "no_luck: No such luck."
        assert read.return_value() is None

    def test_a_cancelled_job(self, redis_url: str, connection: Redis) -> None:
        job = submit(messages=HI)
        job.cancel()
        read = RQJob.fetch(job.id, connection=connection, serializer=SERIALIZER)
        assert read.is_canceled
        result = read.latest_result()
        assert result is not None
        assert result.type == Result.Type.STOPPED

    def test_a_worker(self, redis_url: str, connection: Redis, start_worker: StartWorker) -> None:
        engine = FakeEngine("m", refuse=lambda task: failure("no") if task.request.seed else None)
        worker = start_worker(engine, name=NAME)
        bodies = [{"messages": HI}, {"messages": HI}, {"messages": HI, "seed": 1}]
        for job in submit_many(bodies):
            eventually(lambda job=job: job.status() in ("completed", "failed"))  # type: ignore[misc]
        engine.hold()
        running = submit(messages=HI)
        engine.wait_for_tasks(4)

        eventually(lambda: connection.hget(worker.worker.key, "state") == b"busy")
        (read,) = BaseWorker.all(connection, serializer=SERIALIZER)
        assert read.name == NAME
        assert read.get_state() == "busy"
        assert (read.successful_job_count, read.failed_job_count) == (2, 1)
        assert read.total_working_time > 0
        assert read.queue_names() == [
            keys.queue_name(model, priority)
            for priority in PRIORITIES
            for model in ("m", "default")
        ]
        assert [execution.job_id for execution in read.get_current_executions()] == [running.id]

        engine.release()
        running.result(PATIENCE)
        (read,) = BaseWorker.all(connection, serializer=SERIALIZER)
        assert read.get_current_executions(refresh=True) == []
        worker.stop()
        assert BaseWorker.all(connection, serializer=SERIALIZER) == []

    @pytest.mark.parametrize(
        ("ends", "registry"),
        [
            ("failed", FailedJobRegistry),
            ("completed", FinishedJobRegistry),
            ("cancelled", CanceledJobRegistry),
        ],
    )
    def test_a_job_that_rq_puts_back_into_the_queue_keeps_its_end(
        self,
        redis_url: str,
        connection: Redis,
        start_worker: StartWorker,
        ends: str,
        registry: Any,
    ) -> None:
        refusal = failure("no") if ends == "failed" else None
        worker = start_worker(FakeEngine(refuse=lambda _: refusal, hold=ends == "cancelled"))
        job = submit(messages=HI)
        if ends == "cancelled":
            worker.engine.wait_for_tasks(1)
            job.cancel()
        eventually(lambda: job.status() == ends)
        before, listed = connection.get(keys.result(job.id)), registries(connection)
        ended_at = datetime.fromisoformat(job.info()["ended_at"])

        registry(QUEUE, connection=connection, serializer=SERIALIZER).requeue(job.id)
        worker.ring()

        eventually(lambda: registries(connection) == listed)
        assert job.status() == ends
        assert len(worker.engine.added) == 1
        assert connection.get(keys.result(job.id)) == before
        assert connection.ttl(RQJob.key_for(job.id)) > 0
        again = datetime.fromisoformat(job.info()["ended_at"])
        assert abs(again - ended_at) < timedelta(seconds=2)
        assert connection.xlen(keys.COMPLETIONS) == 1

    def test_an_idle_worker_says_so(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        worker = start_worker(name=NAME)
        submit(messages=HI).result(PATIENCE)
        eventually(lambda: connection.hget(worker.worker.key, "state") == b"idle")


def test_rq_info_shows_the_truth(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine(
        hold=True, refuse=lambda task: failure("no") if task.request.seed == 1 else None
    )
    worker = start_worker(engine, window=4, name=NAME)
    bodies: list[dict[str, Any]] = [{"messages": HI, "seed": number} for number in range(6)]
    jobs = submit_many(bodies)
    engine.wait_for_tasks(4)
    engine.release(jobs[0].id)
    engine.wait_for_tasks(6)
    engine.release(jobs[2].id)
    jobs[2].result(PATIENCE)
    waiting = [submit(messages=HI, priority="low") for _ in range(2)]
    worker.claim_no_more()
    held = sum(job.status() == "in_progress" for job in [*jobs, *waiting])

    done = subprocess.run(
        [str(Path(sys.executable).parent / "rq"), "info", "--url", redis_url, "--raw"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    low = keys.queue_name("default", "low")
    in_low = sum(job.status() == "in_progress" for job in waiting)
    assert f"queue {QUEUE} 0, {held - in_low} executing, 2 finished, 1 failed" in lines
    assert f"queue {low} {2 - in_low}, {in_low} executing, 0 finished, 0 failed" in lines
    (of_worker,) = [line for line in lines if line.startswith(f"worker {NAME} ")]
    assert " busy " in of_worker
    assert of_worker.endswith("jobs: 2 finished, 1 failed")
