"""Of two workers with one name, one has it, and nobody takes anything from that one."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker
from odd_values import BYTES, TYPES
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import submit
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.leases.name import NameLease, NameTaken
from mlx_rq.worker.process.supervisor import Supervisor

HI = [{"role": "user", "content": "Say hi."}]

RunWorker = Callable[..., AbstractContextManager[RunningWorker]]


def test_it_is_one_holders_until_that_gives_it_up(connection: Redis) -> None:
    first, second = (NameLease(connection, "mac", seconds=60) for _ in range(2))
    first.take()
    first.take()
    with pytest.raises(NameTaken, match="There exists an active worker named 'mac' already"):
        second.take()
    second.give_up()
    assert (first.is_anothers(), second.is_anothers()) == (False, True)
    assert 50 < connection.ttl(keys.worker_name("mac")) <= 60
    first.give_up()
    second.take()
    assert (first.is_anothers(), second.lost) == (True, True)


@pytest.mark.parametrize("spoil", ["no text", "set"])
def test_what_somebody_has_put_there_is_no_lease(connection: Redis, spoil: str) -> None:
    if spoil in BYTES:
        connection.set(keys.worker_name("w"), BYTES[spoil])
    else:
        TYPES[spoil](connection, keys.worker_name("w"))
    lease = NameLease(connection, "w", seconds=60)
    assert not lease.is_anothers()
    lease.give_up()
    lease.take()
    assert connection.ttl(keys.worker_name("w")) > 0
    other = NameLease(connection, "w", seconds=60)
    assert other.is_anothers()


def test_whoever_worked_under_a_supervisor_finds_its_name_again(connection: Redis) -> None:
    NameLease(connection, "mac", "one", seconds=60).take()
    NameLease(connection, "mac", "one", seconds=60).take()


def test_a_worker_whose_name_was_taken_gives_back_what_it_holds_and_ends(
    connection: Redis, redis_url: str, running_worker: RunWorker
) -> None:
    """Given one that slept for so long that another has come in its place."""
    engine = FakeEngine(hold=True)
    with running_worker(engine, name="mac", lease=2) as worker:
        job = submit(messages=HI, max_attempts=1)
        engine.wait_for_tasks(1)
        connection.set(keys.worker_name("mac"), "another", ex=60)
        worker._thread.join(PATIENCE)
        with pytest.raises(NameTaken):
            worker.join()
    assert job.status() == "queued"
    retries = connection.hget(RQJob.key_for(job.id), "retries_left")
    assert retries == b"3", "no attempt was counted"
    assert connection.hget("rq:worker:mac", "death") is None, "the record is the other's"
    assert connection.get(keys.worker_name("mac")) == b"another"


def test_a_supervisor_does_not_bury_who_has_the_name(
    connection: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(FakeEngine(hold=True), name="mac")
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)

    Supervisor(["false"], connection, "mac", environment={})._reap()

    assert job.status() == "in_progress"
    worker.engine.release()
    assert job.result(PATIENCE)["object"] == "chat.completion"


def test_it_is_free_again_when_its_worker_has_ended(
    connection: Redis, running_worker: RunWorker
) -> None:
    with running_worker(name="mac"):
        submit(messages=HI).result(PATIENCE)
        assert connection.exists(keys.worker_name("mac"))
    assert not connection.exists(keys.worker_name("mac"))
