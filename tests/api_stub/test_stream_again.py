"""A streamed response that is streamed again: from its beginning, or from where a client was."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fakes import FakeEngine, StartWorker
from redis import Redis
from servers import RunningServer, answer_any

from mlx_rq.engine.interface import Partial
from mlx_rq.jobs.client.job import fetch
from mlx_rq.jobs.openai.response_object import response_id
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.stream import Delta, publish


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(hold=True, answer_with=answer_any)
    start_worker(engine)
    return engine


def begin(server: RunningServer, **body: Any) -> Iterator[Any]:
    create: Any = server.client().responses.create
    return iter(create(model="fake", input="Hello", stream=True, background=True, **body))


def again(server: RunningServer, job_id: str, **query: Any) -> list[Any]:
    retrieve: Any = server.client().responses.retrieve
    return list(retrieve(response_id(job_id), stream=True, **query))


def test_events_are_the_same_again_from_any_number(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    events = begin(server)
    (job_id,) = engine.wait_for_tasks(1)
    first = [next(events), next(events)]
    engine.say(job_id, Partial(0, "", "response"))
    first += [next(events) for _ in range(3)]
    engine.say(job_id, Partial(0, "", "response for"))
    first.append(next(events))
    publish(connection, job_id, [Delta(0, "content", 12, f" {job_id[:5]}")])
    engine.release()
    first += list(events)

    numbers = [event.sequence_number for event in first]
    assert numbers == list(range(len(first)))
    assert first[-1].type == "response.completed"
    assert first[5].delta + first[6].delta == f" for {job_id[:5]}"
    assert again(server, job_id) == first
    for seen in numbers:
        assert again(server, job_id, starting_after=seen) == first[seen + 1 :]


def test_text_that_was_not_read_before_the_end_comes_entry_by_entry(
    server: RunningServer, engine: FakeEngine, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("mlx_rq.jobs.queue.stream._Reader._read", nothing)
    events = begin(server)
    (job_id,) = engine.wait_for_tasks(1)
    next(events)
    publish(connection, job_id, [Delta(0, "content", at, "resp"[at]) for at in range(4)])
    engine.release()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert texts == ["r", "e", "s", "p", f"onse for {job_id}"]


def test_a_client_goes_on_while_it_is_generated(server: RunningServer, engine: FakeEngine) -> None:
    events = begin(server)
    (job_id,) = engine.wait_for_tasks(1)
    engine.say(job_id, Partial(0, "", "response"))
    seen = [next(events) for _ in range(5)]
    retrieve: Any = server.client().responses.retrieve
    with retrieve(response_id(job_id), stream=True, starting_after=3) as stream:
        assert next(stream) == seen[4]
        engine.say(job_id, Partial(0, "", "response for"))
        assert next(stream).delta == " for"
    # Who goes away from a second look takes nothing with it.
    assert fetch(job_id).status() == "in_progress"
    engine.release()
    assert again(server, job_id)[-1].response.output_text == f"response for {job_id}"


def test_one_that_failed_ends_with_its_failure(server: RunningServer, engine: FakeEngine) -> None:
    events = begin(server)
    (job_id,) = engine.wait_for_tasks(1)
    next(events)
    fetch(job_id).cancel()
    list(events)
    last = again(server, job_id)[-1]
    assert last.type == "response.failed"
    assert last.response.error.message == "The job was cancelled."


def test_text_that_is_forgotten_comes_in_one_piece(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    events = begin(server)
    (job_id,) = engine.wait_for_tasks(1)
    engine.say(job_id, Partial(0, "", "resp"))
    for _ in range(5):
        next(events)
    engine.release()
    list(events)
    connection.delete(keys.stream(job_id))

    assert again(server, job_id)[-1].response.output_text == f"response for {job_id}"
    with pytest.raises(openai.BadRequestError) as caught:
        again(server, job_id, starting_after=4)
    assert caught.value.param == "starting_after"


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("stream=true", "stream", "invalid_value"),  # it was not created with it
        ("starting_after=1", "starting_after", "invalid_value"),
        ("stream=true&starting_after=-1", "starting_after", "invalid_value"),
        ("stream=perhaps", "stream", "invalid_value"),
        ("streem=true", "streem", "unknown_parameter"),
        ("include[]=reasoning", "include[]", "invalid_value"),
        ("include=message.output_text.logprobs&include=x", "include", "invalid_value"),
    ],
)
def test_wrong_wishes(
    server: RunningServer, engine: FakeEngine, query: str, param: str, code: str
) -> None:
    engine.release()
    made = server.client().responses.create(model="fake", input="Hello")
    answer = server.http.get(f"/v1/responses/{made.id}?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


def test_streaming_what_is_not_there(server: RunningServer, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError):
        again(server, "0" * 32)
