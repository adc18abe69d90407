"""How wrong structured requests are refused: in OpenAI's words, before anything is enqueued."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.schemas import MAX_ENUM_VALUES, subschemas, why_refused
from mlx_rq.jobs.openai.validation import validate

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def chat(**fields: Any) -> Any:
    return validate("chat", {"messages": [{"role": "user", "content": "x"}], **fields})


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "X", **fields}}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        json_schema(schema=OBJECT, strict=True, description="d"),
        json_schema(),
        {"response_format": None, "tools": None, "tool_choice": None, "guided_json": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [tool(parameters=OBJECT, strict=True, description="d"), tool("g")]},
        {"tools": [tool()], "tool_choice": named("f")},
        {
            "tools": [tool(), tool("g")],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [named("g")]},
            },
        },
        {"structured_outputs": {"json": '{"type": "integer"}'}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
        {"reasoning_effort": "low", "reasoning_length": {"min": 1, "max": 2}},
    ],
)
def test_what_is_right_passes(body: dict[str, Any]) -> None:
    chat(**body)


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "invalid_value",
            "Invalid value: 'yaml'",
        ),
        (
            {"response_format": {}},
            "response_format.type",
            "missing_required_parameter",
            "Missing required parameter: 'response_format.type'.",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
            "Missing required parameter: 'response_format.json_schema'.",
        ),
        (
            json_schema(schema=[]),
            "response_format.json_schema.schema",
            "invalid_type",
            "Invalid type for 'response_format.json_schema.schema': expected an object",
        ),
        (
            json_schema(schema={"type": "integer", "multipleOf": 999_983}),
            "response_format",
            None,
            "Invalid schema for response_format 'X': 'multipleOf' comes to 999,983;",
        ),
        (
            {"tools": [tool("a b")]},
            "tools[0].function.name",
            "invalid_value",
            "Invalid 'tools[0].function.name'",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools[0].type",
            "invalid_value",
            "Invalid value: 'custom' at 'tools[0].type'. Supported values are: 'function'. For a "
            "tool that takes any text, send a function with one parameter, a string.",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "tool_choice.type",
            "invalid_value",
            "Invalid value: 'custom' at 'tool_choice.type'. Supported values are: 'function'. For",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "invalid_value",
            "Invalid value: 'web_search' at 'tools[0].type'. Supported values are: 'function'. "
            "OpenAI's own tools run at OpenAI; here, the caller runs every tool, as a function.",
        ),
        (
            {"tools": [tool(), tool()]},
            "tools[1].function.name",
            "invalid_value",
            "Invalid 'tools': the function name 'f' is used twice.",
        ),
        (
            {"tools": [tool("a"), tool("f", parameters={"enum": ["x" * 300_000]})]},
            "tools[1].function.parameters",
            "invalid_function_parameters",
            "Invalid schema for function 'f': it has ",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice",
            None,
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are",
        ),
        (
            {"tools": [tool()], "tool_choice": named("g")},
            "tool_choice",
            None,
            "Tool choice 'g' not found in 'tools' parameter.",
        ),
        (
            {"tools": [tool()], "tool_choice": "some"},
            "tool_choice",
            "invalid_value",
            "Invalid value: 'some' at 'tool_choice'.",
        ),
        (
            {"tools": [tool(f"f{i}") for i in range(129)]},
            "tools",
            "array_above_max_length",
            "Invalid 'tools': array too long.",
        ),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "invalid_value",
            "An answer can have one shape only, but guided_regex and guided_choice ask",
        ),
        (
            {"structured_outputs": {}},
            "structured_outputs",
            "invalid_value",
            "Invalid 'structured_outputs': expected one of",
        ),
        (
            {"guided_json": "{"},
            "guided_json",
            "invalid_value",
            "Invalid 'guided_json': the string is not JSON",
        ),
        (
            {"guided_grammar": 'start: %json {"multipleOf": 999983, "type": "integer"}'},
            "guided_grammar",
            None,
            "Invalid grammar for guided_grammar: of a schema in it: 'multipleOf'",
        ),
        (
            {"guided_grammar": "start: %json x"},
            "guided_grammar",
            None,
            "Invalid grammar for guided_grammar: a '%json' in it",
        ),
        (
            {"reasoning_effort": "extreme"},
            "reasoning_effort",
            "invalid_value",
            "Invalid value: 'extreme' at 'reasoning_effort'.",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_openais_words(
    body: dict[str, Any], param: str, code: str | None, message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**body)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert str(refused.value).startswith(message)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    chat(messages=[{"role": "user", "content": "x"}, message])


keys = st.sampled_from(
    ["properties", "items", "anyOf", "allOf", "$ref", "enum", "multipleOf", "required", "x"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | keys,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(keys, json_values))
def test_caps_take_whatever_json_there_is(schema: dict[str, Any]) -> None:
    fault = why_refused(schema)
    assert fault is None or fault.endswith(".")


@given(depth=st.integers(1, 5000))
def test_depth_is_measured_without_recursion(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    # The innermost object counts too, and so does a level for what it may hold.
    assert (why_refused(schema) is None) == (depth + 1 <= 120)


@pytest.mark.parametrize(
    ("multiple", "fits"),
    [
        (10_000, True),
        (10_001, False),
        (0.25, True),
        (0.0001, True),
        (1.0001, False),
        (1e300, False),
        (10**30, False),
        (10**400, False),
        pytest.param(10**5000, False, id="endless"),
        (float("inf"), False),
        (float("nan"), False),
    ],
)
def test_multiples_are_capped_by_their_digits(multiple: float, fits: bool) -> None:
    assert (why_refused({"type": "number", "multipleOf": multiple}) is None) == fits


def test_multiples_are_capped_together() -> None:
    """An automaton each: nine hundred of them took half a minute to compile."""
    multiples = [{"multipleOf": 9_990 + number} for number in range(11)]
    assert why_refused({"anyOf": multiples[:10]}) is None
    assert why_refused({"anyOf": multiples[:10] * 2}) is None
    assert why_refused({"anyOf": multiples}) == (
        "its different 'multipleOf' come to 109,945 together; the limit is 100,000."
    )


@pytest.mark.parametrize("reference", ["#/x/y", "#/x/y/properties/a", "#/$defs/z"])
def test_caps_reach_wherever_a_reference_leads(reference: str) -> None:
    far = {"properties": {"a": {"multipleOf": 10_001}}, "multipleOf": 10_001}
    schema = {"x": {"y": far, "z": {"$ref": "#/x/y"}}}
    assert why_refused(schema) is None, "it says nothing of values"
    definitions = {"z": {"$ref": "#/x/z"}} if "$defs" in reference else {}
    assert why_refused({**schema, "$defs": definitions, "items": {"$ref": reference}}) == (
        "'multipleOf' comes to 10,001; the limit is 10,000."
    )


def test_values_are_not_taken_for_schemas() -> None:
    schema = {"const": {"multipleOf": 10**9}, "default": {"enum": list(range(MAX_ENUM_VALUES + 1))}}
    assert list(subschemas(schema)) == [schema]
    assert why_refused(schema) is None


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({"const": 2**53}, None),
        ({"const": -(2**53) - 1}, -(2**53) - 1),
        ({"enum": [0, "x", 10**18]}, None),
        ({"enum": [0, "x", 123456789012345678]}, 123456789012345678),
        ({"const": [{"a": -(2**63)}]}, -(2**63)),
        ({"enum": [-9.223372036854775808e18]}, -(2.0**63)),
        ({"const": 2**63}, 2**63),
        ({"const": 10**22}, 10**22),
        ({"const": True}, None),
        ({"maximum": 2**63, "default": 2**63}, None),
    ],
)
def test_numbers_that_would_be_rounded_are_refused(values: Any, number: Any) -> None:
    """Two to the power of 63, below zero, ended the worker; the others never validated."""
    fault = f"the number {number} is one of its values, and would be rounded: " + (
        "integers are exact up to 2**53. Let it be a string."
    )
    expected = None if number is None else fault
    schema = {"type": "object", "properties": {"a": values}}
    assert why_refused(schema) == expected
    assert why_refused({"dependencies": {"b": schema}}) == expected
    if expected:
        with pytest.raises(RequestError, match="of a schema in it: the number"):
            chat(guided_grammar=f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize(
    ("alternatives", "refused"),
    [
        ([{"type": "string"}, {"title": "B", "type": "string"}], True),
        ([{}, {}], True),
        ([True, True, {"type": "null"}, {"type": "null"}], True),
        ([{"const": 1}, {"const": True}], False),
        ([{"const": 1}, {"const": 1}, {"const": 2}], False),
        ([{"type": "string"}], False),
        ([], False),
    ],
)
def test_a_one_of_that_nothing_fits_is_refused(alternatives: Any, refused: bool) -> None:
    fault = why_refused({"type": "object", "properties": {"a": {"oneOf": alternatives}}})
    assert fault == (
        "no value can satisfy a 'oneOf' whose alternatives all come twice: what fits one of them "
        "fits another. Use 'anyOf'."
        if refused
        else None
    )


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_what_json_has_no_number_for_is_refused(number: float) -> None:
    fault = why_refused({"type": "number", "minimum": number})
    assert fault is not None
    assert fault.startswith("it is not JSON: ")
