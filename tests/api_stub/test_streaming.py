"""Streamed completions. Some tests publish in the place of the worker, to say when and what."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, answer, eventually, failure
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from servers import RunningServer

from mlx_rq.api_stub.streaming import data_event
from mlx_rq.engine.interface import Partial
from mlx_rq.jobs.client.job import fetch
from mlx_rq.jobs.queue import stream as streams
from mlx_rq.jobs.queue.stream import Delta, publish

HELLO: Any = [{"role": "user", "content": "Hello"}]

Publish = Callable[..., None]


@pytest.fixture(autouse=True)
def _streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.streaming.FIRST_SECONDS", 0.2)


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    return engine


def test_text_comes_as_it_is_published(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    with server.client().chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        whole = f"chat for {job_id}"
        chunks = iter(stream)
        publish(connection, job_id, [Delta(0, "content", 0, "chat")])
        first, second = next(chunks), next(chunks)
        assert first.choices[0].delta.role == "assistant"
        assert second.choices[0].delta.content == "chat"
        assert fetch(job_id).status() == "in_progress"
        publish(connection, job_id, [Delta(0, "content", 4, " for"), Delta(0, "content", 8, " ")])
        assert [next(chunks).choices[0].delta.content for _ in range(2)] == [" for", " "]
        engine.release()
        rest, last, usage = list(chunks)
        assert rest.choices[0].delta.content == whole[9:]
        assert last.choices[0].finish_reason == "stop"
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.total_tokens == 5
        assert {chunk.id for chunk in (first, second, rest, last, usage)} == {f"chatcmpl-{job_id}"}
    assert 0 < int(connection.ttl(f"mlx-rq:stream:{job_id}")) <= 600


def _read(server: RunningServer, **body: Any) -> list[Any]:
    return list(
        server.client().chat.completions.create(model="fake", messages=HELLO, stream=True, **body)
    )


def test_answer_is_whole_where_nobody_publishes(server: RunningServer, engine: FakeEngine) -> None:
    engine.release()
    chunks = _read(server)
    (job_id,) = engine.wait_for_tasks(1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == f"chat for {job_id}"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_completion(server: RunningServer, engine: FakeEngine) -> None:
    engine.release()
    chunks = list(server.client().completions.create(model="fake", prompt="x", stream=True))
    (job_id,) = engine.wait_for_tasks(1)
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"text for {job_id}"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tool_calls_and_reasoning(server: RunningServer, engine: FakeEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def with_call(task: Any) -> Any:
        result = answer(task)
        result["choices"][0]["message"] = {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [call],
        }
        result["choices"][0]["finish_reason"] = "tool_calls"
        return result

    engine.answer_with = with_call
    engine.release()
    chunks = _read(server)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [getattr(delta, "reasoning", None) for delta in deltas] == [None, "Hm.", None, None]
    assert deltas[2].tool_calls[0].function.name == "f"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_failure_at_once_has_its_status(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.streaming.FIRST_SECONDS", PATIENCE)
    engine.refuse = lambda task: failure("context_length_exceeded", "Too long.")
    with pytest.raises(openai.BadRequestError) as caught:
        _read(server)
    assert caught.value.code == "context_length_exceeded"


def test_failure_in_the_middle_is_an_event(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    with server.client().chat.completions.create(
        model="fake", messages=HELLO, stream=True
    ) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        publish(connection, job_id, [Delta(0, "content", 0, "chat")])
        next(iter(stream))
        fetch(job_id).cancel()
        with pytest.raises(openai.APIError, match="The job was cancelled"):
            list(stream)


def test_attempt_that_starts_over(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    for again, ends_well in (("chat fo", True), ("shouts ", False)):
        with server.client().chat.completions.create(
            model="fake", messages=HELLO, stream=True
        ) as stream:
            job_id = engine.wait_for_tasks(1 if ends_well else 2)[-1]
            publish(connection, job_id, [Delta(0, "content", 0, "chat")])
            assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "chat"]
            publish(connection, job_id, [Delta(0, "content", 0, again)])
            if not ends_well:
                with pytest.raises(openai.APIError, match="began the answer again"):
                    list(stream)
                continue
            assert next(stream).choices[0].delta.content == " fo"
            engine.release(job_id)
            rest = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert rest == f"r {job_id}"


def test_client_that_hangs_up(server: RunningServer, engine: FakeEngine, connection: Redis) -> None:
    body = {"model": "fake", "messages": HELLO, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE
    ) as answer:
        (job_id,) = engine.wait_for_tasks(1)
        publish(connection, job_id, [Delta(0, "content", 0, "chat")])
        next(answer.iter_text())
    eventually(lambda: fetch(job_id).status() == "cancelled", "the cancellation")
    engine.wait_until(lambda engine: engine.cancelled == [job_id])


def test_what_the_engine_says_is_streamed(server: RunningServer, engine: FakeEngine) -> None:
    with server.client().chat.completions.create(
        model="fake", messages=HELLO, n=1, stream=True
    ) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        chunks = iter(stream)
        engine.say(job_id, Partial(0, "", "chat"))
        assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "chat"]
        engine.say(job_id, Partial(0, "", "chat for"))
        assert next(chunks).choices[0].delta.content == " for"
        engine.release()
        rest = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert rest == f" {job_id}"


def test_result_that_is_not_what_was_sent(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    with server.client().chat.completions.create(
        model="fake", messages=HELLO, stream=True
    ) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        publish(connection, job_id, [Delta(0, "content", 0, "shouts")])
        next(iter(stream))
        engine.release()
        with pytest.raises(openai.APIError, match="began the answer again"):
            list(stream)


@pytest.mark.parametrize("same", [True, False])
def test_worker_that_stops_in_the_middle(
    server: RunningServer, start_worker: StartWorker, same: bool
) -> None:
    first, second = FakeEngine(hold=True), FakeEngine(hold=True)
    worker = start_worker(first)
    with server.client().chat.completions.create(
        model="fake", messages=HELLO, stream=True
    ) as stream:
        (job_id,) = first.wait_for_tasks(1)
        chunks = iter(stream)
        first.say(job_id, Partial(0, "", "chat fo"))
        assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "chat fo"]
        start_worker(second)
        worker.stop_at_once()
        second.wait_for_tasks(1)
        second.say(job_id, Partial(0, "", "chat" if same else "shout"))
        if same:
            second.say(job_id, Partial(0, "", "chat for "))
            assert next(chunks).choices[0].delta.content == "r "
            second.release()
            rest = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert rest == job_id
        else:
            with pytest.raises(openai.APIError, match="began the answer again"):
                list(chunks)
            second.wait_until(lambda engine: engine.cancelled == [job_id])


def test_two_follow_the_same_job(
    server: RunningServer, engine: FakeEngine, connection: Redis
) -> None:
    create = server.client().chat.completions.create
    options: Any = {"extra_headers": {"idempotency-key": "k"}, "stream": True}
    texts = ["", ""]

    def read(number: int) -> None:
        for chunk in create(model="fake", messages=HELLO, **options):
            texts[number] += chunk.choices[0].delta.content or ""

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    threads[0].start()
    (job_id,) = engine.wait_for_tasks(1)
    publish(connection, job_id, [Delta(0, "content", 0, "chat")])
    eventually(lambda: texts[0] == "chat", "the beginning")
    threads[1].start()
    eventually(lambda: texts == ["chat"] * 2, "the beginning for the second")
    publish(connection, job_id, [Delta(0, "content", 4, " for")])
    eventually(lambda: texts == ["chat for"] * 2, "what follows for both")
    engine.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert texts == [f"chat for {job_id}"] * 2


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
    ],
)
def test_wrong_wishes(
    server: RunningServer, engine: FakeEngine, fields: Any, param: str, code: str
) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


def test_an_event_is_one_line_to_clients_that_split_text_at_other_line_ends() -> None:
    assert data_event({"text": "a\u2028b\x85c"}).splitlines() == [
        'data: {"text":"a\\u2028b\\u0085c"}',
        "",
    ]


def test_who_follows_as_the_last_reader_goes_is_read_for(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, followed = asyncio.Event(), asyncio.Event()
    connected = streams.new_async_connection

    def connect(url: str) -> Any:
        client = connected(url)
        aclose = client.aclose

        async def slow() -> None:
            closing.set()
            await followed.wait()
            await aclose()

        monkeypatch.setattr(client, "aclose", slow)
        return client

    async def follow() -> None:
        reader = streams._Reader(redis_url)
        with reader.text_of("first"):
            await asyncio.sleep(0)
        await closing.wait()
        with reader.text_of("second") as text:
            followed.set()
            publish(connection, "second", [Delta(0, "content", 0, "Hi")])
            await asyncio.wait_for(text.grown.wait(), PATIENCE)

    monkeypatch.setattr(streams, "new_async_connection", connect)
    asyncio.run(follow())


def test_text_goes_on_when_redis_is_back(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected, faults = streams.new_async_connection, [ConnectionError("No Redis")]

    def connect(url: str) -> Any:
        client = connected(url)
        if faults:
            monkeypatch.setattr(client, "xread", AsyncMock(side_effect=faults.pop()))
        return client

    async def follow() -> None:
        with streams._Reader(redis_url).text_of("job") as text:
            publish(connection, "job", [Delta(0, "content", 0, "Hi")])
            await asyncio.wait_for(text.grown.wait(), PATIENCE)

    monkeypatch.setattr(streams, "_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(streams, "new_async_connection", connect)
    asyncio.run(follow())


def test_redis_that_goes_away_is_an_error_and_no_end_without_a_word(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(job_id: str, redis_url: str) -> AsyncIterator[Delta]:
        yield Delta(0, "content", 0, "Hi")
        raise RedisConnectionError("gone")

    monkeypatch.setattr("mlx_rq.api_stub.streaming.follow", follow)
    stream = server.client().chat.completions.create(model="fake", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="has lost touch with its Redis") as told:
        list(stream)
    assert told.value.code == "queue_unavailable"
    (job_id,) = engine.wait_for_tasks(1)
    engine.release()
    assert fetch(stream.response.headers["x-job-id"]).result(PATIENCE)["id"].endswith(job_id)
