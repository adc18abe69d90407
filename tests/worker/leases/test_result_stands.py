"""An end is an end: what RQ's tools, or a person, put back undoes no result and takes no lease.

RQ's clean-up reads the records of jobs whose leases ran out, and writes them back some time later;
over a slow link much can happen in between. Leases of ours it does not find, so these tests have it
see some that are written as an RQ without us would.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import PATIENCE
from redis import Redis
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry

from mlx_rq import Job, as_completed, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.finish import finish_job
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES
from mlx_rq.jobs.queue.payload import SERIALIZER, InertJob
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.leases import recovery
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.leases.recovery import EPOCH, ExpiredLeases, reap, recover_expired
from mlx_rq.worker.leases.scripts import script_of

QUEUE = keys.queue_name("default", "default")
REGISTRY = f"rq:wip:{QUEUE}"


def claims(connection: Redis, name: str, *, lives: bool = True) -> Claims:
    """The claims of a worker that says that it lives, but does nothing."""
    if lives:
        connection.set(keys.worker(name), "{}")
    return Claims(connection, name, ["default"], lease_seconds=60, max_wait=30.0)


def end(connection: Redis, job: ClaimedJob, text: str = "the answer") -> list[bytes]:
    """What a worker does that has an answer; returns what it is told."""
    reply: list[bytes] = finish_job(
        connection,
        connection,
        job_id=job.id,
        queue_name=job.queue_name,
        ending="finished",
        outcome={"object": "x", "text": text},
        result_ttl=60,
        lease=job.lease,
    )
    return reply


def clean_up(connection: Redis, between: Callable[[], object] = lambda: None) -> None:
    """Runs RQ's clean-up of leases that ran out; `between` its reading and its writing."""

    class Read(InertJob):
        def retry(self, *arguments: Any, **options: Any) -> None:
            between()
            super().retry(*arguments, **options)

    for entry in connection.zrange(REGISTRY, 0, -1):
        connection.zadd(REGISTRY, {entry: 1})
    StartedJobRegistry(
        QUEUE, connection=connection, serializer=SERIALIZER, job_class=Read
    ).cleanup()


def queued(connection: Redis) -> list[str]:
    return [job_id.decode() for job_id in connection.lrange(f"rq:queue:{QUEUE}", 0, -1)]


def retries_left(connection: Redis, job: Job) -> int:
    return int(connection.hget(RQJob.key_for(job.id), "retries_left"))


@pytest.mark.parametrize("long", [False, True])
def test_a_job_that_ended_while_rq_put_it_back_is_not_claimed(
    redis_url: str, connection: Redis, long: bool
) -> None:
    job = submit(prompt="hi", max_attempts=1)
    (claimed,) = claims(connection, "holder").take(1)
    clean_up(connection, lambda: end(connection, claimed))
    recorded = connection.hget(RQJob.key_for(job.id), "status")
    assert (recorded, queued(connection)) == (b"queued", [job.id]), "the fault is there"
    others = {job.id for job in submit_many([{"prompt": "hi"}] * (1100 if long else 1))}

    taken = {one.id for one in claims(connection, "other").take(3)}

    assert taken <= others
    assert len(taken) == (3 if long else 1)
    assert waiting_in(connection, [QUEUE]) == [len(others) - len(taken)]
    assert job.id not in queued(connection)
    assert job.status() == "completed"
    assert job.result(0)["text"] == "the answer"
    assert connection.zscore(f"rq:finished:{QUEUE}", job.id)
    assert 0 < connection.ttl(RQJob.key_for(job.id)) <= 60
    assert connection.xlen(keys.COMPLETIONS) == 1


@pytest.mark.parametrize("cancel", [False, True])
def test_nobody_ends_it_again(redis_url: str, connection: Redis, cancel: bool) -> None:
    job = submit(prompt="hi")
    (claimed,) = claims(connection, "holder").take(1)
    clean_up(connection, lambda: end(connection, claimed, "first"))

    if cancel:
        assert job.cancel() is False
    else:
        assert end(connection, claimed, "second") == [b"finished"]

    assert job.result(0)["text"] == "first"
    assert connection.xlen(keys.COMPLETIONS) == connection.xlen(f"rq:results:{job.id}") == 1


@pytest.mark.parametrize("says", ["queued", "started", "odd", "canceled", "failed"])
def test_whoever_waits_for_it_sees_the_end_though_no_worker_is_there(
    redis_url: str, connection: Redis, says: str
) -> None:
    job = submit(prompt="hi")
    (claimed,) = claims(connection, "holder").take(1)
    end(connection, claimed)
    connection.hset(RQJob.key_for(job.id), "status", says)

    async def wait() -> str:
        text: str = (await job)["text"]
        return text

    assert job.status() == "completed"
    assert list(as_completed([job], timeout=PATIENCE)) == [job]
    assert asyncio.run(asyncio.wait_for(wait(), PATIENCE)) == "the answer"
    assert CliRunner().invoke(main, ["status", job.id]).exit_code == 0


