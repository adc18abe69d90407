"""Which bodies are let in, and in which words the others are refused."""

import json
from typing import Any

import pytest
from fakes import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.sizes import DEFAULT_MAX_BODY
from mlx_rq.jobs.openai.validation import encode_body, kind_of, validate

HI = [{"role": "user", "content": "Say hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "completion": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "token_count": {"count_tokens": {"messages": HI}},
}


def refusal(body: dict[str, Any], kind: str | None = None) -> dict[str, Any]:
    """The error object with which a body is refused."""
    with pytest.raises(RequestError) as refused:
        validate(kind or kind_of(body), body)
    error = refused.value.error
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert str(refused.value) == error["message"]
    assert (refused.value.code, refused.value.param) == (error["code"], error["param"])
    return error


def told(body: dict[str, Any], kind: str | None = None) -> tuple[str | None, str | None, str]:
    """Code, param and message of a refusal."""
    error = refusal(body, kind)
    return error["code"], error["param"], error["message"]


# Numbers: name, "decimal" or "integer", lowest, highest (None: no end), and for which kinds of job.
BOTH = ("chat", "completion")
RANGES: list[tuple[str, str, float, float | None, tuple[str, ...]]] = [
    ("temperature", "decimal", 0, 2, BOTH),
    ("top_p", "decimal", 0, 1, BOTH),
    ("min_p", "decimal", 0, 1, BOTH),
    ("presence_penalty", "decimal", -2, 2, BOTH),
    ("frequency_penalty", "decimal", -2, 2, BOTH),
    ("n", "integer", 1, 128, BOTH),
    ("seed", "integer", -(2**63), 2**63 - 1, BOTH),
    ("max_tokens", "integer", 1, None, ("chat",)),
    ("max_completion_tokens", "integer", 1, None, ("chat",)),
    ("top_k", "integer", 0, None, BOTH),
    ("min_tokens", "integer", 0, None, BOTH),
]
EACH_RANGE = [
    pytest.param(name, number, low, high, kind, id=f"{kind}-{name}")
    for name, number, low, high, kinds in RANGES
    for kind in kinds
]


@pytest.mark.parametrize(("name", "number", "low", "high", "kind"), EACH_RANGE)
class TestNumbers:
    def test_both_ends_of_the_range_are_good(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        for value in (low, 10**9 if high is None else high):
            request = validate(kind, {**BODIES[kind], name: value})
            assert getattr(request, name) == value

    def test_below_the_range(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        value = low - (1 if number == "integer" else 0.5)
        assert told({**BODIES[kind], name: value}) == (
            f"{number}_below_min_value",
            name,
            f"Invalid '{name}': {number} below minimum value. "
            f"Expected a value >= {low}, but got {value} instead.",
        )

    def test_above_the_range(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        if high is None:  # no end: what is large is good (and tried above)
            return
        value = high + (1 if number == "integer" else 0.5)
        assert told({**BODIES[kind], name: value}) == (
            f"{number}_above_max_value",
            name,
            f"Invalid '{name}': {number} above maximum value. "
            f"Expected a value <= {high}, but got {value} instead.",
        )

    @pytest.mark.parametrize(
        ("value", "called"),
        [
            ("1", "a string"),
            (True, "a boolean"),
            ([1], "an array"),
            ({"a": 1}, "an object"),
        ],
    )
    def test_another_type(
        self,
        name: str,
        number: str,
        low: float,
        high: float | None,
        kind: str,
        value: Any,
        called: str,
    ) -> None:
        expected = "an integer" if number == "integer" else "a decimal"
        assert told({**BODIES[kind], name: value}) == (
            "invalid_type",
            name,
            f"Invalid type for '{name}': expected {expected}, but got {called} instead.",
        )

    def test_null_means_the_default(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        given_null = validate(kind, {**BODIES[kind], name: None})
        assert given_null == validate(kind, BODIES[kind])
        assert getattr(given_null, name) is None

    def test_not_a_number_and_infinity_are_refused(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        for value in (float("nan"), float("inf"), float("-inf")):
            code, param, _ = told({**BODIES[kind], name: value})
            assert code in ("invalid_value", "invalid_type")
            assert param == name

    def test_a_number_of_thousands_of_digits_is_refused_not_a_crash(
        self, name: str, number: str, low: float, high: float | None, kind: str
    ) -> None:
        # Python refuses to print such a number, and an answer has to be printed.
        body = {**BODIES[kind], name: -(10**5000)}
        assert refusal(body)["param"] == name


@pytest.mark.parametrize("kind", BOTH)
class TestOtherFields:
    def test_a_decimal_for_an_integer_is_refused(self, kind: str) -> None:
        assert told({**BODIES[kind], "seed": 1.5}) == (
            "invalid_type",
            "seed",
            "Invalid type for 'seed': expected an integer, but got a decimal instead.",
        )

    def test_an_integer_for_a_decimal_is_good(self, kind: str) -> None:
        assert validate(kind, {**BODIES[kind], "temperature": 1}).temperature == 1.0

    def test_repetition_penalty_is_above_zero(self, kind: str) -> None:
        body = BODIES[kind]
        assert validate(kind, {**body, "repetition_penalty": 2}).repetition_penalty == 2
        assert validate(kind, {**body, "repetition_penalty": 1e-9}).repetition_penalty == 1e-9
        assert told({**body, "repetition_penalty": 0}) == (
            "decimal_below_min_value",
            "repetition_penalty",
            "Invalid 'repetition_penalty': decimal below minimum value. "
            "Expected a value > 0, but got 0 instead.",
        )
        assert told({**body, "repetition_penalty": 2.5}) == (
            "decimal_above_max_value",
            "repetition_penalty",
            "Invalid 'repetition_penalty': decimal above maximum value. "
            "Expected a value <= 2, but got 2.5 instead.",
        )

    @pytest.mark.parametrize(
        ("stop", "stops"),
        [
            (None, ()),
            ("\n", ("\n",)),
            (["a"], ("a",)),
            (["a", "b", "c", "d"], ("a", "b", "c", "d")),
        ],
    )
    def test_stop_is_a_string_or_one_to_four(
        self, kind: str, stop: Any, stops: tuple[str, ...]
    ) -> None:
        assert validate(kind, {**BODIES[kind], "stop": stop}).stops == stops

    @pytest.mark.parametrize(
        ("stop", "code", "param", "message"),
        [
            (
                ["a", "b", "c", "d", "e"],
                "array_above_max_length",
                "stop",
                "Invalid 'stop': array too long. Expected an array with maximum length 4, "
                "but got an array with length 5 instead.",
            ),
            (
                [],
                "empty_array",
                "stop",
                "Invalid 'stop': empty array. Expected an array with minimum length 1, "
                "but got an empty array instead.",
            ),
            (
                5,
                "invalid_type",
                "stop",
                "Invalid type for 'stop': expected a string, but got an integer instead.",
            ),
            (
                {},
                "invalid_type",
                "stop",
                "Invalid type for 'stop': expected a string, but got an object instead.",
            ),
            (
                ["a", None],
                "invalid_type",
                "stop[1]",
                "Invalid type for 'stop[1]': expected a string, but got null instead.",
            ),
            (
                "",
                "invalid_value",
                "stop",
                "Invalid 'stop': String should have at least 1 character.",
            ),
            (
                ["a", ""],
                "invalid_value",
                "stop[1]",
                "Invalid 'stop[1]': String should have at least 1 character.",
            ),
        ],
    )
    def test_another_stop_is_refused(
        self, kind: str, stop: Any, code: str, param: str, message: str
    ) -> None:
        assert told({**BODIES[kind], "stop": stop}) == (code, param, message)

    def test_the_model_is_a_name(self, kind: str) -> None:
        body = BODIES[kind]
        for name in ("m", "org/model", "größe 7b", "x" * 256):
            assert validate(kind, {**body, "model": name}).model == name
        assert validate(kind, {**body, "model": None}).model is None
        assert told({**body, "model": "x" * 257}) == (
            "string_above_max_length",
            "model",
            "Invalid 'model': string too long. Expected a string with maximum length 256, "
            "but got a string with length 257 instead.",
        )
        assert told({**body, "model": 5}) == (
            "invalid_type",
            "model",
            "Invalid type for 'model': expected a string, but got an integer instead.",
        )
        assert told({**body, "model": ""})[:2] == ("invalid_value", "model")

    def test_logit_bias_is_an_object_of_numbers(self, kind: str) -> None:
        body = BODIES[kind]
        bias = {"1": -100, "2": 100, "3": 0.5}
        assert validate(kind, {**body, "logit_bias": bias}).logit_bias == bias
        assert told({**body, "logit_bias": {"17": 101}}) == (
            "decimal_above_max_value",
            "logit_bias.17",
            "Invalid 'logit_bias.17': decimal above maximum value. "
            "Expected a value <= 100, but got 101 instead.",
        )
        assert told({**body, "logit_bias": {"17": "x"}})[:2] == ("invalid_type", "logit_bias.17")
        for key in ("x", "", "-1", "\u0661", "9" * 20):
            assert told({**body, "logit_bias": {key: 1}}) == (
                "invalid_value",
                "logit_bias",
                f"Invalid key in 'logit_bias': {key!r}. Expected the id of a token.",
            )
        assert told({**body, "logit_bias": []}) == (
            "invalid_type",
            "logit_bias",
            "Invalid type for 'logit_bias': expected an object, but got an array instead.",
        )

    def test_ignore_eos_is_a_boolean(self, kind: str) -> None:
        assert validate(kind, {**BODIES[kind], "ignore_eos": True}).ignore_eos is True
        assert told({**BODIES[kind], "ignore_eos": 1}) == (
            "invalid_type",
            "ignore_eos",
            "Invalid type for 'ignore_eos': expected a boolean, but got an integer instead.",
        )

    def test_an_unknown_field_is_refused_by_name(self, kind: str) -> None:
        assert told({**BODIES[kind], "frobnicate": 1}) == (
            "unknown_parameter",
            "frobnicate",
            "Unrecognized request argument supplied: frobnicate",
        )
        assert told({**BODIES[kind], "frobnicate": None})[0] == "unknown_parameter"

    def test_hints_for_a_hosted_service_are_let_through(self, kind: str) -> None:
        hints = {
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
            "prompt_cache_retention": "24h",
            "service_tier": "flex",
            "verbosity": "low",
            "prediction": {"type": "content", "content": "x"},
        }
        assert validate(kind, {**BODIES[kind], **hints}) == validate(kind, BODIES[kind])

    @pytest.mark.parametrize("value", [False, None])
    def test_stream_false_asks_for_nothing(self, kind: str, value: Any) -> None:
        assert validate(kind, {**BODIES[kind], "stream": value}) == validate(kind, BODIES[kind])


# Parameters that may not be done yet, with values that ask for them.
ASKING: dict[str, list[Any]] = {
    "stream": [True, "yes"],
    "stream_options": [{"include_usage": True}],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "context_management": [[{"type": "compaction"}]],
    "moderation": [{"model": "m"}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "x"}],
    "web_search_options": [{}],
}
EACH_NOT_YET = [
    pytest.param(kind, name, id=f"{kind}-{name}")
    for kind, model in KINDS.items()
    for name in model.not_yet
]


@pytest.mark.parametrize(("kind", "name"), EACH_NOT_YET)
def test_what_is_not_done_yet_is_refused_by_name_never_ignored(kind: str, name: str) -> None:
    for value in ASKING[name]:
        assert told({**BODIES[kind], name: value}) == (
            "unsupported_parameter",
            name,
            f"Unsupported parameter: '{name}' {why(name)}.",
        )


def why(name: str) -> str:
    match name:
        case "stream" | "stream_options":
            return (
                "is for requests that wait for their answer: /v1/chat/completions, /v1/completions "
                "and /v1/responses of the HTTP server (`mlx-rq serve`, `mlx-rq up`)"
            )
        case "moderation":
            return "is a service of OpenAI's; here, nothing judges what is asked and answered"
        case "functions":
            return (
                "is what 'tools' were called before: send each as "
                '{"type": "function", "function": {…}} in \'tools\''
            )
        case "function_call":
            return "is what 'tool_choice' was called before: send that, beside 'tools'"
        case "conversation":
            return "names what is not kept here; 'previous_response_id' goes on from a response"
    return "is not supported yet"


@pytest.mark.parametrize(("kind", "name"), EACH_NOT_YET)
def test_what_is_not_done_yet_may_say_that_it_is_not_wanted(kind: str, name: str) -> None:
    plain = validate(kind, BODIES[kind])
    for value in (None, *KINDS[kind].not_yet[name]):
        assert validate(kind, {**BODIES[kind], name: value}) == plain


class TestMessages:
    @pytest.mark.parametrize(
        "message",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be brief.", "name": "dev_1"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "Hi", "refusal": None},
            {"role": "assistant", "content": None},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ],
    )
    def test_every_role_is_good(self, message: dict[str, Any]) -> None:
        request = validate("chat", {"messages": [message]})
        assert isinstance(request, ChatRequest)
        assert request.messages[0].model_dump(exclude_unset=True) == message

    @pytest.mark.parametrize(
        ("messages", "code", "param", "message"),
        [
            (
                [],
                "empty_array",
                "messages",
                "Invalid 'messages': empty array. Expected an array with minimum length 1, "
                "but got an empty array instead.",
            ),
            (
                None,
                "invalid_type",
                "messages",
                "Invalid type for 'messages': expected an array, but got null instead.",
            ),
            (
                "Hi",
                "invalid_type",
                "messages",
                "Invalid type for 'messages': expected an array, but got a string instead.",
            ),
            (
                ["Hi"],
                "invalid_type",
                "messages[0]",
                "Invalid type for 'messages[0]': expected an object, but got a string instead.",
            ),
            (
                [*HI, {"role": "robot", "content": "x"}],
                "invalid_value",
                "messages[1].role",
                "Invalid value: 'robot' at 'messages[1].role'. Supported values are: "
                "'system', 'developer', 'user', 'assistant', 'tool', 'function'.",
            ),
            (
                [{"content": "x"}],
                "missing_required_parameter",
                "messages[0].role",
                "Missing required parameter: 'messages[0].role'.",
            ),
            (
                [{"role": "user"}],
                "missing_required_parameter",
                "messages[0].content",
                "Missing required parameter: 'messages[0].content'.",
            ),
            (
                [{"role": "user", "content": None}],
                "invalid_type",
                "messages[0].content",
                "Invalid type for 'messages[0].content': expected a string, but got null instead.",
            ),
            (
                [{"role": "user", "content": {}}],
                "invalid_type",
                "messages[0].content",
                "Invalid type for 'messages[0].content': expected a string, "
                "but got an object instead.",
            ),
            (
                [{"role": "user", "content": []}],
                "empty_array",
                "messages[0].content",
                "Invalid 'messages[0].content': empty array. Expected an array with minimum "
                "length 1, but got an empty array instead.",
            ),
            (
                [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "image_url"}],
                    }
                ],
                "invalid_value",
                "messages[0].content[1].type",
                "Invalid content type: 'image_url' at 'messages[0].content[1].type'. "
                "This is a text model: only 'text' parts are supported.",
            ),
            (
                [{"role": "user", "content": [{"text": "a"}]}],
                "missing_required_parameter",
                "messages[0].content[0].type",
                "Missing required parameter: 'messages[0].content[0].type'.",
            ),
            (
                [{"role": "user", "content": [{"type": "text", "text": 5}]}],
                "invalid_type",
                "messages[0].content[0].text",
                "Invalid type for 'messages[0].content[0].text': expected a string, "
                "but got an integer instead.",
            ),
            (
                [{"role": "user", "content": "x", "zz": 1}],
                "unknown_parameter",
                "messages[0].zz",
                "Unrecognized request argument supplied: messages[0].zz",
            ),
            (
                [{"role": "user", "content": "x", "name": "李" * 65}],
                "string_above_max_length",
                "messages[0].name",
                "Invalid 'messages[0].name': string too long. Expected a string with maximum "
                "length 64, but got a string with length 65 instead.",
            ),
            (
                [{"role": "tool", "content": "42"}],
                "missing_required_parameter",
                "messages[0].tool_call_id",
                "Missing required parameter: 'messages[0].tool_call_id'.",
            ),
            (
                [{"role": "assistant", "content": []}],
                "empty_array",
                "messages[0].content",
                "Invalid 'messages[0].content': empty array. Expected an array with minimum "
                "length 1, but got an empty array instead.",
            ),
            (
                [{"role": "assistant", "content": "x", "reasonings": "Hm."}],
                "unknown_parameter",
                "messages[0].reasonings",
                "Unrecognized request argument supplied: messages[0].reasonings",
            ),
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c",
                                "type": "mcp",
                                "function": {"name": "f", "arguments": "{}"},
                            }
                        ],
                    }
                ],
                "invalid_value",
                "messages[0].tool_calls[0].type",
                "Invalid value: 'mcp' at 'messages[0].tool_calls[0].type'. "
                "Supported values are: 'function'.",
            ),
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": "{}"}}
                        ],
                    }
                ],
                "missing_required_parameter",
                "messages[0].tool_calls[0].id",
                "Missing required parameter: 'messages[0].tool_calls[0].id'.",
            ),
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}],
                    }
                ],
                "missing_required_parameter",
                "messages[0].tool_calls[0].custom.input",
                "Missing required parameter: 'messages[0].tool_calls[0].custom.input'.",
            ),
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c",
                                "type": "function",
                                "function": {"name": "f", "arguments": {}},
                            }
                        ],
                    }
                ],
                "invalid_type",
                "messages[0].tool_calls[0].function.arguments",
                "Invalid type for 'messages[0].tool_calls[0].function.arguments': "
                "expected a string, but got an object instead.",
            ),
        ],
    )
    def test_a_fault_is_named_where_it_is(
        self, messages: Any, code: str, param: str, message: str
    ) -> None:
        assert told({"messages": messages}, "chat") == (code, param, message)

    def test_a_tuple_is_not_called_an_array_that_is_not_an_array(self) -> None:
        message = refusal({"messages": tuple(HI)})["message"]
        assert message == (
            "Invalid type for 'messages': expected an array, but got a tuple instead."
        )


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("", [""]),
            ("Hi", ["Hi"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2], [[1, 2]]),
            ([[1], [2, 3]], [[1], [2, 3]]),
        ],
    )
    def test_all_four_forms_are_good(self, prompt: Any, prompts: Any) -> None:
        request = validate("completion", {"prompt": prompt})
        assert isinstance(request, CompletionRequest)
        assert request.prompts == prompts

    @pytest.mark.parametrize(
        ("prompt", "code", "param"),
        [
            (None, "invalid_type", "prompt"),
            (5, "invalid_type", "prompt"),
            ({}, "invalid_type", "prompt"),
            ([], "empty_array", "prompt"),
            ([[]], "empty_array", "prompt[0]"),
            ([[1], []], "empty_array", "prompt[1]"),
            (["a", 5], "invalid_type", "prompt[1]"),
            ([1, "a"], "invalid_type", "prompt[1]"),
            ([True], "invalid_type", "prompt[0]"),
            ([1, -1], "integer_below_min_value", "prompt[1]"),
            ([[1, 1.5]], "invalid_type", "prompt[0][1]"),
            ([{}], "invalid_type", "prompt[0]"),
        ],
    )
    def test_another_prompt_is_refused_where_the_fault_is(
        self, prompt: Any, code: str, param: str
    ) -> None:
        assert told({"prompt": prompt}, "completion")[:2] == (code, param)


