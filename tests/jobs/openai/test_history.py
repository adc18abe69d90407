"""What clients send back: the openai client's own objects, and what other servers write."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from fakes import PATIENCE, RunningWorker
from openai.lib._parsing._completions import parse_chat_completion
from openai.lib._parsing._responses import parse_response
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from mlx_rq import RequestError, submit
from mlx_rq.jobs.openai.messages import Message
from mlx_rq.jobs.openai.plain import plain
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.validation import validate

HI = {"role": "user", "content": "Hi"}


class Thing(BaseModel):
    name: str


TOOL = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM = {"id": "c2", "type": "custom", "custom": {"name": "run", "input": "ls -l"}}

FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda answer: answer,
    "model_dump": lambda answer: answer.model_dump(),
    "model_dump json": lambda answer: answer.model_dump(mode="json"),
    "to_dict": lambda answer: answer.to_dict(),
    "to_json": lambda answer: json.loads(answer.to_json()),
}


def chat_messages(message: Any) -> list[dict[str, Any]]:
    """What a chat with this message in its history has as messages, without what is unset."""
    request = validate("chat", plain({"messages": [HI, message, HI]}))
    assert isinstance(request, ChatRequest)
    return [one.model_dump(exclude_none=True) for one in request.messages]


def replayed(message: Any) -> dict[str, Any]:
    """What becomes of a message in the history of a chat."""
    return chat_messages(message)[1]


def completion(message: dict[str, Any]) -> ChatCompletion:
    return ChatCompletion.model_validate(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
    )


ANSWERS: dict[str, dict[str, Any]] = {
    "text": {"role": "assistant", "content": '{"name": "x"}', "annotations": []},
    "refusal": {"role": "assistant", "content": None, "refusal": "No."},
    "calls": {"role": "assistant", "content": None, "tool_calls": [CALL]},
    "legacy call": {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    },
    "reasoning": {
        "role": "assistant",
        "content": '{"name": "x"}',
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "index": 0}],
    },
}


# As it is the client itself that writes `parsed` so.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_the_openai_clients_answers_may_be_sent_back(answer: str, form: str) -> None:
    parsed = parse_chat_completion(
        response_format=Thing, input_tools=[TOOL], chat_completion=completion(ANSWERS[answer])
    )
    for message in (parsed.choices[0].message, completion(ANSWERS[answer]).choices[0].message):
        dropped = ("annotations", "reasoning_details")
        assert replayed(FORMS[form](message)) == {
            name: value
            for name, value in ANSWERS[answer].items()
            if name not in dropped and value is not None
        }


OUTPUT = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": "gAAA",
    },
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": '{"name": "x"}', "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "No."},
        ],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "f",
        "arguments": "{}",
        "namespace": "n",
        "async": False,
    },
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "run", "input": "ls -l"},
]


@pytest.mark.parametrize("form", FORMS)
def test_the_openai_clients_responses_may_be_sent_back(form: str) -> None:
    response = Response.model_validate(
        {
            "id": "resp_1",
            "object": "response",
            "created_at": 0,
            "model": "m",
            "output": OUTPUT,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
    )
    tool = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    parsed = parse_response(text_format=Thing, input_tools=[tool], response=response)  # type: ignore[list-item]
    for answer in (response, parsed):
        items = [FORMS[form](item) for item in answer.output]
        request = validate("responses", plain({"input": [HI, *items, HI]}))
        (_, said, _) = request.generated_from().messages  # type: ignore[union-attr]
        assert said.model_dump(exclude_none=True) == {
            "role": "assistant",
            "content": '{"name": "x"}No.',
            "reasoning_content": "Hm.",
            "tool_calls": [CALL, CUSTOM],
        }


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            {"role": "tool", "tool_call_id": "c1", "name": "mcp.f", "content": "4"},
            {"role": "tool", "tool_call_id": "c1", "name": "mcp.f", "content": "4"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ),
        (  # vLLM's, which has an empty list where there are none
            {"role": "assistant", "content": "x", "tool_calls": [], "function_call": None},
            {"role": "assistant", "content": "x", "tool_calls": []},
        ),
        (  # of custom tools, which the openai client's parse() leaves out
            completion({"role": "assistant", "content": None, "tool_calls": [CALL, CUSTOM]})
            .choices[0]
            .message,
            {"role": "assistant", "tool_calls": [CALL, CUSTOM]},
        ),
        (  # Mistral's
            {
                "role": "assistant",
                "prefix": False,
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "x"},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "x"},
                ],
            },
        ),
        (  # of OpenAI's models that speak
            {
                "role": "assistant",
                "content": None,
                "audio": {"id": "a", "data": "…", "expires_at": 1, "transcript": "x"},
            },
            {"role": "assistant", "audio": {"transcript": "x"}},
        ),
        (  # Gemini's, Azure's
            {"role": "assistant", "content": "x", "extra_content": {}, "context": {}},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "function", "name": "f", "content": "4"},
            {"role": "function", "name": "f", "content": "4"},
        ),
        (  # put together from a stream
            {"role": "assistant", "tool_calls": [{"index": 0, **CALL}]},
            {"role": "assistant", "tool_calls": [CALL]},
        ),
        (  # litellm's
            {
                "role": "assistant",
                "content": "x",
                "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
                "provider_specific_fields": {"refusal": None},
            },
            {"role": "assistant", "content": "x"},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ),
        *(
            ({**HI, "name": name}, {**HI, "name": name})
            for name in ("Müller", "ann.lee", "李雷", "two words", "")
        ),
    ],
)
def test_what_others_write_is_taken(message: Any, kept: dict[str, Any]) -> None:
    assert replayed(message) == kept


def test_objects_and_numbers_as_keys_go_through_submit(
    redis_url: str, running_worker: Callable[..., AbstractContextManager[RunningWorker]]
) -> None:
    message = (
        parse_chat_completion(
            response_format=Thing, input_tools=[], chat_completion=completion(ANSWERS["text"])
        )
        .choices[0]
        .message
    )
    with running_worker() as worker:
        submit(messages=[HI, message, HI], logit_bias={17: -100}).result(timeout=PATIENCE)
        (task,) = worker.engine.added
    assert isinstance(task.request, ChatRequest)
    said: Message = task.request.messages[1]
    assert (said.role, said.content) == ("assistant", '{"name": "x"}')
    assert task.request.logit_bias == {"17": -100}


def test_a_key_that_is_no_number_is_refused_at_once(nobody_listens: str) -> None:
    with pytest.raises(RequestError, match="Invalid key in 'logit_bias': 'the'"):
        submit(messages=[HI], logit_bias={"the": 1}, redis_url=nobody_listens)
