"""The worker publishes what streamed jobs say: what is new, not too often, and only that."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from redis import Redis
from redis.exceptions import ConnectionError

from mlx_rq import submit
from mlx_rq.engine.interface import Partial, Task
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.results.stream import INTERVAL_SECONDS, StreamPublisher

CHAT: Any = {"messages": [{"role": "user", "content": "Hello"}]}


def published(connection: Redis, job_id: str) -> list[tuple[int, str, int, str]]:
    entries: Any = connection.xrange(keys.stream(job_id))
    return [
        (int(one[b"choice"]), one[b"kind"].decode(), int(one[b"at"]), one[b"text"].decode())
        for _, one in entries
    ]


class Clock:
    """A clock that stands until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(hold=True)
    engine.add([Task(job_id, validate("chat", CHAT)) for job_id in ("a", "b")])
    return engine


def tell(deltas: StreamPublisher, clock: Clock) -> None:
    clock.now += INTERVAL_SECONDS
    deltas.publish()


def test_only_what_is_new_is_published(connection: Redis, engine: FakeEngine, clock: Clock) -> None:
    deltas = StreamPublisher(engine, connection, clock)
    deltas.watch("a")
    steps: list[Sequence[Partial]] = [
        [Partial(0, "Hm", "")],
        [Partial(0, "Hm.", "So"), Partial(1, "", "Well")],
        [Partial(0, "Hm.", "So it is"), Partial(1, "", "Well")],
    ]
    engine.say("b", Partial(0, "", "nobody asked for this"))
    for said in steps:
        engine.say("a", *said)
        tell(deltas, clock)
    assert published(connection, "a") == [
        (0, "reasoning", 0, "Hm"),
        (0, "reasoning", 2, "."),
        (0, "content", 0, "So"),
        (1, "content", 0, "Well"),
        (0, "content", 2, " it is"),
    ]
    assert published(connection, "b") == []
    assert 500 < int(connection.ttl(keys.stream("a"))) <= 600


def test_not_more_than_ten_times_a_second(
    connection: Redis, engine: FakeEngine, clock: Clock
) -> None:
    deltas = StreamPublisher(engine, connection, clock)
    deltas.watch("a")
    for number in range(1, 101):
        clock.now = number / 100
        engine.say("a", Partial(0, "", "x" * number))
        deltas.publish()
    assert len(published(connection, "a")) <= 11
    assert engine.asked <= 11


def test_without_streamed_jobs_the_engine_is_not_asked(
    connection: Redis, engine: FakeEngine, clock: Clock
) -> None:
    deltas = StreamPublisher(engine, connection, clock)
    tell(deltas, clock)
    deltas.watch("a")
    deltas.forget("a")
    tell(deltas, clock)
    assert engine.asked == 0


def test_an_attempt_that_starts_over_in_the_engine(
    connection: Redis, engine: FakeEngine, clock: Clock
) -> None:
    deltas = StreamPublisher(engine, connection, clock)
    deltas.watch("a")
    for text in ("one two", "one", "", "one two three"):  # the same again: nothing is said twice
        engine.say("a", Partial(0, "", text))
        tell(deltas, clock)
    engine.say("a", Partial(0, "", "two"))  # something else: followers learn it from the start
    tell(deltas, clock)
    engine.say("a", Partial(0, "", "two three"))
    tell(deltas, clock)
    assert published(connection, "a") == [
        (0, "content", 0, "one two"),
        (0, "content", 7, " three"),
        (0, "content", 0, "two"),
        (0, "content", 3, " three"),
    ]


def test_what_redis_did_not_take_is_sent_again(
    connection: Redis, engine: FakeEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = StreamPublisher(engine, connection, clock)
    deltas.watch("a")
    engine.say("a", Partial(0, "", "one"))

    def fail(*_: Any) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as away:
        away.setattr("mlx_rq.worker.results.stream.publish", fail)
        tell(deltas, clock)
    engine.say("a", Partial(0, "", "one two"))
    tell(deltas, clock)
    assert published(connection, "a") == []  # it is left alone for a while
    clock.now += 60
    deltas.publish()
    assert published(connection, "a") == [(0, "content", 0, "one two")]


def test_a_worker_publishes_the_jobs_that_ask(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    streamed, silent = submit(CHAT, stream=True), submit(CHAT)
    engine.wait_for_tasks(2)
    for job in (streamed, silent):
        engine.say(job.id, Partial(0, "", f"chat for {job.id}"))
    eventually(lambda: bool(published(connection, streamed.id)), "the text")
    engine.release()
    streamed.result(timeout=PATIENCE)
    silent.result(timeout=PATIENCE)
    assert published(connection, streamed.id) == [(0, "content", 0, f"chat for {streamed.id}")]
    assert published(connection, silent.id) == []


def test_the_engine_learns_when_a_job_was_submitted(
    redis_url: str, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    before = time.time()
    submit(CHAT)
    after = time.time()
    start_worker(engine)
    engine.wait_for_tasks(1)
    assert before <= (engine.added[0].submitted_at or 0) <= after


def test_a_second_worker_begins_from_the_start(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    first, second = FakeEngine(hold=True), FakeEngine(hold=True)
    worker = start_worker(first)
    job = submit(CHAT, stream=True)
    first.wait_for_tasks(1)
    first.say(job.id, Partial(0, "", "one two"))
    eventually(lambda: bool(published(connection, job.id)), "the text")
    worker.stop_at_once()
    start_worker(second)
    second.wait_for_tasks(1)
    second.say(job.id, Partial(0, "", "one"))
    eventually(lambda: len(published(connection, job.id)) == 2, "the text again")
    assert published(connection, job.id)[1] == (0, "content", 0, "one")


@pytest.mark.parametrize("end", ["cancel", "release"])
def test_a_job_that_ended_is_watched_no_more(
    redis_url: str, connection: Redis, start_worker: StartWorker, end: str
) -> None:
    engine = FakeEngine(hold=True)
    worker = start_worker(engine)
    job = submit(CHAT, stream=True)
    engine.wait_for_tasks(1)
    if end == "cancel":
        job.cancel()
    else:
        engine.release()
    eventually(lambda: not worker.worker._held, "the end")
    worker.stop()
    assert worker.worker._stream._told == {}
