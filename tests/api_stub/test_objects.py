"""Every object that the server answers with, field by field, beside that of OpenAI's client.

A field that has no value is there, and null: who reads the JSON by itself finds it. The answers are
those of the real engine, with a tiny model.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import speaking
from fakes import eventually, worker_in_thread
from openai._models import validate_type
from openai.types import Batch, Completion, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionDeleted
from openai.types.responses import Response
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel
from servers import RunningServer, run_server

from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.engine import MLXEngine

HELLO = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}
CALLS: dict[str, Any] = {"tool_choice": "required"}

# What OpenAI leaves out too, or has for its own service alone.
_DETAILS = {
    *("completion_tokens_details." + name for name in ("audio_tokens", "text_tokens")),
    *(f"completion_tokens_details.{which}_prediction_tokens" for which in ("accepted", "rejected")),
    *("prompt_tokens_details." + name for name in ("audio_tokens", "image_tokens", "text_tokens")),
    "prompt_tokens_details.cache_write_tokens",
}
_USAGE = {f"usage.{name}" for name in _DETAILS}
LEFT_OUT: Mapping[type, set[str]] = {
    ChatCompletion: {
        *_USAGE,
        *("metadata", "moderation"),
        *(f"choices.message.{name}" for name in ("audio", "function_call", "tool_calls")),
    },
    ChatCompletionChunk: {
        *_USAGE,
        *("moderation", "obfuscation"),
        # A delta has what changes.
        *(f"choices.delta.{name}" for name in ("audio", "content", "function_call", "refusal")),
        *(f"choices.delta.{name}" for name in ("role", "tool_calls")),
    },
    Completion: _USAGE,
    Response: {
        *("access_programs", "image", "input_transformations"),
        *("prompt_cache_diagnostics", "tool_usage", "output.phase"),
        *("output.async", "output.caller", "output.namespace"),  # of calls
        *("reasoning.context", "reasoning.generate_summary", "reasoning.mode"),
        *(f"tools.{name}" for name in ("allowed_callers", "async", "defer_loading")),
        "tools.output_schema",
        "usage.input_tokens_details.cache_write_tokens_details",
    },
}
OWN: Mapping[type, set[str]] = {
    ChatCompletion: {"warnings"},  # the tiny model's calls are cut off
    Response: {"frequency_penalty", "presence_penalty", "store", "warnings"},
    Batch: {"note"},
    Model: {"state"},
}


@pytest.fixture(scope="module")
def http(
    valkey_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server beside a worker whose model is real, and tiny."""
    folder = tmp_path_factory.mktemp("objects")
    settings = Settings(data_dir=folder, redis_url=valkey_server_url)
    with ExitStack() as stack:
        engine: Any = MLXEngine(speaking.model())
        stack.enter_context(worker_in_thread(valkey_server_url, engine, served_names=["m"]))
        server: RunningServer = stack.enter_context(run_server(settings))
        client = stack.enter_context(server.http)
        eventually(lambda: bool(client.get("/v1/models").json()["data"]), "the worker")
        yield client


def walk(parsed: Any, raw: Any, path: str, missing: set[str], own: set[str]) -> None:
    """Notes which fields of the client's class an answer lacks, and which it has besides."""
    if isinstance(parsed, list):
        for item, raw_item in zip(parsed, raw, strict=True):
            walk(item, raw_item, path, missing, own)
    if not isinstance(parsed, BaseModel):
        return
    own |= {f"{path}{name}" for name in parsed.model_extra or ()}
    for attribute, field in type(parsed).model_fields.items():
        name = field.alias or attribute
        if name in raw:
            walk(getattr(parsed, attribute), raw[name], f"{path}{name}.", missing, own)
        else:
            missing.add(f"{path}{name}")


