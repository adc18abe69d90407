"""RQ's own commands beside our recovery; who is reaped; cancel, timeout, suspension."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks import all_answered, attempts_lost, traces
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from harness import StartProgram
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import JobFailed, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import machine, reap_dead_of_this_machine, recover_expired

QUEUE = keys.queue_name("default", "default")
REGISTRY = f"rq:wip:{QUEUE}"
ONLY_LINUX_TELLS = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


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


@pytest.mark.parametrize(
    ("pid", "where", "reaped"),
    [
        ("dead", "here", True),
        pytest.param("unburied", "here", True, marks=ONLY_LINUX_TELLS),
        ("alive", "here", False),
        ("dead", "elsewhere", False),
        ("unknown", "here", False),
    ],
)
def test_only_dead_workers_of_this_machine_are_reaped(
    start_worker: StartWorker, connection: Redis, pid: str, where: str, reaped: bool
) -> None:
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    if pid == "dead":
        gone.wait()  # else its parent, this test, has not asked yet how it ended
    worker = start_worker(FakeEngine(hold=True))
    describe = worker.worker._leases._describe
    said = {
        "pid": {"alive": os.getpid(), "unknown": None}.get(pid, gone.pid),
        "machine": machine() if where == "here" else "elsewhere",
    }
    worker.worker._leases._describe = lambda: {**describe(), **said}
    job = submit(prompt="answer")
    worker.engine.wait_for_tasks(1)
    worker.worker._leases.renew()
    worker.claim_no_more()

    reap_dead_of_this_machine(connection)

    assert job.status() == ("queued" if reaped else "in_progress")
    worker.engine.release()
    all_answered([job])
    gone.wait()


def test_jobs_that_only_waited_in_a_worker_whose_leases_ran_out_lose_no_attempt(
    start: StartProgram, connection: Redis
) -> None:
    # given leases that were renewed, so that what RQ notes of each claim ends with them
    jobs = submit_many([{"prompt": "hold /nowhere"}] * 6)
    program = start("work", capacity=4, options={"lease": 2})
    program.until("began", 4)
    ends = dict(connection.zrange(REGISTRY, 0, -1, withscores=True))
    eventually(
        lambda: (
            min(dict(connection.zrange(REGISTRY, 0, -1, withscores=True)).values())
            > max(ends.values())
        )
    )
    program.kill()
    program.wait()
    eventually(lambda: not list(connection.scan_iter("rq:execution:*")), "the end of RQ's notes")
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
