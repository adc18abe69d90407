"""OpenAI's unmodified client, sync and async, on `mlx-rq up` with a small model."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from fakes import PATIENCE, free_port
from models import small_folder
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from test_whole_way import process, wait_for_line

from mlx_rq import fetch
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.discovery import embedded_url

pytestmark = pytest.mark.slow

MODEL: Any = {"model": "default"}
ASK: Any = [{"role": "user", "content": "Count: one, two,"}]
GREEDY: Any = {**MODEL, "messages": ASK, "max_completion_tokens": 4, "temperature": 0}
LONG: Any = {"min_tokens": 4000, "ignore_eos": True}
"""For what must still run when something happens to it."""


class Up:
    """`mlx-rq up` at work, and servers beside its own."""

    def __init__(self, folder: Path, processes: ExitStack) -> None:
        self._processes = processes
        port, http_port = free_port(), free_port()
        self.http = f"http://127.0.0.1:{http_port}"
        arguments = ["--model", str(small_folder()), "--batch", "8", "--grace", "0"]
        arguments += ["--queue-port", str(port), "--port", str(http_port)]
        up = processes.enter_context(process("up", *arguments, "--data-dir", str(folder)))
        wait_for_line(up, "serves")
        self.redis_url = embedded_url(folder)
        self._wait(self.http)
        # Ours is what it says from here on: nothing reads it, and it must not wait for that.
        assert up.stderr is not None
        os.set_blocking(up.stderr.fileno(), False)

    def serve(self, folder: Path) -> tuple[Any, str]:
        """Opens another server; gives its process and URL."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        options = ["--port", str(port), "--data-dir", str(folder)]
        environment = {URL_VARIABLE: self.redis_url or ""}
        server = self._processes.enter_context(process("serve", *options, **environment))
        self._wait(url)
        return server, url

    def _wait(self, url: str) -> None:
        def is_open() -> bool:
            try:
                return httpx.get(f"{url}/health").json()["status"] == "ok"
            except httpx.TransportError:
                return False

        until(is_open)


def until(happened: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Waits for something that can only be asked for; returns what it is then."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with ExitStack() as processes:
        yield Up(tmp_path_factory.mktemp("up"), processes)


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)


@pytest.fixture
def client(up: Up) -> OpenAI:
    return client_of(up.http)


@pytest.fixture
def async_client(up: Up) -> AsyncOpenAI:
    url = f"{up.http}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", _strict_response_validation=True)


def test_models(client: OpenAI) -> None:
    models = client.models.list().data
    assert MODEL["model"] in {model.id for model in models} or MODEL["model"] == "default"
    assert models
    for model in models:
        assert client.models.retrieve(model.id) == model


def test_chats_and_completions(client: OpenAI) -> None:
    chat = client.chat.completions.create(**GREEDY)
    assert chat.choices[0].finish_reason in ("stop", "length")
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    completion = client.completions.create(
        **MODEL, prompt=["one, two,", "a, b,"], n=2, max_tokens=3, logprobs=0, temperature=0
    )
    texts = [choice.text for choice in completion.choices]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == "".join(completion.choices[0].logprobs.tokens)  # type: ignore[union-attr,arg-type]


def test_stored_completions(client: OpenAI) -> None:
    stored = client.chat.completions
    made = stored.create(**{**GREEDY, "store": True, "metadata": {"test": "stored"}})
    assert [one.id for one in stored.list(metadata={"test": "stored"})] == [made.id]
    assert stored.retrieve(made.id).choices == made.choices
    stored.update(made.id, metadata={"test": "changed"})
    assert [one.id for one in stored.list(metadata={"test": "stored"})] == []
    lenient = OpenAI(base_url=client.base_url, api_key="none")  # its type has no role but one
    messages = list(lenient.chat.completions.messages.list(made.id))
    assert [message.content for message in messages] == [ASK[0]["content"]]
    assert stored.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        stored.retrieve(made.id)


def test_responses(client: OpenAI) -> None:
    create = client.responses.create
    before = int(time.time())
    first = create(**MODEL, input="Say hi.", max_output_tokens=16, temperature=0)
    assert before <= first.created_at <= time.time()
    second = create(
        **MODEL,
        input="Again.",
        previous_response_id=first.id,
        max_output_tokens=16,
        background=True,
    )
    ended = until(
        lambda: (
            one
            if (one := client.responses.retrieve(second.id)).status in ("completed", "incomplete")
            else None
        )
    )
    assert ended.created_at in (second.created_at, second.created_at + 1)
    items: Any = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.content[0].text for item in items] == ["Say hi.", first.output_text, "Again."]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


