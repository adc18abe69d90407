"""Responses jobs at the producer's end: how they are read, refused, and gone on from."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, answer, failure
from openai.types.responses import ResponseIncludable
from pydantic import BaseModel
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq.engine.interface import Task
from mlx_rq.jobs.client.job import Job, as_completed
from mlx_rq.jobs.client.submit import submit, submit_many
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.response_object import job_of, response_id, response_object
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.validation import validate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**body: Any) -> ResponsesRequest:
    request = validate("responses", {"input": "Hi", **body})
    assert isinstance(request, ResponsesRequest)
    return request


def chat(**body: Any) -> dict[str, Any]:
    """The chat that a body is generated as, without what it does not say."""
    return (
        read(**body).generated_from().model_dump(exclude_none=True, by_alias=True, warnings=False)
    )


def refusal(**body: Any) -> tuple[str | None, str | None]:
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert list(refused.value.error) == ["message", "type", "param", "code"]
    return refused.value.code, refused.value.param


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
}


class TestAsChat:
    def test_a_text_is_a_message_of_the_user_below_the_instructions(self) -> None:
        assert chat(instructions="Be brief.") == {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ]
        }

    @pytest.mark.parametrize(
        ("items", "messages"),
        [
            ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
            (
                [{"role": "developer", "content": [{"type": "input_text", "text": "b"}] * 2}],
                [{"role": "system", "content": "bb"}],
            ),
            ([SAID], [{"role": "assistant", "content": "Well."}]),
            (
                [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
                [{"role": "assistant", "content": "No."}],
            ),
            (
                [THOUGHT, SAID, CALL, {**CALL, "call_id": "c2"}],
                [
                    {
                        "role": "assistant",
                        "content": "Well.",
                        "reasoning_content": "Hm.",
                        "tool_calls": [CALLED, {**CALLED, "id": "c2"}],
                    }
                ],
            ),
            (
                [THOUGHT, CALL],
                [{"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALLED]}],
            ),
            (
                [SAID, THOUGHT, CALL],  # it thought again: another turn
                [
                    {"role": "assistant", "content": "Well."},
                    {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
                ],
            ),
            (
                [CALL, {"type": "function_call_output", "call_id": "c1", "output": "4"}],
                [
                    {"role": "assistant", "tool_calls": [CALLED]},
                    {"role": "tool", "content": "4", "tool_call_id": "c1"},
                ],
            ),
            (
                [
                    {
                        "type": "function_call_output",
                        "call_id": "c1",
                        "output": [{"type": "input_text", "text": "5"}],
                    }
                ],
                [{"role": "tool", "content": "5", "tool_call_id": "c1"}],
            ),
            (
                [
                    {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": "ls -l"},
                    {"type": "custom_tool_call_output", "call_id": "c1", "output": "total 0"},
                ],
                [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "custom",
                                "custom": {"name": "run", "input": "ls -l"},
                            }
                        ],
                    },
                    {"role": "tool", "content": "total 0", "tool_call_id": "c1"},
                ],
            ),
            (
                [
                    {
                        "type": "apply_patch_call",
                        "call_id": "c1",
                        "status": "completed",
                        "operation": {"type": "delete_file", "path": "a"},
                    },
                    {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed"},
                    {"type": "local_shell_call_output", "id": "c2", "output": "total 0"},
                ],
                [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {
                                    "name": "apply_patch",
                                    "arguments": '{"type": "delete_file", "path": "a"}',
                                },
                            }
                        ],
                    },
                    {"role": "tool", "content": '{"status": "failed"}', "tool_call_id": "c1"},
                    {"role": "tool", "content": "total 0", "tool_call_id": "c2"},
                ],
            ),
        ],
    )
    def test_items_are_messages(self, items: Any, messages: Any) -> None:
        assert chat(input=items) == {"messages": messages}

    def test_flat_tools_formats_and_choices_are_nested(self) -> None:
        tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
        text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
        wanted = chat(tools=[tool], tool_choice={"type": "function", "name": "f"}, text=text)
        function = {"name": "f", "parameters": SCHEMA, "strict": True}
        assert wanted["tools"] == [{"type": "function", "function": function}]
        assert wanted["tool_choice"] == {"type": "function", "function": {"name": "f"}}
        assert wanted["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
        }
        allowed = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}],
        }
        assert chat(tools=[tool], tool_choice=allowed)["tool_choice"] == {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        }

    @pytest.mark.parametrize(
        ("body", "name", "value"),
        [
            ({"max_output_tokens": 16}, "max_completion_tokens", 16),
            ({"reasoning": {"effort": "low"}}, "reasoning_effort", "low"),
            ({"top_logprobs": 3}, "top_logprobs", 3),
            ({"top_logprobs": 0}, "logprobs", True),
            ({"include": ["message.output_text.logprobs"]}, "logprobs", True),
            (
                {"text": {"format": {"type": "json_object"}}},
                "response_format",
                {"type": "json_object"},
            ),
            ({"temperature": 0.5}, "temperature", 0.5),
            ({"top_p": 0.5}, "top_p", 0.5),
            ({"seed": 3}, "seed", 3),
            ({"presence_penalty": 1}, "presence_penalty", 1),
            ({"frequency_penalty": 1}, "frequency_penalty", 1),
            ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
            ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", {"x": 1}),
            ({"model": "m"}, "model", "m"),
        ],
    )
    def test_what_a_chat_calls_otherwise_or_the_same(
        self, body: dict[str, Any], name: str, value: Any
    ) -> None:
        assert chat(**body)[name] == value
        assert name not in chat()

    def test_reasoning_that_would_be_encrypted_is_taken(self) -> None:
        without_effect = set(get_args(ResponseIncludable)) - {"message.output_text.logprobs"}
        assert chat(include=sorted(without_effect)) == chat()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": [{}]}, "missing_required_parameter", "input[0].role"),
        ({"input": []}, "empty_array", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": ["Hi"]}, "invalid_type", "input[0]"),
        ({"input": [{"type": "compaction", "id": "x"}]}, "invalid_value", "input[0].type"),
        ({"input": [{"type": "item_reference"}]}, "missing_required_parameter", "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 15}, "integer_below_min_value", "max_output_tokens"),
        ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
        ({"max_tool_calls": 0}, "integer_below_min_value", "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"multipleOf": 1e9}}]},
            "invalid_function_parameters",
            "tools[0].parameters",
        ),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "invalid_value", "tools[1].name"),
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "missing_required_parameter",
         "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"multipleOf": 1e9}}}},
         None, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning.effort"),
        ({"truncation": "yes"}, "invalid_value", "truncation"),
        ({"include": ["file_search_call.everything"]}, "invalid_value", "include[0]"),
        ({"background": True, "store": False}, "invalid_value", "store"),
        ({"background_options": {"completion_window": "1h"}}, "invalid_value",
         "background_options.completion_window"),
        ({"metadata": {str(i): "" for i in range(17)}}, "object_above_max_properties", "metadata"),
        ({"metadata": {"a": "v" * 513}}, "string_above_max_length", "metadata.a"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"messages": []}, "unknown_parameter", "messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_the_names_of_the_request(
    body: dict[str, Any], code: str | None, param: str
) -> None:
    assert refusal(**body) == (code, param)


def test_the_caps_on_metadata_are_good_themselves() -> None:
    metadata = {f"{i:064d}": "v" * 512 for i in range(16)}
    assert read(metadata=metadata).metadata == metadata
    with pytest.raises(RequestError, match="'metadata': too many properties"):
        read(metadata={**metadata, "more": ""})


def test_ids_name_their_jobs() -> None:
    assert job_of(response_id("abc")) == "abc"
    assert job_of("chatcmpl-abc") is None


def echo(task: Task) -> dict[str, Any]:
    """Answers a responses task with the last text of its input."""
    request = task.request
    if not isinstance(request, ResponsesRequest):
        return answer(task)
    text = str(request.generated_from().messages[-1].content)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"id": f"msg_{task.id}", "type": "message", "status": "completed",
               "role": "assistant", "content": [part]}  # fmt: skip
    return response_object(
        request, task.id, status="completed", model="fake", created_at=1, output=[message]
    )


@pytest.fixture
def answering(start_worker: StartWorker) -> Callable[..., Job]:
    """Submits a body and waits for its end."""
    start_worker(FakeEngine(answer_with=echo))

    def submitted(**body: Any) -> Job:
        job = submit(**body)
        (ended,) = as_completed([job], timeout=PATIENCE)
        return ended

    return submitted


class TestHistory:
    def test_what_was_asked_and_said_before_becomes_input(
        self, answering: Callable[..., Job]
    ) -> None:
        first = answering(input="One", instructions="Not inherited.")
        second = answering(input="Two", previous_response_id=response_id(first.id))
        items = [{"role": "user", "content": "Three"}]
        third = answering(input=items, previous_response_id=response_id(second.id))

        kind, body = third.payload()
        assert kind == "responses"
        request = validate(kind, body)
        assert isinstance(request, ResponsesRequest)
        assert [(m.role, m.content) for m in request.generated_from().messages] == [
            ("user", "One"),
            ("assistant", "One"),
            ("user", "Two"),
            ("assistant", "Two"),
            ("user", "Three"),
        ]
        assert third.result(timeout=0)["previous_response_id"] == response_id(second.id)

    @pytest.mark.parametrize("previous", ["resp_unknown", "chatcmpl-x", "x"])
    def test_an_unknown_one_is_refused(
        self, redis_url: str, connection: Redis, previous: str
    ) -> None:
        with pytest.raises(RequestError, match=f"Previous response with id '{previous}' not found"):
            submit(input="Hi", previous_response_id=previous)
        with pytest.raises(RequestError, match=r"^bodies\[0\]: Previous response") as refused:
            submit_many([{"input": "Hi", "previous_response_id": previous}])
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
        assert connection.dbsize() == 0

    def test_a_chat_or_one_that_was_not_to_be_stored_is_none(
        self, answering: Callable[..., Job]
    ) -> None:
        for job in (answering(prompt="Hi"), answering(input="Hi", store=False)):
            with pytest.raises(RequestError) as refused:
                submit(input="Hi", previous_response_id=response_id(job.id))
            assert refused.value.code == "previous_response_not_found"

    def test_one_without_an_answer_cannot_be_gone_on_from(self, redis_url: str) -> None:
        waiting = submit(input="Hi")
        with pytest.raises(RequestError, match=r"is queued; only one that is completed"):
            submit(input="Hi", previous_response_id=response_id(waiting.id))
        waiting.cancel()
        with pytest.raises(RequestError, match=r"is cancelled; only one that is completed"):
            submit(input="Hi", previous_response_id=response_id(waiting.id))


class Number(BaseModel):
    a: int


def test_a_schema_is_asked_for_and_parsed(answering: Callable[..., Job]) -> None:
    job = submit(input='{"a": 5}', schema=Number)
    assert job.payload().body["text"] == {
        "format": {
            "type": "json_schema",
            "name": "Number",
            "schema": Number.model_json_schema(),
            "strict": True,
        }
    }
    assert job.parsed(timeout=PATIENCE) == Number(a=5)


@pytest.mark.parametrize(
    ("window", "priority"),
    [("soonest", "high"), ("2h", "default"), ("8h", "low"), (None, "low")],
)
def test_the_window_decides_the_priority(
    redis_url: str, connection: Redis, window: str | None, priority: str
) -> None:
    job = submit(input="Hi", background_options={"completion_window": window}, priority="low")
    origin = connection.hget(RQJob.key_for(job.id), "origin")
    assert origin == f"mlx-rq:default:{priority}".encode()


def test_a_failure_is_told_in_the_codes_that_a_response_has() -> None:
    for given, told in (
        ("context_length_exceeded", "invalid_prompt"),
        ("rate_limit_exceeded", "rate_limit_exceeded"),
        ("invalid_value", "invalid_prompt"),
    ):
        error = failure(given)["error"]
        written = response_object(
            read(), "j", status="failed", model="m", created_at=1, error=error
        )
        assert written["error"] == {"code": told, "message": "The engine would not."}
    crash = {"message": "x", "type": "server_error", "param": None, "code": "engine_error"}
    written = response_object(read(), "j", status="failed", model="m", created_at=1, error=crash)
    assert written["error"]["code"] == "server_error"
