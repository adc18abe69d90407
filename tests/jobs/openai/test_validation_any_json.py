"""Whatever JSON stands in whatever field: a request comes of it, or a RequestError."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from batch_helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_rq.jobs.batch.lines import KIND_BY_URL, good_line
from mlx_rq.jobs.client.submit import submit
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.validation import encode_body, validate

HI = [{"role": "user", "content": "Hi"}]
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "completion": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "token_count": {"count_tokens": {"prompt": "Hi"}},
}
URLS = {kind: url for url, kind in KIND_BY_URL.items()}


def nested(depth: int, as_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"items": value}
    return value


# Hypothesis shows what it found, and these cannot be shown: their names are drawn instead.
UNWIELDY: Mapping[str, Callable[[], Any]] = {
    "400 digits": lambda: 10**400,
    "minus 400 digits": lambda: -(10**400),
    "5000 digits": lambda: 10**5000,
    "60 lists": lambda: nested(60, as_list=True),
    "200 objects": lambda: nested(200, as_list=False),
    "20000 lists": lambda: nested(20_000, as_list=True),
    "20000 objects": lambda: nested(20_000, as_list=False),
}


def made(value: Any) -> Any:
    """The JSON that was drawn, unwieldy values in the place of their names."""
    match value:
        case str():
            return UNWIELDY[value]() if value in UNWIELDY else value
        case list():
            return [made(inner) for inner in value]
        case dict():
            return {name: made(inner) for name, inner in value.items()}
        case _:
            return value


TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=4) | st.sampled_from(
    ["\ud800", "a\udfff", "\ud83d\ude00"]
)
NAMES = TEXT | st.sampled_from(
    [
        *("type", "name", "json", "schema", "properties", "items", "enum", "multipleOf", "allOf"),
        *("required", "anyOf", "role", "content", "text", "function", "parameters", "strict"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.sampled_from([*UNWIELDY])
    | st.sampled_from(["function", "json_schema", "auto", "message", "user"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def flat_schema(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "x", "schema": schema}}


Place = Callable[[Any], dict[str, Any]]
INNER: dict[str, list[Place]] = {
    "chat": [
        lambda schema: {"response_format": json_schema(schema)},
        lambda schema: {"tools": [tool(schema)]},
        lambda schema: {"structured_outputs": {"json": schema}},
        lambda schema: {"messages": [{"role": "user", "content": schema}]},
    ],
    "completion": [
        lambda schema: {"guided_json": schema},
        lambda schema: {"guided_grammar": f"start: %json {json.dumps(schema)}"},
    ],
    "responses": [
        lambda schema: {"text": flat_schema(schema)},
        lambda schema: {"tools": [{"type": "function", "name": "f", "parameters": schema}]},
        lambda schema: {"input": [{"role": "user", "content": schema}]},
    ],
    "token_count": [
        lambda schema: {"count_tokens": {"prompt": "Hi", "guided_json": schema}},
        lambda schema: {"count_tokens": {"messages": [{"role": "user", "content": schema}]}},
        lambda schema: {"count_tokens": {"input": "Hi", "text": flat_schema(schema)}},
    ],
}


def at(field: str) -> Place:
    return lambda value: {field: value}


def places(kind: str) -> list[Place]:
    fields = KINDS[kind].model_fields
    return [at(field) for field in fields]


def outcome(kind: str, body: Mapping[str, Any]) -> RequestError | None:
    """What the body is refused with, if it is; anything else that is raised fails the test."""
    try:
        validate(kind, body)
        encode_body(body)
    except RequestError as error:
        refused = error
    else:
        return None
    json.dumps(refused.error, ensure_ascii=False).encode()  # it can be written
    assert refused.error["message"]
    return refused


@settings(max_examples=150)
@given(data=st.data(), kind=st.sampled_from(sorted(BODIES)))
def test_any_json_in_any_field_is_read_or_refused(data: st.DataObject, kind: str) -> None:
    place = data.draw(st.sampled_from(INNER[kind]) | st.sampled_from(places(kind)))
    value = data.draw(st.dictionaries(NAMES, JSON, min_size=1, max_size=3) | JSON)
    try:
        fields = place(made(value))
    except (ValueError, RecursionError):  # no grammar can be written with it
        return
    outcome(kind, {**BODIES[kind], **fields})


BAD_SCHEMAS = {
    "an endless multiple": {"type": "integer", "multipleOf": 10**400},
    "an endless multiple of many digits": {"multipleOf": 10**5000},
    "half of a surrogate pair": {"enum": ["\ud800"]},
    "half of one as a name": {"properties": {"\ud800": {}}},
    "a set": {"enum": {1, 2}},
    "endless in a merged schema": {"allOf": [{"multipleOf": 10**29 + n} for n in range(2000)]},
}
SCHEMA_PLACES = [
    pytest.param(kind, place, id=f"{kind}-{number}")
    for kind, number in (("chat", 0), ("chat", 1), ("chat", 2), ("completion", 0))
    for place in [INNER[kind][number]]
] + [pytest.param("responses", INNER["responses"][n], id=f"responses-{n}") for n in (0, 1)]


@pytest.mark.parametrize("schema", BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
@pytest.mark.parametrize(("kind", "place"), SCHEMA_PLACES)
def test_a_schema_that_cannot_be_measured_is_refused_as_a_schema(
    kind: str, place: Place, schema: Any
) -> None:
    body = {**BODIES[kind], **place(schema)}
    error = outcome(kind, body)
    assert error is not None
    assert "schema" in str(error) or "structured_outputs" in str(error)
    assert str(error).endswith(".")


@pytest.mark.parametrize("value", ["5", "[1]", "true", '"x"'])
def test_a_grammar_may_embed_what_is_no_object(value: str) -> None:
    assert outcome("completion", {"prompt": "x", "guided_grammar": f"start: %json {value}"}) is None


@pytest.mark.parametrize("kind", BODIES)
def test_a_value_that_no_check_foresaw_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unforeseen in (OverflowError("too large"), ValueError("odd"), RecursionError("deep")):

        def stumble(*_: Any, unforeseen: Exception = unforeseen) -> None:
            raise unforeseen

        monkeypatch.setattr(KINDS[kind], "check", stumble)
        error = outcome(kind, BODIES[kind])
        assert error is not None
        assert error.code == "invalid_value"
        assert str(unforeseen) in str(error)


@pytest.mark.parametrize("schema", BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_submit_says_so(schema: Any) -> None:
    with pytest.raises(RequestError):
        submit(messages=HI, schema=schema, redis_url="redis://127.0.0.1:1/0")


@pytest.mark.parametrize(("kind", "place"), SCHEMA_PLACES)
def test_a_line_of_a_batch_is_refused_alone(kind: str, place: Place) -> None:
    body = {**BODIES[kind], **place({"multipleOf": 10**400, "enum": ["\ud800"]})}
    assert refusal(good_line(1, "a", URLS[kind], body, {})) is not None


def test_an_error_can_be_written_whatever_it_quotes() -> None:
    error = RequestError("No column \ud800.", code="missing_column", param="\ud800")
    json.dumps(error.error, ensure_ascii=False).encode()
    assert "\\ud800" in str(error)
