"""Streamed responses, as OpenAI's client puts them together from their events."""

import asyncio
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually, failure
from pydantic import BaseModel
from redis import Redis
from servers import RunningServer, StartServer, answer_any

from mlx_rq.engine.interface import Partial, Task
from mlx_rq.jobs.client.job import fetch
from mlx_rq.jobs.openai.response_object import job_of, response_object
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.queue.stream import Delta, publish


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.streaming.FIRST_SECONDS", 0.2)


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(hold=True, answer_with=answer_any)
    start_worker(engine)
    return engine


def response_with(*items: Mapping[str, Any], status: Any = "completed") -> Any:
    """Makes an engine's answer: a response of these items."""

    def answer_with(task: Task) -> dict[str, Any]:
        assert isinstance(task.request, ResponsesRequest)
        usage = answer_any(task)["usage"]
        output = [{**item, "id": item["id"].replace("JOB", task.id)} for item in items]
        whole = response_object(
            task.request, task.id, status=status, model="fake", created_at=1.0, output=output
        )
        return {**whole, "usage": usage}

    return answer_with


def reasoning(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    item = {"id": "rs_JOB", "type": "reasoning", "status": "completed", "summary": []}
    return {**item, "content": [part], **more}


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"id": "msg_JOB", "type": "message", "role": "assistant", "status": status}
    return {**item, "content": [part]}


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    named = {"name": "f", "call_id": f"call_{number}", "arguments": arguments}
    return {"id": f"fc_{number}", "type": "function_call", "status": "completed", **named}