@pytest.mark.parametrize("how", ["reap", "expiry"])
def test_what_has_a_result_is_not_given_back(redis_url: str, connection: Redis, how: str) -> None:
    job = submit(prompt="hi")
    holder = claims(connection, "holder")
    (claimed,) = holder.take(1)
    record = connection.hgetall(RQJob.key_for(job.id))
    leases = connection.zrange(REGISTRY, 0, -1)
    end(connection, claimed)
    # given somebody who wrote all of it back, as it was before the end
    connection.hset(RQJob.key_for(job.id), mapping=record)
    connection.zadd(REGISTRY, dict.fromkeys(leases, 1))
    connection.sadd("rq:worker:holder:executions", *leases)

    assert (reap(connection, "holder") if how == "reap" else 0) == 0
    assert recover_expired(connection, holder.queues) == 0

    assert (job.status(), queued(connection)) == ("completed", [])
    assert connection.zcard(REGISTRY) == 0


def test_a_lease_that_was_renewed_while_rq_put_its_job_back_stands(
    redis_url: str, connection: Redis
) -> None:
    job = submit(prompt="hi", max_attempts=1)
    (claimed,) = claims(connection, "holder").take(1)
    ends = EPOCH + redis_time(connection) + 60

    def renew() -> None:
        connection.zadd(REGISTRY, {f"{job.id}:{claimed.lease.execution_id}": ends}, xx=True)

    clean_up(connection, renew)
    assert (job.status(), queued(connection)) == ("queued", [job.id]), "the fault is there"

    assert claims(connection, "other").take(1) == []

    assert (job.status(), queued(connection)) == ("in_progress", [])
    assert connection.hget(RQJob.key_for(job.id), "worker_name") == b"holder"
    assert retries_left(connection, job) == RECOVERY_RETRIES
    assert end(connection, claimed)[0] == b"ended"


def test_a_job_that_another_worker_holds_by_now_is_not_given_back(
    redis_url: str, connection: Redis
) -> None:
    job = submit(prompt="hi")
    claims(connection, "first").take(1)
    old = connection.zrange(REGISTRY, 0, -1)
    clean_up(connection)
    (claimed,) = claims(connection, "second").take(1)
    # given a lease of the first worker that is still listed
    connection.zadd(REGISTRY, {old[0]: 1})
    connection.sadd("rq:worker:first:executions", old[0])

    assert reap(connection, "first") == 0

    assert (job.status(), queued(connection)) == ("in_progress", [])
    assert end(connection, claimed)[0] == b"ended"


@pytest.mark.parametrize(
    ("lives", "in_flight", "attempt"),
    [
        (True, None, 1),
        (False, None, 2),
        (False, "", 1),
        (False, "{id}", 2),
    ],
    ids=["alive", "dead", "dead, it only waited", "dead, it was generated"],
)
def test_what_rq_puts_back_was_an_attempt_where_its_worker_died_of_it(
    redis_url: str, connection: Redis, lives: bool, in_flight: str | None, attempt: int
) -> None:
    job = submit(prompt="hi")
    claims(connection, "holder", lives=lives).take(1)
    if in_flight is not None:
        connection.set(keys.in_flight("holder"), in_flight.format(id=job.id))
    clean_up(connection)

    (taken,) = claims(connection, "other").take(1)

    assert taken.attempt == attempt
    assert retries_left(connection, job) == 3 - attempt + RECOVERY_RETRIES


def test_leases_are_taken_at_the_second_look_if_nobody_has_renewed_them(
    redis_url: str, connection: Redis
) -> None:
    """So a Redis that was away, or a machine that slept, costs none that is renewed afterwards."""
    dead, living = submit(prompt="dead"), submit(prompt="living")
    holder = claims(connection, "holder")
    first, second = holder.take(2)
    now = 0.0
    expired = ExpiredLeases(connection, holder.queues, patience=30.0, clock=lambda: now)

    def end_at(job: ClaimedJob, seconds: float) -> None:
        connection.zadd(REGISTRY, {f"{job.id}:{job.lease.execution_id}": EPOCH + seconds})

    end_at(first, 1)
    end_at(second, 1)
    assert expired.give_back() == 0
    now = 29.0
    end_at(second, 2)  # renewed, though too late again
    assert expired.give_back() == 0
    now = 30.0
    assert expired.give_back() == 1
    assert (dead.status(), living.status()) == ("queued", "in_progress")
    now = 59.0
    assert expired.give_back() == 1
    assert living.status() == "queued"


@pytest.mark.parametrize("step", [300, -300])
def test_a_clock_of_redis_that_is_set_makes_no_lease_longer_or_shorter(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    job = submit(prompt="hi")
    holder = claims(connection, "holder")
    holder.take(1)
    now = 0.0
    expired = ExpiredLeases(connection, holder.queues, patience=30.0, clock=lambda: now)
    assert expired.give_back() == 0

    set_at = redis_time(connection) + step
    monkeypatch.setattr(recovery, "redis_time", lambda _: set_at)

    now = 60.0  # the lease had lasted for a while when it was first seen
    assert expired.give_back() == 0
    now = 90.5
    assert expired.give_back() == 1
    assert job.status() == "queued"


def test_moments_are_written_as_python_writes_them(connection: Redis) -> None:
    each = "local told = {} for i, time in ipairs(ARGV) do told[i] = utc(time) end return told"
    moments = [0, 951_782_399, 951_782_400, 1_709_164_800, 1_795_891_477, 4_107_542_399, 2**33]
    told = connection.register_script(script_of() + each)(args=moments)
    expected = [f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%fZ}" for at in moments]
    assert [one.decode() for one in told] == expected