class TestBudget:
    def test_a_chat_answer_may_be_as_long_as_the_context_allows(self) -> None:
        assert validate("chat", {"messages": HI}).budget is None
        assert validate("chat", {"messages": HI, "max_tokens": 3}).budget == 3

    def test_max_completion_tokens_wins_over_max_tokens(self) -> None:
        body = {"messages": HI, "max_tokens": 3, "max_completion_tokens": 7}
        assert validate("chat", body).budget == 7

    def test_a_completion_has_16_tokens_unless_it_says_otherwise(self) -> None:
        assert validate("completion", {"prompt": "Hi"}).budget == 16
        assert validate("completion", {"prompt": "Hi", "max_tokens": 3}).budget == 3

    def test_max_completion_tokens_is_unknown_to_completions(self) -> None:
        body = {"prompt": "Hi", "max_completion_tokens": 7}
        assert told(body)[:2] == ("unknown_parameter", "max_completion_tokens")


class TestOrder:
    def test_the_first_of_several_faults_is_told_in_the_order_of_the_fields(self) -> None:
        body = {"messages": HI, "top_p": 5, "temperature": 3, "frobnicate": 1}
        assert told(body)[1] == "temperature"
        assert told({**body, "temperature": 1})[1] == "top_p"
        assert told({**body, "temperature": 1, "top_p": 1})[1] == "frobnicate"

    def test_the_first_faulty_message_is_told(self) -> None:
        body = {"messages": [*HI, {"role": "user"}, {"role": "robot"}]}
        assert told(body)[1] == "messages[1].content"


