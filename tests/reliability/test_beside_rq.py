"""RQ's own commands beside our recovery; cancel, timeout, suspension."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from checks import all_answered, attempts_lost, traces
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from harness import StartProgram
from redis import Redis
from rq import Queue
from rq.executions import ExecutionRegistry
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry

from mlx_rq import JobFailed, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import EPOCH, recover_expired

QUEUE = keys.queue_name("default", "default")
REGISTRY = f"rq:wip:{QUEUE}"


def claims(connection: Redis, name: str) -> Claims:
    """The claims of a worker of which nothing else is running."""
    return Claims(connection, name, ["default"], lease_seconds=60, max_wait=30.0)


def rq(command: str, url: str) -> str:
    """Runs one of RQ's own commands."""
    program = str(Path(sys.executable).with_name("rq"))
    done = subprocess.run(
        [program, *command.split(), "--url", url], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rq_info_gives_back_expired_jobs_whole(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    # given a dead worker's jobs, whose leases have run out
    jobs = submit_many([{"prompt": "answer"}] * 3, timeout=600, max_attempts=5)
    before = [connection.hgetall(RQJob.key_for(job.id)) for job in jobs]
    claims(connection, "dead").take(3)
    for entry in connection.zrange(REGISTRY, 0, -1):
        connection.zadd(REGISTRY, {entry: 1})

    rq("info", redis_url)

    assert {job.status() for job in jobs} == {"queued"}
    after = [connection.hgetall(RQJob.key_for(job.id)) for job in jobs]
    for name in (b"data", b"meta", b"origin", b"result_ttl"):
        assert [fields[name] for fields in after] == [fields[name] for fields in before], name
    start_worker()
    all_answered(jobs)


def test_rqs_clean_up_and_ours_at_once_give_each_job_back_once(
    redis_url: str, connection: Redis
) -> None:
    jobs = submit_many([{"prompt": "answer"}] * 40)
    claims(connection, "dead").take(40)
    for entry in connection.zrange(REGISTRY, 0, -1):
        connection.zadd(REGISTRY, {entry: 1})
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("rq")), "info", "--url", redis_url],
        stdout=subprocess.DEVNULL,
    ) as program:
        returned = 0
        while program.poll() is None:
            returned += recover_expired(connection, claims(connection, "x").queues)
    assert returned <= 40
    # whoever was quicker: a job may stand in the list twice, and is claimed once
    taken = claims(connection, "next").take(100)
    assert sorted(job.id for job in taken) == sorted(job.id for job in jobs)
    assert connection.zcard(REGISTRY) == 40


def test_rq_info_on_a_machine_whose_clock_is_ahead_takes_no_lease(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(FakeEngine(hold=True))
    jobs = submit_many([{"prompt": "answer"}] * 3, max_attempts=1)
    worker.engine.wait_for_tasks(3)
    worker.claim_no_more()
    in_a_year = time.time() + 365 * 24 * 3600

    queue = Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    StartedJobRegistry(queue=queue).cleanup(in_a_year)  # what rq info does, then what others do
    ExecutionRegistry(jobs[0].id, connection).cleanup(in_a_year)

    assert {job.status() for job in jobs} == {"in_progress"}
    worker.engine.release()
    all_answered(jobs)
    assert traces(connection) == []


def test_suspend_and_resume(redis_url: str, connection: Redis, start_worker: StartWorker) -> None:
    worker = start_worker(FakeEngine(hold=True))
    running = submit(prompt="answer")
    worker.engine.wait_for_tasks(1)
    rq("suspend", redis_url)
    waiting = submit(prompt="answer")
    worker.engine.release()
    all_answered([running])
    assert waiting.status() == "queued"
    rq("resume", redis_url)
    all_answered([waiting])


def test_jobs_that_only_waited_in_a_worker_whose_leases_ran_out_lose_no_attempt(
    start: StartProgram, connection: Redis
) -> None:
    # given leases that were renewed, and of which RQ has no notes any more
    jobs = submit_many([{"prompt": "hold /nowhere"}] * 6)
    program = start("work", capacity=4, options={"lease": 2})
    program.until("began", 4)

    def lease_ends() -> list[float]:
        return [end for _, end in connection.zrange(REGISTRY, 0, -1, withscores=True)]

    ends = lease_ends()
    eventually(lambda: min(lease_ends()) > max(ends))
    program.kill()
    program.wait()
    connection.delete(*connection.scan_iter("rq:execution:*"))  # as after a long time
    eventually(lambda: max(lease_ends()) < EPOCH + redis_time(connection), "the end of the leases")
    assert recover_expired(connection, claims(connection, "x").queues) == 6
    assert attempts_lost(connection, jobs) == [1] * 4 + [0] * 2
    for trace in traces(connection):
        assert connection.ttl(trace) > 0, trace


def test_cancel_of_a_queued_and_of_a_running_job(start: StartProgram, connection: Redis) -> None:
    program = start(capacity=1, options={"window": 1})
    running, queued = submit_many([{"prompt": "hold /nowhere"}] * 2)
    program.until(f"began {running.id}")
    assert queued.cancel()
    assert running.cancel()
    program.until(f"left {running.id}")
    all_answered(submit_many([{"prompt": "answer"}]))
    assert [job.status() for job in (running, queued)] == ["cancelled"] * 2
    assert len(program.said("began")) == 2


def test_a_timeout_counts_from_the_start_not_from_the_submission(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    patient = submit(prompt="answer", timeout=0.3)
    connection.blpop(["nobody rings this"], timeout=0.5)  # longer in the queue than its timeout
    worker = start_worker(FakeEngine())
    all_answered([patient])
    worker.engine.hold()
    late = submit(prompt="answer", timeout=0.3)
    with pytest.raises(JobFailed) as failed:
        late.result(PATIENCE)
    assert failed.value.error["code"] == "request_timeout"
    assert worker.engine.cancelled == [late.id]
