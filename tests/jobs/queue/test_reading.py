"""What lies in Redis may be anything: it is read as ours, or is nothing, or a failed job."""

import json
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_lines, read_jsonl, write_jsonl
from click.testing import CliRunner
from fakes import PATIENCE, StartWorker
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import Job, JobFailed, JobNotFound, as_completed, submit, submit_many
from mlx_rq.jobs.batch import flight
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.jobs.queue.limits import Limits, read_limits, set_limits
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.webhooks import claim_due
from mlx_rq.worker.cli.main import main

HI = [{"role": "user", "content": "Say hi."}]
QUEUE = keys.queue_name("default", "default")

ODD_RESULTS: dict[str, bytes | None] = {
    "another type": None,
    "no text": b"\xff\xfe",
    "no JSON": b"notjson",
    "null": b"null",
    "array": b"[]",
    "nothing in it": b"{}",
    "nested too deep": b"[" * 100_000,
    "no number": b'{"object": "chat.completion", "usage": {"prompt_tokens": NaN}}',
    "too large a number": b'{"object": "chat.completion", "created": 1e999}',
    "half a pair": b'{"object": "\\ud800"}',
    "no choices": b'{"object": "chat.completion"}',
    "choices of nothing": b'{"object": "chat.completion", "choices": []}',
    "no text in it": b'{"object": "text_completion", "choices": [{"text": 5}]}',
    "usage of words": b'{"object": "chat.completion", "choices": [], "usage": "much"}',
    "error of nothing": b'{"error": null}',
    "error of words": b'{"error": "bad"}',
    "error without words": b'{"error": {"code": "x"}}',
}


def spoil(connection: Redis, job: Job, value: bytes | None) -> None:
    """Puts something else in the place of a job's result."""
    name = keys.result(job.id)
    connection.delete(name)
    connection.rpush(name, "x") if value is None else connection.set(name, value)


@pytest.fixture
def done(start_worker: StartWorker) -> list[Job]:
    """Two jobs that were answered."""
    start_worker()
    jobs = submit_many([{"messages": HI}] * 2)
    for job in jobs:
        job.result(PATIENCE)
    return jobs


class TestAResultThatCannotBeRead:
    def test_is_that_of_a_failed_job(self, done: list[Job], connection: Redis) -> None:
        spoilt, other = done
        for value in ODD_RESULTS.values():
            spoil(connection, spoilt, value)
            for ask in (spoilt.result, spoilt.parsed):
                with pytest.raises(JobFailed, match=f"cannot be read: mlx-rq:result:{spoilt.id}"):
                    ask(timeout=0)
            assert spoilt.status() == spoilt.info()["status"] == "failed"
            assert set(as_completed(done, timeout=PATIENCE)) == set(done)
            assert CliRunner().invoke(main, ["result", spoilt.id]).exit_code == 1
        assert other.result(0)["id"] == f"chatcmpl-{other.id}"
        assert other.status() == "completed"

    def test_says_so_in_an_error_object(self, done: list[Job], connection: Redis) -> None:
        spoil(connection, done[0], b"[1]")
        with pytest.raises(JobFailed) as failed:
            done[0].result(0)
        assert failed.value.error == {
            "message": f"The result of the job cannot be read: mlx-rq:result:{done[0].id} holds "
            "no JSON object.",
            "type": "server_error",
            "param": None,
            "code": "unreadable_result",
        }

    def test_an_answer_of_a_kind_that_is_not_known_is_given_as_it_is(
        self, done: list[Job], connection: Redis
    ) -> None:
        spoil(connection, done[0], b'{"object": "of.tomorrow"}')
        assert done[0].result(0) == {"object": "of.tomorrow"}
        assert done[0].status() == "completed"

    @pytest.mark.parametrize("value", [None, b"null"])
    def test_fails_its_line_of_a_batch_and_no_other(
        self,
        redis_url: str,
        connection: Redis,
        start_worker: StartWorker,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        value: bytes | None,
    ) -> None:
        # given a result that is spoilt before the batch reads it
        take = flight.Flight._take_results

        def spoil_then_take(one: Any, job_ids: Any) -> None:
            for job_id in job_ids:
                job = Job(job_id)
                if job_id in one._running and one._running[job_id][1].custom_id == "r1":
                    spoil(connection, job, value)
            take(one, job_ids)

        monkeypatch.setattr(flight.Flight, "_take_results", spoil_then_take)
        start_worker()
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(3))
        out = tmp_path / "out.jsonl"
        run = CliRunner().invoke(main, ["batch", str(source), "-o", str(out)])
        assert isinstance(run.exception, SystemExit), run.output
        records = {record["custom_id"]: record for record in read_jsonl(out)}
        records |= {r["custom_id"]: r for path in tmp_path.glob("*err*") for r in read_jsonl(path)}
        response = records.pop("r1")["response"]
        assert response["status_code"] == 502
        assert response["body"]["error"]["code"] == "unreadable_result"
        assert [record["response"]["status_code"] for record in records.values()] == [200, 200]


