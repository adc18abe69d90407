"""What `mlx-rq status` tells beside counts: ages, estimates, what runs, what failed last."""

from typing import Any

from fakes import PATIENCE, FakeEngine, StartWorker, eventually, failure
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq import submit
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.status import eta, sharing, status

HI = [{"role": "user", "content": "Say hi."}]


def queue(model: str, priority: str, queued: int, in_progress: int = 0) -> dict[str, Any]:
    return {"model": model, "priority": priority, "queued": queued, "in_progress": in_progress}


def worker(pace: float | None, *serves: str, paused: str | None = None) -> dict[str, Any]:
    return {"serves": serves, "paused": paused, "rates": {"jobs_at_work": pace}}


class TestEta:
    QUEUES = (queue("m", "high", 10), queue("m", "default", 20, 4), queue("n", "low", 7))

    def test_what_is_more_urgent_or_runs_goes_before(self) -> None:
        workers = [worker(2.0, "m"), worker(1.0, "m"), worker(None, "m")]
        high, normal, other = (eta(one, self.QUEUES, workers) for one in self.QUEUES)
        assert (high, normal, other) == (round(14 / 3, 1), round(34 / 3, 1), None)

    def test_another_model_of_the_same_worker_counts(self) -> None:
        assert eta(self.QUEUES[2], self.QUEUES, [worker(2.0, "m", "n")]) == 41 / 2

    def test_it_is_unknown_where_nobody_works_or_has_shown_a_pace(self) -> None:
        for workers in ([], [worker(None, "m")], [worker(2.0, "m", paused="on battery")]):
            assert eta(self.QUEUES[0], self.QUEUES, workers) is None
        assert eta(queue("m", "high", 0), self.QUEUES, [worker(2.0, "m")]) is None


def test_sharing_counts_what_was_not_computed() -> None:
    counts = [(100, 40, 50), (300, 60, 70)]
    names = ("prompt_tokens", "distinct_tokens", "prefilled_tokens")
    shared = sharing([{"totals": dict(zip(names, one, strict=True))} for one in counts])
    assert (shared["saved_tokens"], shared["ratio"]) == (280, 1.2)


def test_the_oldest_is_the_first_that_still_waits(redis_url: str, connection: Redis) -> None:
    gone, oldest, _ = (submit(messages=HI, model="m") for _ in range(3))
    for job, age in ((gone, 500), (oldest, 100)):
        meta = b'{"submitted_at":%f}' % (connection.time()[0] - age)
        connection.hset(RQJob.key_for(job.id), "meta", meta)
    gone.cancel()
    connection.lpush(Queue(keys.queue_name("m", "default"), connection=connection).key, gone.id)
    (seen,) = status(connection)["queues"]
    assert 99 <= seen["oldest_seconds"] < 160


def test_the_oldest_may_wait_in_a_worker(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine("m", capacity=1, hold=True)
    jobs = [submit(messages=HI, model="m") for _ in range(3)]
    for job, age in zip(jobs, (500, 100, 50), strict=True):
        meta = b'{"submitted_at":%f}' % (connection.time()[0] - age)
        connection.hset(RQJob.key_for(job.id), "meta", meta)

    def oldest() -> float:
        (queue,) = status(connection)["queues"]
        return queue["oldest_seconds"] or 0.0

    start_worker(engine)
    engine.wait_for_tasks(3)
    eventually(lambda: 99 <= oldest() < 160, "the age of the first that has not begun")
    engine.release(jobs[0].id, jobs[1].id)
    eventually(lambda: oldest() == 0, "nothing waits")


def test_rows_and_failures_are_named(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine(
        "m",
        hold=True,
        refuse=lambda task: failure("no", "Because.") if task.request.seed == 1 else None,
    )
    running = start_worker(engine)
    refused = submit(messages=HI, model="m", seed=1)
    eventually(lambda: refused.status() == "failed")
    job = submit(messages=HI, model="m")
    engine.wait_for_tasks(2)
    engine.count(job.id, 17)
    eventually(lambda: status(connection)["workers"][0]["rows"] == [{"id": job.id, "tokens": 17}])

    seen = status(connection)
    (failed,) = seen["failures"]
    assert failed.pop("ended_at") == refused.info()["ended_at"]
    assert failed == {"id": refused.id, "model": "m", "code": "no", "message": "Because."}
    assert seen["workers"][0]["chip"]

    engine.release()
    job.result(PATIENCE)
    eventually(lambda: status(connection)["workers"][0]["rows"] == [])
    running.stop()
    assert not connection.exists(keys.live(running.name))


def test_records_that_are_spoilt_spoil_nothing_else(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    running = start_worker(FakeEngine("m"), name="w")
    running.stop()
    job = submit(messages=HI, model="m")
    connection.sadd("rq:workers", "rq:worker:w")
    connection.set(keys.worker("w"), '{"serves": ["m"], "running": 3}')
    connection.set(
        keys.live("w"),
        '{"running": "x", "rates": {"now": 7, "jobs_at_work": "x"}, "rows": {"a": "b"}, '
        '"waiting_since": {"a": "b"}}',
    )
    connection.set(RQJob.key_for(job.id), "no hash")
    seen = status(connection)
    (one,) = seen["workers"]
    assert (one["rows"], one["running"]) == ([], 3)
    assert one["rates"]["now"]["jobs"] == 0
    connection.delete(keys.live("w"))
    connection.rpush(keys.live("w"), "no text")
    assert status(connection)["workers"][0]["rows"] == []
    assert seen["queues"][0]["oldest_seconds"] is None