FUNCTION: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
COUNTED: list[dict[str, Any]] = [
    {"input": "Name a colour."},
    {"input": ASK, "instructions": "Be brief."},
    {"input": "Look it up.", "tools": [{**FUNCTION, "strict": None}], "tool_choice": "none"},
    {"input": "Is it so?", "text": {"format": {"type": "json_object"}}},
]


@pytest.mark.parametrize("body", COUNTED)
def test_input_tokens_are_those_of_the_usage(client: OpenAI, body: dict[str, Any]) -> None:
    counted = client.responses.input_tokens.count(**MODEL, **body)
    response = client.responses.create(**MODEL, **body, max_output_tokens=16)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 0


def test_input_tokens_of_what_goes_on_from_a_response(client: OpenAI) -> None:
    first = client.responses.create(**MODEL, input=ASK, max_output_tokens=16)
    body: Any = {**MODEL, "input": "And now?", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**body)
    response = client.responses.create(**body, max_output_tokens=16)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_a_dry_run_counts_what_the_usage_says(client: OpenAI, up: Up) -> None:
    texts = ["one, two,", "a, b,"]
    completion = client.completions.create(**MODEL, prompt=texts, max_tokens=1)
    accepted = httpx.post(f"{up.http}/v1/jobs?dry_run=true", json={"prompt": texts})
    ended = httpx.get(f"{up.http}{accepted.headers['location']}?wait=50", timeout=PATIENCE).json()
    assert completion.usage is not None
    assert ended["result"]["input_tokens"] == completion.usage.prompt_tokens


def test_cancel_mid_run(client: OpenAI, up: Up) -> None:
    response = client.responses.create(**MODEL, input="Go on.", background=True, extra_body=LONG)
    until(lambda: client.responses.retrieve(response.id).status == "in_progress")
    assert client.responses.cancel(response.id).status == "cancelled"
    with client.chat.completions.create(
        **MODEL, messages=ASK, stream=True, extra_body=LONG
    ) as stream:
        job_id = next(stream).id.removeprefix("chatcmpl-")
    job = f"{up.http}/v1/jobs/{job_id}"
    assert until(lambda: httpx.get(job).json()["status"] == "cancelled")
    worker = until(lambda: httpx.get(f"{up.http}/metrics").text)
    assert "mlx_rq_worker_running" in worker
    until(lambda: 'in_progress"} 1' not in httpx.get(f"{up.http}/metrics").text)


def joined(chunks: Any, choice: int = 0) -> str:
    """Puts the text of a choice together from its chunks."""
    found = [one for chunk in chunks for one in chunk.choices if one.index == choice]
    return "".join(
        (one.delta.content or "") if hasattr(one, "delta") else one.text for one in found
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": [" three", "four"]},
        {"n": 2, "temperature": 1, "seed": 5},
        {"messages": [{"role": "user", "content": "Write: 日本語 🌍 é"}], "seed": 1},
        {"messages": [{"role": "user", "content": "Say \n\n twice."}], "stop": "\n\n"},
    ],
)
def test_streamed_chats_say_what_the_others_do(client: OpenAI, more: Any) -> None:
    body: Any = {**GREEDY, "max_completion_tokens": 7, **more}
    whole = client.chat.completions.create(**body)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**body, **usage))
    assert [joined(chunks, choice.index) for choice in whole.choices] == [
        choice.message.content for choice in whole.choices
    ]
    reasons = {
        one.index: one.finish_reason
        for chunk in chunks
        for one in chunk.choices
        if one.finish_reason
    }
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_text_comes_while_it_is_generated(up: Up, client: OpenAI) -> None:
    # The type of a completion has no chunk that is not the last one, so this client is not strict.
    client = OpenAI(base_url=client.base_url, api_key="none")
    body: Any = {**MODEL, "temperature": 0, "prompt": "One, two,", "extra_body": LONG}

    # So long that its end is far away, however fast the machine is, when its beginning is here.
    with client.completions.create(**body, max_tokens=4000, stream=True) as stream:
        first, _, _ = islice((chunk for chunk in stream if chunk.choices[0].text), 3)
        job = fetch(first.id.removeprefix("cmpl-"), redis_url=up.redis_url)
        assert job.status() == "in_progress"

    body["extra_body"] = {"ignore_eos": True}
    chunks = list(client.completions.create(**body, max_tokens=24, stream=True))
    texts = [chunk.choices[0].text for chunk in chunks]
    whole = client.completions.create(**body, max_tokens=24).choices[0].text
    assert "".join(texts) == whole


def test_streamed_response(client: OpenAI) -> None:
    body: Any = {**MODEL, "input": "Say hi.", "max_output_tokens": 16, "temperature": 0}
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == text != ""


