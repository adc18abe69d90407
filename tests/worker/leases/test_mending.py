"""What is lost of a long queue, its list or its backlog, is made anew in pieces."""

from collections import Counter

import pytest
from redis import Redis
from rq import Queue

from mlx_rq import Job, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import lost_from, waiting_in
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.worker.leases.claim import Claims

QUEUE = keys.queue_name("default", "default")
LIST = f"rq:queue:{QUEUE}"
ROUNDS = (f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}")
PIECE = 500
"""As in `backlog.lua`."""


def claims_of(connection: Redis, max_wait: float = 30.0) -> Claims:
    connection.set(keys.worker("w"), "{}")  # it lives
    return Claims(connection, "w", ["default"], lease_seconds=60, max_wait=max_wait)


@pytest.fixture
def claims(connection: Redis) -> Claims:
    return claims_of(connection)


@pytest.fixture
def jobs(redis_url: str) -> list[Job]:
    """More than two pieces."""
    return submit_many([{"prompt": f"Say {number}."} for number in range(1300)])


def drain(claims: Claims) -> Counter[str]:
    taken: Counter[str] = Counter()
    while some := claims.take(256):
        taken.update(job.id for job in some)
    return taken


@pytest.mark.parametrize("how", ["gone", "another type"])
def test_a_list(connection: Redis, jobs: list[Job], claims: Claims, how: str) -> None:
    jobs.pop().cancel()
    connection.delete(LIST)
    if how == "another type":
        connection.set(LIST, "x")
    jobs.append(submit(prompt="before anybody has seen it"))

    taken = Counter(job.id for job in claims.take(16))
    assert PIECE - 16 <= connection.llen(LIST) <= PIECE + 1
    jobs.append(submit(prompt="meanwhile"))
    taken += drain(claims)

    assert taken == dict.fromkeys((job.id for job in jobs), 1)
    assert connection.exists(LIST, *ROUNDS) == 0
    assert waiting_in(connection, [QUEUE]) == [0]
    assert lost_from(connection, [QUEUE])[0].jobs == 0


def test_a_list_that_is_made_anew_at_once_has_nothing_stale(
    connection: Redis, redis_url: str
) -> None:
    jobs = submit_many([{"prompt": f"Say {number}."} for number in range(600)])
    claims = claims_of(connection)
    taken = Counter(job.id for job in claims.take(256))  # out of the middle
    connection.delete(LIST)
    connection.set(LIST, "x")
    jobs.append(submit(prompt="meanwhile"))

    assert waiting_in(connection, [QUEUE]) == [600 - 256 + 1]
    assert taken + drain(claims) == dict.fromkeys((job.id for job in jobs), 1)


def test_a_list_of_what_waits_in_two_rounds(connection: Redis, redis_url: str) -> None:
    claims = claims_of(connection, max_wait=0)
    jobs = submit_many([{"prompt": f"Say {number}."} for number in range(600)])
    taken = Counter(job.id for job in claims.take(1))
    jobs += submit_many([{"prompt": f"Say {number}."} for number in range(400)])
    assert [connection.zcard(name) for name in ROUNDS] == [599, 400]
    connection.delete(LIST)
    taken += drain(claims)
    assert taken == dict.fromkeys((job.id for job in jobs), 1)


def test_what_was_set_aside_may_be_lost_too(
    connection: Redis, jobs: list[Job], claims: Claims
) -> None:
    connection.delete(LIST)
    claims.take(16)
    connection.set(f"mlx-rq:backlog-unlisted:{QUEUE}", "x")
    connection.delete(f"mlx-rq:backlog-unlisted-next:{QUEUE}")
    assert len(drain(claims)) == PIECE - 16


def test_its_jobs_that_are_gone_are_counted(
    connection: Redis, jobs: list[Job], claims: Claims
) -> None:
    connection.delete(LIST, *(f"rq:job:{job.id}" for job in jobs[:600]))
    assert len(drain(claims)) == 700
    assert lost_from(connection, [QUEUE])[0].jobs == 600


def test_a_backlog(connection: Redis, jobs: list[Job], claims: Claims) -> None:
    connection.delete(*ROUNDS)

    taken = Counter(job.id for job in claims.take(16))
    assert sum(map(connection.zcard, ROUNDS)) == PIECE - 16
    jobs.append(submit(prompt="meanwhile"))
    taken += drain(claims)

    assert taken == dict.fromkeys((job.id for job in jobs), 1)
    assert waiting_in(connection, [QUEUE]) == [0]


def test_a_queue_that_rq_has_emptied_is_gone_through_in_pieces_too(
    connection: Redis, jobs: list[Job], claims: Claims
) -> None:
    claims.take(0)  # Redis knows the script now
    Queue(QUEUE, connection=connection, serializer=SERIALIZER).empty()
    connection.config_resetstat()

    assert claims.take(16) == []

    scripts = connection.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert scripts == 3  # 500, 500 and 300 jobs
    assert connection.exists(*ROUNDS) == 0
    assert lost_from(connection, [QUEUE])[0].jobs == 0
