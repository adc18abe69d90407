"""The operator's limits: new jobs are refused whole, whoever brings them, and nothing else is."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_lines, echo, write_jsonl
from fakes import PATIENCE, FakeEngine, RunningWorker, eventually
from redis import Redis
from rq import Queue

from mlx_rq import (
    IdempotencyConflict,
    QueueFull,
    RedisUnavailable,
    RequestError,
    submit,
    submit_many,
)
from mlx_rq.jobs.batch.flight import Flight
from mlx_rq.jobs.batch.lines import BatchFile, Line
from mlx_rq.jobs.queue import enqueue as enqueue_module
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.enqueue import JOBS_PER_STEP
from mlx_rq.jobs.queue.limits import Limits, limits_in_use, read_limits, set_limits
from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.jobs.queue.payload import SERIALIZER

HI = [{"role": "user", "content": "Say hi."}]


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {number}."} for number in range(count)]


def waiting(connection: Redis) -> int:
    waits: int = limits_in_use(connection)["jobs"]["waiting"]
    return waits


def records(connection: Redis) -> set[bytes]:
    """All that is in Redis, but for the limits."""
    return set(connection.scan_iter("*")) - {keys.LIMITS.encode()}


class TestJobs:
    def test_as_many_wait_as_the_limit_says_and_no_more(
        self, redis_url: str, connection: Redis
    ) -> None:
        set_limits(connection, {"jobs": 2})
        submit(messages=HI)
        submit(messages=HI, model="another", priority="high")
        before = records(connection)
        with pytest.raises(QueueFull) as refused:
            submit(messages=HI)
        assert refused.value.error == {
            "message": "The queue is full: 2 jobs wait, 1 would come, and the limit is 2. Nothing "
            "was enqueued. Try again later; whoever runs the queue sets the limit with "
            "`mlx-rq limits --jobs`.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        assert records(connection) == before

    def test_it_is_a_request_error_to_those_who_catch_that(self) -> None:
        assert issubclass(QueueFull, RequestError)

    @pytest.mark.parametrize("count", [4, JOBS_PER_STEP + 1])
    def test_many_are_taken_all_or_none(
        self, redis_url: str, connection: Redis, count: int
    ) -> None:
        set_limits(connection, {"jobs": count - 1})
        with pytest.raises(QueueFull, match=f"0 jobs wait, {count} would come, .* {count - 1}"):
            submit_many(bodies(count))
        assert records(connection) == set()
        set_limits(connection, {"jobs": count})
        assert len(submit_many(bodies(count))) == waiting(connection) == count

    def test_what_is_found_by_its_key_needs_no_room(
        self, redis_url: str, connection: Redis
    ) -> None:
        set_limits(connection, {"jobs": 2})
        first = submit_many(bodies(2), idempotency_keys=["a", "b"])
        assert submit_many(bodies(2), idempotency_keys=["a", "b"]) == first
        with pytest.raises(QueueFull):
            submit_many(bodies(3), idempotency_keys=["a", "b", "c"])
        assert not connection.exists(keys.idempotency("c"))

    def test_room_is_made_by_an_end(self, redis_url: str, connection: Redis) -> None:
        set_limits(connection, {"jobs": 1})
        submit(messages=HI).cancel()
        submit(messages=HI)

    def test_a_job_that_is_generated_does_not_wait(
        self,
        redis_url: str,
        connection: Redis,
        running_worker: Callable[..., AbstractContextManager[RunningWorker]],
    ) -> None:
        set_limits(connection, {"jobs": 1})
        engine = FakeEngine(hold=True)
        with running_worker(engine) as worker:
            held = submit(messages=HI)
            engine.wait_for_tasks(1)
            worker.claim_no_more()
            submit(messages=HI)
            # The worker gives back what it holds: that is taken, whatever the limit.
            worker.stop_at_once()
        assert held.status() == "queued"
        assert waiting(connection) == 2

    def test_foreign_queues_do_not_count(self, redis_url: str, connection: Redis) -> None:
        mail = Queue("mail", connection=connection, serializer=SERIALIZER)
        mail.enqueue("time.time")
        set_limits(connection, {"jobs": 1})
        submit(messages=HI)

    def test_producers_that_come_together_do_not_pass_it_together(
        self, redis_url: str, connection: Redis
    ) -> None:
        set_limits(connection, {"jobs": 10})
        barrier = threading.Barrier(8)

        def produce(_: int) -> int:
            barrier.wait()
            taken = 0
            for _ in range(5):
                try:
                    submit(messages=HI)
                    taken += 1
                except QueueFull:
                    pass
            return taken

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(produce, range(8))) == 10
        assert waiting(connection) == 10


class TestReservations:
    """What comes in parts has its place from the first part on."""

    @pytest.fixture
    def halfway(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
        """Submits so many jobs, and does something once the first part is in."""

        def submit_in_parts(count: int, then: Callable[[], Any], **options: Any) -> list[Any]:
            run, pending = enqueue_module._Step.run, [then]

            def run_then(*arguments: Any, **how: Any) -> Any:
                reply = run(*arguments, **how)
                if pending:
                    pending.pop()()
                return reply

            monkeypatch.setattr(enqueue_module._Step, "run", run_then)
            return submit_many(bodies(count), **options)

        return submit_in_parts

    def test_others_do_not_take_its_place_between_two_parts(
        self, connection: Redis, halfway: Callable[..., list[Any]]
    ) -> None:
        most = JOBS_PER_STEP + 2
        set_limits(connection, {"jobs": most})

        def come_between() -> None:
            submit(messages=HI)
            with pytest.raises(QueueFull, match=f"{most} jobs wait, 1 would come"):
                submit(messages=HI)

        assert len(halfway(most - 1, come_between)) == most - 1
        assert waiting(connection) == most
        assert not connection.exists("mlx-rq:reserved")

    def test_bytes_are_kept_too(self, connection: Redis, halfway: Callable[..., list[Any]]) -> None:
        used = limits_in_use(connection)["bytes"]["used"]
        set_limits(connection, {"bytes": used + 5_000_000})
        told: list[str] = []

        def come_between() -> None:
            told.append(connection.hvals("mlx-rq:reserved")[0].decode())
            connection.hset("mlx-rq:reserved", "another", "1 5000000 9999999999")
            with pytest.raises(QueueFull, match=r"Redis uses [\d,]+ bytes"):
                submit(messages=HI)

        halfway(JOBS_PER_STEP + 3, come_between)
        jobs, size, _ = map(int, told[0].split())
        assert jobs == 3
        assert size >= 3 * len(b'{"prompt": "Say 500."}')

    def test_the_place_of_a_producer_that_is_gone_is_free_again(
        self, redis_url: str, connection: Redis
    ) -> None:
        set_limits(connection, {"jobs": 2})
        seconds, _ = connection.time()
        connection.hset("mlx-rq:reserved", "gone", f"7 700 {seconds - 1}")
        connection.hset("mlx-rq:reserved", "odd", "nonsense")
        connection.hset("mlx-rq:reserved", "goes on", f"1 70 {seconds + 50}")
        submit(messages=HI)
        with pytest.raises(QueueFull, match="2 jobs wait"):
            submit(messages=HI)
        assert connection.hkeys("mlx-rq:reserved") == [b"goes on"]

    def test_one_that_ends_with_a_conflict_keeps_no_place(
        self, connection: Redis, halfway: Callable[..., list[Any]]
    ) -> None:
        set_limits(connection, {"jobs": 10_000})
        names = [str(number) for number in range(JOBS_PER_STEP + 1)]

        def use_the_last_key() -> None:
            submit(messages=HI, idempotency_key=names[-1])

        with pytest.raises(IdempotencyConflict):
            halfway(len(names), use_the_last_key, idempotency_keys=names)
        assert not connection.exists("mlx-rq:reserved")

    def test_without_limits_none_is_kept(
        self, connection: Redis, halfway: Callable[..., list[Any]]
    ) -> None:
        halfway(JOBS_PER_STEP + 1, lambda: records(connection))
        assert not connection.exists("mlx-rq:reserved")


class TestBytes:
    def test_new_jobs_are_refused_beyond_the_memory(
        self, redis_url: str, connection: Redis
    ) -> None:
        used = limits_in_use(connection)["bytes"]["used"]
        set_limits(connection, {"bytes": 2 * used})
        submit(messages=HI)
        before = records(connection)
        set_limits(connection, {"bytes": used // 2})
        with pytest.raises(QueueFull, match=r"Redis uses [\d,]+ bytes, bodies of 50 would come"):
            submit(messages=HI)
        assert records(connection) == before

    def test_what_would_come_counts(self, redis_url: str, connection: Redis) -> None:
        used = limits_in_use(connection)["bytes"]["used"]
        set_limits(connection, {"bytes": used + 2_000_000})
        with pytest.raises(QueueFull) as refused:
            submit(prompt="x" * 3_000_000)
        assert 0 < refused.value.share < 1
        submit(prompt="x")

    def test_results_still_fit(
        self,
        redis_url: str,
        connection: Redis,
        running_worker: Callable[..., AbstractContextManager[RunningWorker]],
    ) -> None:
        job = submit(messages=HI)
        set_limits(connection, {"bytes": 1})
        with running_worker():
            assert job.result(PATIENCE)["object"] == "chat.completion"


class TestTheLimits:
    def test_there_are_none_at_first(self, connection: Redis) -> None:
        assert read_limits(connection) == Limits(jobs=None, bytes=None)

    def test_each_is_set_and_removed_alone(self, connection: Redis) -> None:
        set_limits(connection, {"jobs": 5, "bytes": 7})
        set_limits(connection, {"jobs": None})
        assert read_limits(connection) == Limits(jobs=None, bytes=7)
        set_limits(connection, {})
        assert read_limits(connection) == Limits(jobs=None, bytes=7)

    def test_one_that_is_no_number_is_said(self, redis_url: str, connection: Redis) -> None:
        connection.hset(keys.LIMITS, "jobs", "many")
        with pytest.raises(RequestError, match=r"Invalid limit 'jobs' in Redis: .* 'many' instead"):
            read_limits(connection)
        with pytest.raises(RedisUnavailable, match="the limit 'jobs' is no number: many"):
            submit(messages=HI)

    def test_without_them_a_submission_is_one_round_trip(
        self, redis_url: str, connection: Redis
    ) -> None:
        submit(messages=HI)  # loads the script

        connection.config_resetstat()
        submit(messages=HI)
        submit_many(bodies(3), idempotency_keys=["a", "b", "c"])
        calls = {name: stats["calls"] for name, stats in connection.info("commandstats").items()}
        # What the script calls is counted, too, but has no way of its own.
        called = {"hset", "rpush", "ltrim", "sadd", "exists", "hmget", "expire"}
        called |= {"hget", "zadd", "zrange", "time"}
        ours = {f"cmdstat_{name}" for name in called} | {"cmdstat_config|resetstat"}
        assert {name: calls[name] for name in calls.keys() - ours} == {"cmdstat_evalsha": 2}


class TestABatch:
    @pytest.fixture
    def source(self, tmp_path: Path) -> BatchFile:
        path = write_jsonl(tmp_path / "in.jsonl", batch_lines(30))
        return BatchFile(path, path.name, {})

    def test_it_waits_for_room_and_loses_no_line(
        self,
        redis_url: str,
        connection: Redis,
        source: BatchFile,
        running_worker: Callable[..., AbstractContextManager[RunningWorker]],
    ) -> None:
        set_limits(connection, {"jobs": 4})
        others = submit_many({**body, "model": "nobody's"} for body in bodies(4))
        flight = Flight(JobOptions(), redis_url=redis_url, key_of=lambda line: str(line.custom_id))
        turns = flight.run(source)
        assert next(turns) == []
        assert flight.note is not None
        assert flight.note.startswith("The queue is full: 4 jobs wait, 30 would come")
        assert waiting(connection) == 4

        others[0].cancel()  # now there is room for one at a time
        eventually(lambda: not next(turns) and waiting(connection) == 4, "the first line")
        assert flight.running == 1

        with running_worker(FakeEngine(answer_with=echo)):
            others[1].cancel()
            ended = [item for some in turns for item in some]
        assert [item.line.custom_id for item in ended] == [f"r{number}" for number in range(30)]
        assert [item.error for item in ended] == [None] * 30

    def test_it_reads_no_further_while_it_waits(
        self, redis_url: str, connection: Redis, source: BatchFile
    ) -> None:
        set_limits(connection, {"jobs": 1})
        read: list[Line] = []
        turns = Flight(JobOptions(), redis_url=redis_url, window=4).run(
            read.append(line) or line
            for line in source  # type: ignore[func-returns-value]
        )
        for _ in range(3):
            next(turns)
        assert (len(read), waiting(connection)) == (4, 1)
