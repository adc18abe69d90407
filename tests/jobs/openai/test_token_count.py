"""The body of a job that counts another body's tokens."""

from typing import Any

import pytest

from mlx_rq.jobs.openai.answers import finish_reason_of, text_of, usage_of
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.token_count import TokenCountRequest, counting
from mlx_rq.jobs.openai.validation import kind_of, validate, validate_as

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "model": "m"},
    "completion": {"prompt": ["Hi", "there"], "model": "m"},
    "responses": {"input": "Hi", "instructions": "Be brief.", "model": "m"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_what_is_counted_is_read_as_the_body_that_it_is(kind: str) -> None:
    body = counting(BODIES[kind])
    assert kind_of(body) == "token_count"
    request = validate("token_count", body)
    assert isinstance(request, TokenCountRequest)
    assert request.count_tokens == validate(kind, BODIES[kind])
    assert request.generated_from() == validate(kind, BODIES[kind]).generated_from()


def test_the_model_is_that_of_the_counted_body_unless_another_is_named() -> None:
    read = validate_as
    assert read(TokenCountRequest, {"count_tokens": BODIES["chat"]}).model == "m"
    assert read(TokenCountRequest, {"count_tokens": BODIES["chat"], "model": "n"}).model == "n"
    assert read(TokenCountRequest, {"count_tokens": {"prompt": "Hi"}}).model is None


@pytest.mark.parametrize(
    ("counted", "code", "param"),
    [
        (5, "invalid_type", "count_tokens"),
        ({}, "missing_required_parameter", "count_tokens.messages"),
        ({"messages": []}, "empty_array", "count_tokens.messages"),
        ({"prompt": "Hi", "messages": []}, "unknown_parameter", "count_tokens.messages"),
        ({"count_tokens": {"prompt": "Hi"}}, "missing_required_parameter", "count_tokens.messages"),
        ({"input": "Hi", "colour": "red"}, "unknown_parameter", "count_tokens.colour"),
        ({"prompt": "Hi", "max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        ({"input": "Hi", "conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"input": "Hi", "background": True, "store": False}, "invalid_value", "store"),
    ],
)
def test_a_wrong_one_is_refused(counted: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate("token_count", {"count_tokens": counted})
    assert (refused.value.code, refused.value.param) == (code, param)


def test_a_count_beside_a_prompt_is_two_jobs() -> None:
    with pytest.raises(RequestError, match="not 2") as refused:
        kind_of({"prompt": "Hi", "count_tokens": {"prompt": "Hi"}})
    assert refused.value.param == "count_tokens"
    assert "'messages' (chat)" in str(refused.value)


def test_what_an_answer_says_is_the_count() -> None:
    answer = {"object": "response.input_tokens", "input_tokens": 42}
    assert (text_of(answer), finish_reason_of(answer)) == ("42", "stop")
    assert usage_of(answer) == (0, 0, 0)


def test_the_records_of_the_kinds_tell_them_apart() -> None:
    for name in ("kind", "prompt_field", "object_name"):
        assert len({getattr(request, name) for request in KINDS.values()}) == len(KINDS)
    for kind, request in KINDS.items():
        assert request.kind == kind_of(request.example) == kind
        validate(kind, request.example)
