"""Valkey is killed, cut off, paused, emptied: what was accepted is answered, once."""

import signal
from pathlib import Path

import pytest
from checks import all_answered, attempts_lost
from fakes import FakeEngine, eventually, until_idle, worker_in_thread
from harness import Server, StartProgram
from redis import Redis
from redis.exceptions import TimeoutError
from rq.suspension import suspend

from mlx_rq import submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.worker.leases import rq_registration as rq_registration
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import recover_expired


def test_a_valkey_killed_while_jobs_run_and_others_wait_loses_none(
    start: StartProgram, server: Server, own: Redis, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    jobs = submit_many([{"prompt": f"hold {gate}"}] * 6, redis_url=server.url)
    program = start(url=server.url)
    program.until("began", 4)

    server.kill()
    gate.touch()
    program.until("answered", 4)  # the answers are there, Redis is not
    server.start()

    all_answered(jobs)
    assert len(program.said("answered")) == 6, "none was generated twice"
    assert len(program.said("started")) == 1
    assert attempts_lost(own, jobs) == [0] * 6


def test_what_was_ended_is_still_so_after_a_kill(
    start: StartProgram, server: Server, own: Redis
) -> None:
    program = start(url=server.url)
    jobs = submit_many([{"prompt": "answer"}] * 5, redis_url=server.url)
    all_answered(jobs)
    server.kill()
    server.start()
    all_answered(jobs)
    assert own.xlen(keys.COMPLETIONS) == 5
    assert len(program.said("answered")) == 5


def test_a_job_of_a_worker_that_died_while_valkey_was_away_goes_back(
    start: StartProgram, server: Server, own: Redis, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    jobs = submit_many([{"prompt": f"hold {gate}"}] * 3, redis_url=server.url)
    program = start(url=server.url)
    program.until("began", 3)
    server.kill()
    program.kill_worker()
    program.until("log Redis: ")  # the supervisor, who would give them back
    gate.touch()
    server.start()
    all_answered(jobs)
    assert attempts_lost(own, jobs) == [1] * 3


def test_connections_cut_while_it_waits_for_work_are_made_again(
    redis_url: str, connection: Redis
) -> None:
    with worker_in_thread(redis_url, FakeEngine(hold=True)) as worker:
        until_idle(connection)
        connection.client_kill_filter(_type="normal", skipme=True)
        connection.client_kill_filter(_type="pubsub", skipme=True)
        job = submit(prompt="answer")
        worker.engine.wait_for_tasks(1)
        # and commands are still heard
        eventually(lambda: connection.pubsub_numsub(f"rq:pubsub:{worker.name}")[0][1] == 1)
        assert job.cancel()
        worker.engine.wait_until(lambda engine: engine.cancelled == [job.id])


def test_commands_are_heard_again_after_a_redis_that_did_not_answer_in_time(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_registration, "RETRY_SECONDS", 0.0)
    with worker_in_thread(redis_url, FakeEngine(hold=True)) as worker:
        job = submit(prompt="answer")
        worker.engine.wait_for_tasks(1)
        thread = worker.worker.pubsub_thread
        thread.exception_handler(TimeoutError("Timeout reading from socket"), thread.pubsub, thread)
        assert job.cancel()
        worker.engine.wait_until(lambda engine: engine.cancelled == [job.id])


def test_cancel_reaches_a_running_job_after_a_restart_of_valkey(server: Server, own: Redis) -> None:
    engine = FakeEngine(hold=True)
    with worker_in_thread(server.url, engine) as worker:
        job = submit(prompt="answer", redis_url=server.url)
        engine.wait_for_tasks(1)
        server.kill()
        server.start()
        eventually(lambda: own.pubsub_numsub(f"rq:pubsub:{worker.name}")[0][1] == 1)
        assert job.cancel()
        engine.wait_until(lambda engine: engine.cancelled == [job.id])
        assert job.status() == "cancelled"


def test_a_claim_whose_reply_was_lost_goes_back_when_its_lease_ends(
    redis_url: str, connection: Redis
) -> None:
    (job,) = jobs = submit_many([{"prompt": "answer"}])
    with worker_in_thread(redis_url, FakeEngine(hold=True), lease=2, name="w") as worker:
        worker.engine.wait_for_tasks(1)
        lost = submit(prompt="answer")  # claimed in its name, and it does not know
        claims = Claims(connection, "w", ["default"], lease_seconds=2, max_wait=30.0)
        taken = claims.take(1)
        if not taken:  # it was quicker
            worker.engine.wait_for_tasks(2)
        worker.engine.release()
        all_answered([job, lost])
    assert attempts_lost(connection, [*jobs, lost]) == [0, 0]


def test_a_valkey_that_lost_its_data_gets_its_worker_back_and_answers_are_set_aside(
    start: StartProgram, tmp_path: Path
) -> None:
    folder = tmp_path / "forgetful"
    folder.mkdir()
    server = Server(folder, append_only=False)
    server.start()
    try:
        gate, spool = tmp_path / "gate", tmp_path / "spool"
        jobs = submit_many([{"prompt": f"hold {gate}"}] * 3, redis_url=server.url)
        program = start(url=server.url, spool=str(spool), options={"lease": 2})
        program.until("began", 3)

        server.kill()
        server.start()

        program.until("log Redis lost its data")
        gate.touch()
        for job in jobs:
            program.until(rf"log job {job.id}: Redis has lost it; its answer is in .*unplaced")
        assert {path.stem for path in (spool / "unplaced").iterdir()} == {job.id for job in jobs}
        with Redis.from_url(server.url) as connection:
            assert connection.smembers("rq:workers") == {b"rq:worker:child"}
            eventually(lambda: connection.hexists("rq:worker:child", "birth"), "its record")
        all_answered(submit_many([{"prompt": "answer"}] * 2, redis_url=server.url))
    finally:
        server.close()


def test_a_partition_of_two_workers_answers_each_job_once(
    start: StartProgram, connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    # given a worker that is paused past the end of its lease
    gate = tmp_path / "gate"
    options = {"lease": 2, "grace": 0.0}
    paused = start("work", name="paused", options=options)
    jobs = submit_many([{"prompt": f"hold {gate}"}] * 2)
    paused.until("began", 2)
    paused.process.send_signal(signal.SIGSTOP)
    stopped = redis_time(connection)
    # and another that takes over what it held, and ends one job
    other = start("work", name="other", options=options, capacity=1)
    other.until("began", 1)
    gate.touch()
    all_answered(jobs)
    eventually(lambda: not connection.exists("rq:worker:paused"), "the end of its records")
    # it says that it slept where that was longer than a lease, and than the next look at the clock
    eventually(lambda: redis_time(connection) - stopped > 2 * options["lease"], "a long pause")

    paused.process.send_signal(signal.SIGCONT)

    slept = paused.until(r"log this worker slept for (\d+) s")
    assert int(slept[1]) >= options["lease"]
    eventually(lambda: bool(connection.exists("rq:worker:paused")), "its return")
    assert not paused.said("log Redis lost its data")
    paused.until("answered", 2)
    for _ in jobs:
        paused.until("log job .*: answer discarded", 2)
    all_answered(jobs)
    assert connection.xlen(keys.COMPLETIONS) == 2
    assert attempts_lost(connection, jobs) == [1, 1]


def test_a_late_answer_counts_while_the_job_only_waits_again(
    start: StartProgram, connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    paused = start("work", options={"lease": 2})
    job = submit(prompt=f"hold {gate}")
    paused.until("began")
    paused.process.send_signal(signal.SIGSTOP)
    suspend(connection)  # nobody claims it again
    queues = Claims(connection, "x", ["default"], lease_seconds=2, max_wait=30.0).queues
    eventually(lambda: recover_expired(connection, queues) == 1, "the end of the lease")
    assert job.status() == "queued"

    gate.touch()
    paused.process.send_signal(signal.SIGCONT)

    all_answered([job])
    assert len(paused.said("began")) == 1, "generated once"
    assert connection.llen(f"rq:queue:{keys.queue_name('default', 'default')}") == 0
