"""`submit_many` with idempotency keys: many jobs at once, none twice."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from batch_helpers import batch_lines
from redis import Redis
from rq import Queue

from mlx_rq import IdempotencyConflict, RequestError, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.enqueue import JOBS_PER_STEP
from mlx_rq.jobs.queue.payload import SERIALIZER


def bodies(count: int) -> list[dict[str, Any]]:
    return [line["body"] for line in batch_lines(count)]


def names(count: int) -> list[str]:
    return [f"key {number}" for number in range(count)]


def queued(connection: Redis) -> list[str]:
    queue = Queue(
        keys.queue_name("default", "default"), connection=connection, serializer=SERIALIZER
    )
    return queue.job_ids


class TestWithKeys:
    def test_a_second_call_finds_the_jobs_of_the_first(
        self, redis_url: str, connection: Redis
    ) -> None:
        count = JOBS_PER_STEP + 3
        first = submit_many(bodies(count), idempotency_keys=names(count))
        second = submit_many(bodies(count), idempotency_keys=names(count))
        assert second == first
        assert queued(connection) == [job.id for job in first]

    def test_only_what_is_new_is_enqueued_and_the_order_is_kept(
        self, redis_url: str, connection: Redis
    ) -> None:
        old = submit_many(bodies(4)[1::2], idempotency_keys=names(4)[1::2])
        jobs = submit_many(bodies(4), idempotency_keys=names(4))
        assert jobs[1::2] == old
        assert queued(connection) == [old[0].id, old[1].id, jobs[0].id, jobs[2].id]

    def test_a_job_of_submit_is_found_as_well(self, redis_url: str) -> None:
        job = submit(bodies(1)[0], idempotency_key="key 0")
        assert submit_many(bodies(2), idempotency_keys=names(2))[0] == job

    def test_a_conflict_leaves_its_transaction_out(self, redis_url: str, connection: Redis) -> None:
        submit({"prompt": "Another body."}, idempotency_key="key 1")
        before = queued(connection)
        with pytest.raises(IdempotencyConflict, match="key 1"):
            submit_many(bodies(3), idempotency_keys=names(3))
        assert queued(connection) == before

    def test_many_callers_at_once_make_one_set_of_jobs(
        self, redis_url: str, connection: Redis
    ) -> None:
        def call(_: int) -> Sequence[str]:
            return [job.id for job in submit_many(bodies(50), idempotency_keys=names(50))]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(call, range(8)))
        assert all(ids == answers[0] for ids in answers)
        assert sorted(queued(connection)) == sorted(answers[0])

    @pytest.mark.parametrize("wrong", [[], ["a"], ["a", "a"], ["a", "b", "c"]])
    def test_every_body_needs_a_key_of_its_own(
        self, redis_url: str, connection: Redis, wrong: list[str]
    ) -> None:
        with pytest.raises(RequestError, match="expected 2 different keys") as refused:
            submit_many(bodies(2), idempotency_keys=wrong)
        assert refused.value.param == "idempotency_keys"
        assert queued(connection) == []