class Thing(BaseModel):
    colour: Literal["red", "green", "blue"]
    big: bool


def test_parse_with_a_class(client: OpenAI) -> None:
    question: Any = {**MODEL, "temperature": 0}
    parsed = client.chat.completions.parse(**question, messages=ASK, response_format=Thing)
    assert isinstance(parsed.choices[0].message.parsed, Thing)
    with client.responses.stream(**question, input="A thing.", text_format=Thing) as events:
        assert isinstance(events.get_final_response().output_parsed, Thing)


def test_streamed_call_of_a_tool(client: OpenAI) -> None:
    parameters = Thing.model_json_schema()
    parameters = {**parameters, "additionalProperties": False}
    tool = {"name": "paint", "parameters": parameters, "strict": True}
    calling: Any = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    body: Any = {**MODEL, **calling, "messages": ASK, "max_completion_tokens": 80}
    body["tools"] = [{"type": "function", "function": tool}]
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    (call,) = streamed.message.tool_calls or ()
    assert Thing.model_validate_json(call.function.arguments)
    assert streamed.finish_reason == "tool_calls"


def test_async_client(async_client: AsyncOpenAI) -> None:
    async def read(words: str) -> tuple[str, str]:
        body: Any = {**GREEDY, "messages": [{"role": "user", "content": words}]}
        stream: Any = await async_client.chat.completions.create(**body, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await async_client.chat.completions.create(**body)
        return text, whole.choices[0].message.content or ""

    async def all_together() -> None:
        told = await asyncio.gather(*(read(words) for words in ("One,", "Two,")))
        assert all(text == whole for text, whole in told)
        parsed = await async_client.chat.completions.parse(
            **MODEL, messages=ASK, response_format=Thing, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, Thing)
        body: Any = {**MODEL, "input": "Hi.", "max_output_tokens": 16, "temperature": 0}
        stream: Any = await async_client.responses.create(**body, stream=True)
        events = [event async for event in stream]
        assert (
            events[-1].response.output_text
            == (await async_client.responses.create(**body)).output_text
        )
        assert [model.id async for model in async_client.models.list()]

    asyncio.run(all_together())


def lines(count: int, **more: Any) -> bytes:
    bodies = [{**GREEDY, "max_completion_tokens": 3, "seed": n, **more} for n in range(count)]
    records = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, records)).encode()


def create_batch(client: OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def ended_batch(client: OpenAI, batch: Any, *states: str) -> Any:
    def look() -> Any:
        now = client.batches.retrieve(batch.id)
        return now if now.status in states else None

    return until(look, 60)


def answered(client: OpenAI, batch: Any) -> list[str]:
    text = client.files.content(batch.output_file_id).text
    records = [json.loads(line) for line in text.splitlines()]
    assert all(record["response"]["status_code"] == 200 for record in records)
    return sorted(record["custom_id"] for record in records)


def test_batch_from_upload_to_output(client: OpenAI) -> None:
    content = lines(3) + b"\n" + lines(1, temperature=9).replace(b'"r0"', b'"bad"')
    batch = create_batch(client, content)
    ended = ended_batch(client, batch, "completed", "failed")
    assert ended.status == "completed"
    assert (ended.request_counts.completed, ended.request_counts.failed) == (3, 1)
    assert answered(client, ended) == ["r0", "r1", "r2"]
    (bad,) = client.files.content(ended.error_file_id).text.splitlines()
    assert json.loads(bad)["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    files = client.files.list(purpose="batch").data
    assert client.files.retrieve(files[0].id) == files[0]
    assert client.files.delete(files[0].id).deleted


def test_batch_that_is_cancelled(client: OpenAI) -> None:
    endless = lines(8, max_completion_tokens=1000, ignore_eos=True)
    batch = create_batch(client, endless)
    until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = ended_batch(client, batch, "cancelled")
    assert ended.request_counts.total == 8


def test_server_that_is_killed_in_the_middle_of_a_batch(up: Up, tmp_path: Path) -> None:
    server, url = up.serve(tmp_path)
    count = 12
    batch = create_batch(client_of(url), lines(count, max_completion_tokens=5))
    until(lambda: client_of(url).batches.retrieve(batch.id).request_counts.completed >= 1)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    _, url = up.serve(tmp_path)
    now = client_of(url).batches.retrieve(batch.id)
    assert now.status in ("in_progress", "finalizing", "completed")
    ended = ended_batch(client_of(url), batch, "completed")
    assert ended.request_counts.completed == count
    assert answered(client_of(url), ended) == sorted(f"r{n}" for n in range(count))
