"""Lines on their way through the queue: a bounded number, none lost, none twice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_line, batch_lines, echo, generated, write_jsonl
from fakes import PATIENCE, FakeEngine, RunningWorker, eventually, failure
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import Job, RedisUnavailable
from mlx_rq.jobs.batch import flight as batch_run
from mlx_rq.jobs.batch.flight import FORGET_SECONDS, Flight
from mlx_rq.jobs.batch.lines import BatchFile, Line, good_line
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.openai.answers import Usage
from mlx_rq.jobs.openai.errors import QueueFull, RequestError
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.options import JobOptions

Worker = Callable[..., AbstractContextManager[RunningWorker]]

STOPPED = RequestError("That is enough.", code="stopped")


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[int], list[Line]]:
    def make(count: int) -> list[Line]:
        path = write_jsonl(tmp_path / "in.jsonl", batch_lines(count))
        return list(BatchFile(path, path.name, {}))

    return make


Lines = Callable[[int], list[Line]]


def flight(redis_url: str, **options: Any) -> Flight:
    return Flight(JobOptions(priority="low"), redis_url=redis_url, **options)


def key_of(line: Line) -> str:
    return f"test-{line.custom_id}"


def patiently(turns: Iterator[list[Ended]]) -> Iterator[list[Ended]]:
    """The turns, but not for ever."""
    deadline = time.monotonic() + PATIENCE
    for some in turns:
        yield some
        assert time.monotonic() < deadline, "it goes on and on"


def flatten(turns: Iterator[list[Ended]]) -> list[Ended]:
    return [ended for some in patiently(turns) for ended in some]


def ids(ended: list[Ended]) -> list[str | None]:
    return [item.line.custom_id for item in ended]


def until(turns: Iterator[list[Ended]], happened: Callable[[], bool]) -> list[Ended]:
    """Takes turns until something has happened; returns what ended meanwhile."""
    ended: list[Ended] = []
    for some in patiently(turns):
        ended += some
        if happened():
            return ended
    raise AssertionError("it ended before it happened")


class TestTheWindow:
    def test_no_more_jobs_are_on_the_way_than_it_allows(
        self, redis_url: str, connection: Redis, lines: Lines, running_worker: Worker
    ) -> None:
        read = 0

        def source() -> Iterator[Line]:
            nonlocal read
            for line in lines(50):
                read += 1
                yield line

        engine = FakeEngine(hold=True, answer_with=echo)
        journey = flight(redis_url, window=8)
        with running_worker(engine, window=50):
            turns = journey.run(source())
            until(turns, lambda: len(engine.added) == 8)
            assert (journey.running, read) == (8, 8)
            for task_id in engine.wait_for_tasks(8)[:3]:
                engine.release(task_id)
            until(turns, lambda: len(engine.added) == 11)
            assert journey.running == 8
            engine.release()
            flatten(turns)
        assert len(engine.added) == 50

    def test_one_that_waits_for_its_turn_counts_as_on_the_way(
        self, redis_url: str, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(hold=True, answer_with=echo)
        journey = flight(redis_url, window=4)
        with running_worker(engine):
            turns = journey.run(lines(9))
            until(turns, lambda: len(engine.added) == 4)
            engine.release(*engine.wait_for_tasks(4)[1:])
            assert until(turns, lambda: journey.held == 3) == []
            assert len(engine.added) == 4
            engine.release()
            assert ids(flatten(turns)) == [f"r{number}" for number in range(9)]


class TestTheOrder:
    def test_of_finishing_gives_out_what_ends(
        self, redis_url: str, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(hold=True, answer_with=echo)
        journey = flight(redis_url, ordered=False)
        with running_worker(engine):
            turns = journey.run(lines(3))
            until(turns, lambda: len(engine.added) == 3)
            engine.release(engine.added[2].id)
            assert ids(until(turns, lambda: journey.running == 2)) == ["r2"]
            engine.release()
            assert sorted(map(str, ids(flatten(turns)))) == ["r0", "r1"]

    def test_a_line_that_is_refused_keeps_its_place(
        self, redis_url: str, tmp_path: Path, running_worker: Worker
    ) -> None:
        records = [batch_line("a"), batch_line("b", temperature=3), batch_line("c")]
        path = write_jsonl(tmp_path / "in.jsonl", records)
        with running_worker() as worker:
            ended = flatten(flight(redis_url).run(BatchFile(path, path.name, {})))
            assert len(worker.engine.added) == 2
        assert ids(ended) == ["a", "b", "c"]
        assert ended[1].error is not None
        assert ended[1].error["param"] == "temperature"
        assert ended[1].job_id is None


class TestWhatWasSubmittedBefore:
    def test_is_found_again_whether_it_has_ended_or_not(
        self, redis_url: str, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(hold=True, answer_with=echo)
        with running_worker(engine):
            killed = flight(redis_url, key_of=key_of).run(lines(6))
            until(killed, lambda: len(engine.added) == 6)
            done = engine.added[0].id
            engine.release(done)
            eventually(lambda: Job(done, redis_url).status() == "completed")
            killed.close()

            engine.release()
            ended = flatten(flight(redis_url, key_of=key_of).run(lines(8)))

        assert ids(ended) == [f"r{number}" for number in range(8)]
        assert set(generated(engine).values()) == {1}

    def test_an_end_that_the_stream_does_not_tell_is_seen(
        self,
        redis_url: str,
        connection: Redis,
        lines: Lines,
        running_worker: Worker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(batch_run, "_LOOK_SECONDS", 0.0)
        engine = FakeEngine(answer_with=echo)
        turns = flight(redis_url).run(lines(2))
        assert next(turns) == []
        with running_worker(engine):
            engine.wait_for_tasks(2)
            eventually(lambda: connection.xlen(keys.COMPLETIONS) == 2)
        connection.delete(keys.COMPLETIONS)
        assert ids(flatten(turns)) == ["r0", "r1"]


class TestWhatGoesWrong:
    @pytest.fixture(autouse=True)
    def _look_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_run, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(batch_run, "_RETRY_SECONDS", 0.0)

    def test_an_error_of_the_worker_is_the_end_of_its_line(
        self, redis_url: str, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(refuse=lambda task: failure("context_length_exceeded"))
        with running_worker(engine):
            (ended,) = flatten(flight(redis_url).run(lines(1)))
        assert ended.error is not None
        assert ended.error["code"] == "context_length_exceeded"

    def test_a_job_that_is_cancelled_has_ended(self, redis_url: str, lines: Lines) -> None:
        turns = flight(redis_url, key_of=key_of).run(lines(1))
        next(turns)
        (job_id,) = (
            key.removeprefix("rq:job:")
            for key in Redis.from_url(redis_url, decode_responses=True).keys("rq:job:*")
        )
        Job(job_id, redis_url).cancel()
        (ended,) = flatten(turns)
        assert ended.error is not None
        assert ended.error["type"] == "cancelled"

    def test_a_job_that_vanishes_is_an_error_of_its_line(
        self, redis_url: str, connection: Redis, lines: Lines
    ) -> None:
        turns = flight(redis_url).run(lines(2))
        next(turns)
        connection.flushall()
        ended = flatten(turns)
        assert [item.error and item.error["code"] for item in ended] == ["job_lost", "job_lost"]

    def test_without_a_worker_a_note_says_what_is_missing(
        self, redis_url: str, lines: Lines, running_worker: Worker
    ) -> None:
        journey = flight(redis_url)
        turns = journey.run(lines(1))
        until(turns, lambda: journey.note is not None)
        assert journey.note is not None
        assert "no live worker serves the model 'default'" in journey.note
        with running_worker(FakeEngine(answer_with=echo)):
            assert ids(flatten(turns)) == ["r0"]

    def test_a_redis_that_fails_meanwhile_is_asked_again(
        self,
        redis_url: str,
        lines: Lines,
        running_worker: Worker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        journey = flight(redis_url, key_of=key_of)
        whole = batch_run.enqueue
        calls = []

        def failing(*arguments: Any, **options: Any) -> Any:
            calls.append(whole(*arguments, **options))
            if len(calls) == 1:
                raise RedisUnavailable("No Redis: it went away before it could say so.")
            return calls[-1]

        monkeypatch.setattr(batch_run, "enqueue", failing)
        engine = FakeEngine(answer_with=echo)
        with running_worker(engine):
            assert ids(flatten(journey.run(lines(5)))) == [f"r{number}" for number in range(5)]
        assert set(generated(engine).values()) == {1}

    def test_a_line_that_only_redis_shows_to_be_wrong_ends_alone(
        self, redis_url: str, tmp_path: Path, running_worker: Worker
    ) -> None:
        lost = {"input": "And then?", "previous_response_id": f"resp_{'0' * 32}"}
        records = [batch_line("a"), {**batch_line("b"), "url": "/v1/responses", "body": lost}]
        records.append(batch_line("c"))
        path = write_jsonl(tmp_path / "in.jsonl", records)
        with running_worker(FakeEngine(answer_with=echo)):
            ended = flatten(flight(redis_url).run(BatchFile(path, path.name, {})))
        assert ids(ended) == ["a", "b", "c"]
        assert [item.error is None for item in ended] == [True, False, True]
        assert ended[1].error is not None
        assert ended[1].error["code"] == "previous_response_not_found"
        assert not ended[1].error["message"].startswith("bodies")

    def test_one_that_finds_no_room_when_sent_alone_is_neither_lost_nor_overtaken(
        self,
        redis_url: str,
        tmp_path: Path,
        running_worker: Worker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(batch_run, "_TURN_SECONDS", 0.01)
        lost = {"input": "And then?", "previous_response_id": f"resp_{'0' * 32}"}
        records = [{**batch_line("lost"), "url": "/v1/responses", "body": lost}, *batch_lines(4)]
        path = write_jsonl(tmp_path / "in.jsonl", records)
        whole = batch_run.enqueue
        full = []

        def full_once(connection: Any, prepared: Any, *options: Any) -> Any:
            bodies = [json.loads(item.encoded) for item in prepared]
            if len(bodies) == 1 and bodies[0].get("messages") == records[2]["body"]["messages"]:
                full.append(1)
                if len(full) == 1:
                    raise QueueFull("jobs", 1, 1, 1)
            return whole(connection, prepared, *options)

        monkeypatch.setattr(batch_run, "enqueue", full_once)
        engine = FakeEngine(answer_with=echo)
        with running_worker(engine):
            ended = flatten(flight(redis_url).run(BatchFile(path, path.name, {})))
        assert full
        assert ids(ended) == ["lost", "r0", "r1", "r2", "r3"]
        assert [item.error is None for item in ended] == [False, True, True, True, True]
        assert generated(engine) == {f"Say {number}.": 1 for number in range(4)}

    def test_without_redis_from_the_start_it_says_so(
        self, nobody_listens: str, lines: Lines
    ) -> None:
        with pytest.raises(RedisUnavailable, match="No Redis at"):
            next(flight(nobody_listens).run(lines(1)))


class TestAfterwards:
    def test_redis_forgets_answers_soon_and_keeps_errors(
        self, redis_url: str, connection: Redis, lines: Lines, running_worker: Worker
    ) -> None:
        def refuse_second(task: Any) -> Any:
            return failure("no") if "Say 1." in str(task.request) else None

        journey = flight(redis_url, key_of=key_of)
        with running_worker(FakeEngine(refuse=refuse_second)):
            answer, error = flatten(journey.run(lines(2)))
        assert (journey.answers, journey.usage) == (1, Usage(prompt=3, cached=0, completion=2))

        journey.forget([answer, error])

        for name in (
            keys.result(str(answer.job_id)),
            RQJob.key_for(str(answer.job_id)),
            keys.idempotency(key_of(answer.line)),
        ):
            assert 0 < connection.ttl(name) <= FORGET_SECONDS
        assert connection.ttl(keys.result(str(error.job_id))) > FORGET_SECONDS

    def test_answers_that_are_to_be_stored_stay(
        self, redis_url: str, connection: Redis, lines: Lines, running_worker: Worker
    ) -> None:
        journey = flight(redis_url)
        (line,) = lines(1)
        stored = good_line(1, "r0", line.url, {**line.body, "store": True}, line.row)
        with running_worker():
            (answer,) = flatten(journey.run([stored]))
        journey.forget([answer])
        assert connection.ttl(keys.result(str(answer.job_id))) > FORGET_SECONDS

    def test_what_nobody_waits_for_can_be_cancelled(self, redis_url: str, lines: Lines) -> None:
        journey = flight(redis_url)
        turns = journey.run(lines(3))
        next(turns)
        journey.cancel()
        assert {item.error and item.error["type"] for item in flatten(turns)} == {"cancelled"}


class TestStopped:
    @pytest.fixture(autouse=True)
    def _look_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_run, "_LOOK_SECONDS", 0.0)

    def stopped(self, ended: list[Ended]) -> list[bool]:
        return [item.error is not None and item.error["code"] == "stopped" for item in ended]

    def test_what_no_worker_has_begun_ends_with_the_error(
        self, redis_url: str, connection: Redis, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(hold=True, answer_with=echo)
        journey = flight(redis_url, window=5)
        with running_worker(engine, window=2):
            turns = journey.run(lines(7))
            until(turns, lambda: len(engine.added) == 2)
            journey.stop(STOPPED)
            next(turns)
            assert connection.llen("rq:queue:mlx-rq:default:low") == 0
            engine.release()
            ended = flatten(turns)
        assert ids(ended) == [f"r{number}" for number in range(7)]
        assert self.stopped(ended) == [False] * 2 + [True] * 5

    def test_so_do_lines_of_an_earlier_flight_but_for_those_answered_or_running(
        self, redis_url: str, connection: Redis, lines: Lines, running_worker: Worker
    ) -> None:
        engine = FakeEngine(hold=True, answer_with=echo)
        with running_worker(engine, window=2):
            killed = flight(redis_url, key_of=key_of, window=6).run(lines(6))
            until(killed, lambda: len(engine.added) == 2)
            killed.close()
            done = engine.added[0].id
            engine.release(done)  # and the worker takes the next one
            engine.wait_for_tasks(3)
            eventually(lambda: Job(done, redis_url).status() == "completed")

            again = flight(redis_url, key_of=key_of)
            again.stop(STOPPED)
            turns = again.run(lines(8))
            ended = until(turns, lambda: connection.llen("rq:queue:mlx-rq:default:low") == 0)
            engine.release()
            ended += flatten(turns)
        assert ids(ended) == [f"r{number}" for number in range(8)]
        assert self.stopped(ended) == [False] * 3 + [True] * 5
        assert len(generated(engine)) == 3

    def test_a_redis_that_fails_meanwhile_is_asked_again(
        self, redis_url: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_run, "_RETRY_SECONDS", 0.0)
        next(flight(redis_url, key_of=key_of).run(lines(3)))
        whole = batch_run.cancel_jobs
        calls: list[list[str]] = []

        def failing(connection: Redis, job_ids: list[str], **how: Any) -> Any:
            calls.append(list(job_ids))
            if len(calls) == 1:
                whole(connection, job_ids[:1], **how)
                raise RedisUnavailable("No Redis: it is away for a moment.")
            return whole(connection, job_ids, **how)

        monkeypatch.setattr(batch_run, "cancel_jobs", failing)
        again = flight(redis_url, key_of=key_of)
        again.stop(STOPPED)
        ended = flatten(again.run(lines(4)))
        assert self.stopped(ended) == [True] * 4
        assert [len(job_ids) for job_ids in calls] == [3, 3]


def test_a_turn_ends_within_a_second_or_so_where_nothing_happens(
    redis_url: str, lines: Lines
) -> None:
    turns = flight(redis_url).run(lines(1))
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (next(turns), ended.set()), daemon=True)
    thread.start()
    assert ended.wait(PATIENCE)