def check(kind: Any, *answers: Any) -> None:
    """Reads answers as the client does in strict validation; they have all fields that it knows."""
    missing: set[str] = set()
    own: set[str] = set()
    for answer in answers:
        walk(validate_type(type_=kind, value=answer), answer, "", missing, own)
    assert missing - LEFT_OUT.get(kind, set()) == set()
    assert own - OWN.get(kind, set()) == set()


def check_page(kind: Any, page: Any) -> None:
    """Reads one page of a list."""
    assert list(page) == ["object", "data", "first_id", "last_id", "has_more"]
    assert [page["first_id"], page["last_id"]] == [page["data"][n]["id"] for n in (0, -1)]
    check(kind, *page["data"])


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "m", **body})
    assert answer.is_success, answer.text
    return answer.json()


def test_chats(http: httpx.Client) -> None:
    path, asked = "/v1/chat/completions", {"messages": HELLO, "max_tokens": 8}
    tools = [{"type": "function", "function": FUNCTION}]
    stored = post(http, path, **asked, store=True)
    check(
        ChatCompletion,
        stored,
        post(http, path, **asked, logprobs=True, top_logprobs=1, n=2),
        post(http, path, **{**asked, "max_tokens": 80}, tools=tools, **CALLS),
        http.get(f"{path}/{stored['id']}").json(),
    )
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    events = http.post(path, json={"model": "m", **asked, **stream}).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    check(ChatCompletionChunk, *chunks)
    check_page(ChatCompletion, http.get(path).json())
    check(ChatCompletionDeleted, http.delete(f"{path}/{stored['id']}").json())


def test_completions_and_models(http: httpx.Client) -> None:
    asked = {"prompt": "Hi", "max_tokens": 4}
    check(
        Completion,
        post(http, "/v1/completions", **asked),
        post(http, "/v1/completions", **asked, logprobs=1, n=2),
    )
    check(Model, http.get("/v1/models/m").json())


def test_responses(http: httpx.Client) -> None:
    path, asked = "/v1/responses", {"input": "Hi", "max_output_tokens": 16}
    waits = post(http, path, **asked, background=True)
    calls = {"tools": [{"type": "function", **FUNCTION}], **CALLS}
    check(
        Response,
        waits,
        post(http, path, **asked),
        post(http, path, **asked, top_logprobs=1),
        post(http, path, **{**asked, "max_output_tokens": 80}, **calls),
        http.get(f"{path}/{waits['id']}").json(),
    )
    check(InputTokenCountResponse, post(http, f"{path}/input_tokens", input="Hi"))


def test_files_and_batches(http: httpx.Client) -> None:
    """A line that is refused has a response, with its status: `error` is for what never was one."""
    url = "/v1/chat/completions"
    bodies = {"good": {"messages": HELLO, "max_tokens": 2}, "bad": {"messages": []}}
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}
        for name, body in bodies.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
    check(FileObject, file, http.get(f"/v1/files/{file['id']}").json())
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    begun = http.post("/v1/batches", json=asked).json()
    assert begun["status"] == "validating"
    assert begun["in_progress_at"] is begun["errors"] is begun["output_file_id"] is None
    assert begun["request_counts"] == {"total": 2, "completed": 0, "failed": 0}

    def look() -> Any:
        return http.get(f"/v1/batches/{begun['id']}").json()

    eventually(lambda: look()["status"] == "completed", "the batch")
    batch = look()
    check(Batch, begun, batch, http.post("/v1/batches", json=asked).json())
    check_page(Batch, http.get("/v1/batches").json())
    check_page(FileObject, http.get("/v1/files").json())
    records = {
        name: json.loads(http.get(f"/v1/files/{batch[name]}/content").text)
        for name in ("output_file_id", "error_file_id")
    }
    for record in records.values():
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["error"] is None
    answer, refusal = (record["response"]["body"] for record in records.values())
    check(ChatCompletion, answer)
    assert set(refusal["error"]) == {"message", "type", "param", "code"}
    check(FileDeleted, http.delete(f"/v1/files/{file['id']}").json())