SHARED = (
    keys.COMPLETIONS,
    keys.WEBHOOKS,
    *(f"rq:{name}:{QUEUE}" for name in ("wip", "queue", "canceled", "finished", "failed")),
    "rq:results:{id}",
    "rq:executions:{id}",
    "mlx-rq:result:{id}",
)


class TestEnds:
    @pytest.mark.parametrize("key", SHARED)
    def test_a_cancellation_ends_the_job_whatever_a_key_holds(
        self, redis_url: str, connection: Redis, key: str
    ) -> None:
        job = submit(messages=HI, webhook="https://example.org/hook")
        connection.delete(key.format(id=job.id))
        connection.hset(key.format(id=job.id), "x", "y")
        assert job.cancel() is True
        assert job.cancel() is False
        assert job.status() == "cancelled"
        assert connection.zcard(f"rq:canceled:{QUEUE}") == 1
        assert connection.zcard(keys.WEBHOOKS) == 1
        assert list(as_completed([job], timeout=PATIENCE)) == [job]
        job.delete()
        with pytest.raises(JobNotFound):
            job.status()

    @pytest.mark.parametrize("result_ttl", ["-1", "soon", "nan", "9" * 40])
    def test_a_time_to_live_that_is_none(
        self, redis_url: str, connection: Redis, result_ttl: str
    ) -> None:
        job = submit(messages=HI)
        connection.hset(RQJob.key_for(job.id), "result_ttl", result_ttl)
        assert job.cancel() is True
        assert 0 < connection.ttl(keys.result(job.id)) <= 7 * 24 * 3600

    def test_a_status_that_is_none_of_rqs_ends_with_the_job(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        connection.hset(RQJob.key_for(job.id), "status", "notjson")
        assert job.status() == "queued"
        start_worker()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert job.status() == "completed"


class TestAQueueThatIsNoList:
    @pytest.mark.parametrize("then", ["submit", "claim"])
    def test_is_made_anew_of_what_waits(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, then: str
    ) -> None:
        jobs = submit_many([{"prompt": f"{number}"} for number in range(3)])
        connection.set(f"rq:queue:{QUEUE}", "x")
        assert waiting_in(connection, [QUEUE]) == [0]
        if then == "submit":
            jobs.append(submit(prompt="last"))
            assert waiting_in(connection, [QUEUE]) == [4]
        worker = start_worker()
        for job in jobs:
            assert job.result(PATIENCE)["id"] == f"cmpl-{job.id}"
        assert sorted(task.id for task in worker.engine.added) == sorted(job.id for job in jobs)


@pytest.mark.parametrize(
    "key", ["rq:queues", keys.wake_up("default"), keys.idempotency("k"), keys.LIMITS]
)
def test_a_submission_makes_room(redis_url: str, connection: Redis, key: str) -> None:
    connection.xadd(key, {"x": "y"})
    job = submit(messages=HI, idempotency_key="k")
    assert submit(messages=HI, idempotency_key="k") == job
    assert waiting_in(connection, [QUEUE]) == [1]


def test_limits_of_another_type_are_told_and_can_be_set(redis_url: str, connection: Redis) -> None:
    connection.set(keys.LIMITS, "x")
    (note,) = overview(connection)["notes"]
    assert note.startswith("Invalid limits in Redis: mlx-rq:limits holds another type")
    set_limits(connection, {"jobs": 3})
    assert read_limits(connection) == Limits(jobs=3)


@pytest.mark.parametrize("tries", ["many", "9" * 40, None])
def test_webhooks_whose_records_are_odd_are_claimed(
    redis_url: str, connection: Redis, tries: str | None
) -> None:
    connection.zadd(keys.WEBHOOKS, {"job": 1, b"\xff": 1})
    if tries is None:
        connection.set(keys.WEBHOOK_TRIES, "x")
    else:
        connection.hset(keys.WEBHOOK_TRIES, "job", tries)
    assert claim_due(connection, 5) == [("job", 1)]
    assert connection.zrange(keys.WEBHOOKS, 0, -1) == [b"job"]
    connection.set(keys.WEBHOOKS, "x")
    assert claim_due(connection, 5) == []


RECORDS: dict[str, Any] = {
    "no totals": {"serves": ["m"]},
    "totals of nothing": {"serves": ["m"], "totals": None},
    "numbers of words": {"serves": ["m"], "running": "x", "totals": {"tasks": "many"}},
    "endless": {"serves": ["m"], "capacity": 10**400},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_a_worker_that_does_not_say_all_is_shown(
    redis_url: str, connection: Redis, record: dict[str, Any]
) -> None:
    connection.sadd("rq:workers", "rq:worker:w", b"\xff")
    connection.set(keys.worker("w"), json.dumps(record))
    (worker,) = overview(connection)["workers"]
    assert (worker["name"], worker["serves"], worker["running"]) == ("w", ["m"], 0)
    assert worker["totals"]["tasks"] == worker["totals"]["prompt_tokens"] == 0
    assert CliRunner().invoke(main, ["status"]).exit_code == 0