class TestKind:
    def test_the_field_that_only_one_kind_has_decides(self) -> None:
        assert kind_of({"messages": HI}) == "chat"
        assert kind_of({"prompt": "Hi"}) == "completion"
        assert kind_of({"prompt": "Hi", "messages": None}) == "completion"
        assert kind_of({"input": "Hi"}) == "responses"

    def test_a_body_without_either_lacks_messages(self) -> None:
        assert told({}) == (
            "missing_required_parameter",
            "messages",
            "Missing required parameter: 'messages'.",
        )

    def test_both_are_refused(self) -> None:
        with pytest.raises(RequestError) as refused:
            kind_of({"messages": HI, "prompt": "Hi"})
        assert (refused.value.code, refused.value.param) == ("invalid_value", "prompt")

    def test_an_unknown_kind_from_the_queue_is_refused(self) -> None:
        assert told({"messages": HI}, "video")[:2] == ("invalid_value", "kind")


class TestEncoding:
    def test_unicode_goes_through_unchanged(self) -> None:
        body = {"messages": [{"role": "user", "content": "Grüße 🌍 \u2028 \x00 日本語"}]}
        assert json.loads(encode_body(body)) == body

    @pytest.mark.parametrize(
        "value",
        [float("nan"), float("inf"), {1}, b"bytes", object(), 10**5000],
        ids=["nan", "infinity", "set", "bytes", "object", "endless integer"],
    )
    def test_what_json_cannot_say_is_refused(self, value: Any) -> None:
        with pytest.raises(RequestError, match=r"^The body is not JSON: ") as refused:
            encode_body({"messages": HI, "chat_template_kwargs": {"x": value}})
        assert (refused.value.code, refused.value.param) == ("invalid_json", None)

    def test_half_of_a_pair_in_a_deep_place_is_found(self) -> None:
        nested: Any = "\ud800"
        for _ in range(600):
            nested = [nested]
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            encode_body({"chat_template_kwargs": {"x": nested}})

    def test_a_body_nested_thousands_deep_is_refused_not_a_crash(self) -> None:
        nested: dict[str, Any] = {}
        for _ in range(100_000):
            nested = {"a": nested}
        with pytest.raises(RequestError, match=r"^The body is not JSON: ") as refused:
            encode_body({"messages": HI, "chat_template_kwargs": nested})
        assert refused.value.code == "invalid_json"

    def test_a_body_that_refers_to_itself_is_refused(self) -> None:
        loop: dict[str, Any] = {}
        loop["again"] = loop
        with pytest.raises(RequestError, match=r"^The body is not JSON: "):
            encode_body({"messages": HI, "chat_template_kwargs": loop})

    def test_the_largest_body_is_four_mebibytes_of_utf8(self) -> None:
        frame = len(encode_body({"prompt": ""}))
        largest = {"prompt": "ü" * ((DEFAULT_MAX_BODY - frame) // 2)}
        assert len(encode_body(largest)) in (DEFAULT_MAX_BODY, DEFAULT_MAX_BODY - 1)
        with pytest.raises(RequestError) as refused:
            encode_body({"prompt": largest["prompt"] + "üü"})
        assert refused.value.code == "request_too_large"
        assert str(refused.value) in (
            "The body has 4,194,308 bytes; the limit is 4,194,304.",
            "The body has 4,194,307 bytes; the limit is 4,194,304.",
        )


BAD_PARAMETERS = [
    json.loads(line) for line in (CASES / "bad_parameters.jsonl").read_text().splitlines()
]
OUTCOMES = {
    "temp": ("decimal_above_max_value", "temperature"),
    "top_p": ("decimal_below_min_value", "top_p"),
    "n0": ("integer_below_min_value", "n"),
    "empty": ("empty_array", "messages"),
    "role": ("invalid_value", "messages[0].role"),
    "stream": ("unsupported_parameter", "stream"),
    "zero": ("integer_below_min_value", "max_completion_tokens"),
    "image": ("invalid_value", "messages[0].content[0].type"),
    "stop5": ("array_above_max_length", "stop"),
    "unknown": ("unknown_parameter", "frobnicate"),
}


def test_there_are_ten_inputs_that_people_really_sent() -> None:
    assert [line["custom_id"] for line in BAD_PARAMETERS] == list(OUTCOMES)


@pytest.mark.parametrize("line", BAD_PARAMETERS, ids=lambda line: line["custom_id"])
def test_inputs_that_people_really_sent_are_refused(line: dict[str, Any]) -> None:
    assert told(line["body"])[:2] == OUTCOMES[line["custom_id"]]


# Arbitrary JSON, with the names that mean something here turning up often.
NAMES = st.sampled_from(
    [
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *ChatRequest.not_yet,
        *ResponsesRequest.model_fields,
        *("role", "content", "type", "text", "name", "tool_calls", "function", "string", "array"),
    ]
)
TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from(["user", "assistant", "system", "tool", "text", "function"]),
)
JSON = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(NAMES | TEXT, children, max_size=5),
    ),
    max_leaves=20,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "robot"])},
        optional={"content": JSON, "name": JSON, "tool_calls": JSON, "tool_call_id": JSON},
    ),
    max_size=3,
)
OBJECTS = st.dictionaries(NAMES | TEXT, JSON, max_size=6) | st.builds(
    lambda messages, rest: {**rest, "messages": messages},
    MESSAGES,
    st.dictionaries(NAMES, JSON, max_size=4),
)


@settings(max_examples=200)
@given(body=OBJECTS, kind=st.sampled_from(sorted(KINDS)))
def test_any_json_is_either_a_request_or_refused_with_an_error_object(
    body: dict[str, Any], kind: str
) -> None:
    if kind == "responses" and "messages" in body:
        body = {**body, "input": body["messages"]}
        del body["messages"]
    error, request = outcome(kind, body)
    if request is None:
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"]
        assert error["code"]
        # It goes into Redis, into a log, onto a terminal: it must be text that can be written.
        json.dumps(error, ensure_ascii=False).encode()
    else:
        generated = request.generated_from()
        assert generated.stops is not None
        budget = generated.budget
        assert budget is None or budget >= 1 or getattr(request, "echo", False)


def outcome(kind: str, body: dict[str, Any]) -> tuple[dict[str, Any], JobRequest | None]:
    """The error object of a body that is refused, or else the request."""
    try:
        return {}, validate(kind, body)
    except RequestError as error:
        return error.error, None