def assembled(events: list[Any]) -> list[dict[str, Any]]:
    """Puts items together from their events, each only as it was added, grown and done."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        match event.type.removeprefix("response."):
            case "output_item.added":
                assert event.output_index == len(items)
                assert event.item.status == "in_progress"
                items[event.output_index] = event.item.to_dict()
                texts[event.output_index] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event.item_id == items[event.output_index]["id"]
                assert event.output_index not in done
                texts[event.output_index] += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == texts[event.output_index]
            case "function_call_arguments.done":
                assert event.arguments == texts[event.output_index]
            case "output_item.done":
                assert event.item.id == items[event.output_index]["id"]
                done[event.output_index] = event.item.to_dict()
    assert list(done) == list(items)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return list(done.values())


def kinds(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def read(server: RunningServer, **body: Any) -> list[Any]:
    create: Any = server.client().responses.create
    return list(create(model="fake", input="Hello", stream=True, **body))


def test_text_comes_as_it_is_generated(server: RunningServer, engine: FakeEngine) -> None:
    with server.client().responses.create(model="fake", input="Hello", stream=True) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        whole = f"response for {job_id}"
        events = iter(stream)
        created, in_progress = next(events), next(events)
        engine.say(job_id, Partial(0, "", "response"))
        added, part, first = next(events), next(events), next(events)
        assert fetch(job_id).status() == "in_progress"
        engine.say(job_id, Partial(0, "", "response for"))
        second = next(events)
        engine.release()
        last = list(events)
    whole_stream = [created, in_progress, added, part, first, second, *last]
    assert kinds(whole_stream) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [first.delta, second.delta, last[0].delta] == ["response", " for", f" {job_id}"]
    completed = last[-1].response
    assert job_of(completed.id) == job_of(created.response.id) == job_id
    assert created.response.status == "in_progress"
    assert completed.output_text == whole
    assert completed.usage.total_tokens == 5
    assert assembled(whole_stream) == [item.to_dict() for item in completed.output]
    assert server.client().responses.retrieve(completed.id) == completed


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("summary", [True, False])
def test_reasoning_text_and_calls_are_items_of_their_own(
    server: RunningServer, engine: FakeEngine, published: bool, summary: bool
) -> None:
    thought = reasoning("Hm. So.")
    more: dict[str, Any] = {}
    if summary:
        thought["summary"] = [{"type": "summary_text", "text": "Hm. So."}]
        more = {"reasoning": {"summary": "auto"}}
    items = [thought, message("Let me see."), call(1, '{"a": 1}'), call(2)]
    engine.answer_with = response_with(*items)
    if not published:
        engine.release()
        events = read(server, **more)
    else:
        create: Any = server.client().responses.create
        with create(model="fake", input="Hello", stream=True, **more) as stream:
            (job_id,) = engine.wait_for_tasks(1)
            events = [next(stream), next(stream)]
            engine.say(job_id, Partial(0, "Hm."))
            while events[-1].type != "response.reasoning_text.delta":
                events.append(next(stream))
            engine.say(job_id, Partial(0, "Hm. So.", "Let"))
            while events[-1].type != "response.output_text.delta":
                events.append(next(stream))
            assert "output_item.done" in kinds(events)  # the reasoning is over
            engine.release()
            events += list(stream)
    (job_id,) = engine.wait_for_tasks(1)
    expected = [{**item, "id": item["id"].replace("JOB", job_id)} for item in items]
    assert assembled(events) == expected
    assert [item.to_dict() for item in events[-1].response.output] == expected
    assert kinds(events).count("reasoning_summary_text.done") == summary
    assert kinds(events)[-1] == "completed"


def test_an_answer_that_is_cut_off_is_incomplete(server: RunningServer, engine: FakeEngine) -> None:
    engine.answer_with = response_with(message("Half an", "incomplete"), status="incomplete")
    engine.release()
    events = read(server)
    assert kinds(events)[-1] == "incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert assembled(events)[0]["status"] == "incomplete"


class Person(BaseModel):
    name: str


async def _streamed(server: RunningServer) -> Any:
    async with (
        server.async_client() as client,
        client.responses.stream(model="fake", input="Hello", text_format=Person) as stream,
    ):
        texts = [event.snapshot async for event in stream if event.type.endswith("text.delta")]
        return texts, await stream.get_final_response()


def test_the_stream_helper_of_the_client_parses(server: RunningServer, engine: FakeEngine) -> None:

    engine.answer_with = response_with(message('{"name": "Ann"}'))
    engine.release()
    with server.client().responses.stream(
        model="fake", input="Hello", text_format=Person
    ) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == Person(name="Ann")
    texts, final = asyncio.run(_streamed(server))
    assert texts == ['{"name": "Ann"}']
    assert final.output_parsed == Person(name="Ann")


def test_failure_at_once_has_its_status(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.streaming.FIRST_SECONDS", PATIENCE)
    engine.refuse = lambda task: failure("context_length_exceeded", "Too long.")
    with pytest.raises(openai.BadRequestError) as caught:
        read(server)
    assert caught.value.code == "context_length_exceeded"


def test_failure_in_the_middle(server: RunningServer, engine: FakeEngine) -> None:
    with server.client().responses.create(model="fake", input="Hello", stream=True) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        engine.say(job_id, Partial(0, "", "resp"))
        events = [next(stream) for _ in range(5)]
        fetch(job_id).cancel()
        events += list(stream)
    assert kinds(events)[4:] == ["output_text.delta", "failed"]
    failed: Any = events[-1]
    assert failed.response.status == "failed"
    assert failed.response.error.message == "The job was cancelled."


@pytest.mark.parametrize("where", ["on the way", "at the end", "in what was done"])
def test_an_attempt_that_says_something_else(
    server: RunningServer, engine: FakeEngine, connection: Redis, where: str
) -> None:
    engine.answer_with = response_with(reasoning("Hm. Hm."), message("Other"))
    with server.client().responses.create(model="fake", input="Hello", stream=True) as stream:
        (job_id,) = engine.wait_for_tasks(1)
        told = [Delta(0, "reasoning", 0, "Hm."), Delta(0, "content", 0, "One")]
        if where == "in what was done":
            told[1] = Delta(0, "content", 0, "Ot")
        publish(connection, job_id, told)
        next(stream)
        if where == "on the way":
            publish(connection, job_id, [Delta(0, "content", 0, "Two")])
        engine.release()
        events: list[Any] = list(stream)
    assert kinds(events)[-1] == "failed"
    assert "began the answer again" in events[-1].response.error.message


def test_client_that_hangs_up_cancels_unless_in_the_background(
    server: RunningServer, start_server: StartServer, engine: FakeEngine
) -> None:
    for background in (False, True):
        create: Any = server.client().responses.create
        with create(model="fake", input="Hello", stream=True, background=background) as stream:
            job_id = engine.wait_for_tasks(1 + background)[-1]
            next(stream)
        if not background:
            eventually(lambda: fetch(job_id).status() == "cancelled", "the cancellation")  # noqa: B023
    engine.release()
    assert fetch(job_id).result(timeout=PATIENCE)["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
    ],
)
def test_wrong_wishes(
    server: RunningServer, engine: FakeEngine, fields: Any, param: str, code: str
) -> None:
    answer = server.http.post("/v1/responses", json={"model": "fake", "input": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
