"""Tool calls: every mode, every format that is constrained, with models that talk noise."""

import json
from typing import Any, Literal

import httpx
import pytest
import speaking
from driving import run
from jsonschema import validate as validate_instance
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from mlx_rq.engine.formats.calls import Call
from mlx_rq.engine.formats.tool_formats import can_write, format_of
from mlx_rq.engine.models.load import LoadedModel

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "strict": True,
            "parameters": {
                "type": "object",
                "$defs": {
                    "Place": {
                        "type": "object",
                        "properties": {"lat": {"type": "integer"}, "lon": {"type": "integer"}},
                        "required": ["lat", "lon"],
                    }
                },
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "place": {"$ref": "#/$defs/Place"},
                    "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                    "hourly": {"type": "boolean"},
                },
                "required": ["city", "unit", "place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "parameters": {"type": "object", "properties": {"now": {"type": "boolean"}}},
        },
    },
]
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "json": ("json_tools", ("<tool_call>", "</tool_call>")),
    "json, marks in plain text": ("json_tools", ()),
    "qwen3_coder": ("qwen3_coder", ("<tool_call>", "</tool_call>")),
    "glm": (
        "glm47",
        (
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    "longcat": (
        "longcat",
        (
            *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
            *("</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        ),
    ),
    "minimax": ("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "minicpm": ("minicpm5", ()),
    "muse": ("muse_spark", ("<atem:function_calls>", "</atem:function_calls>")),
    "mistral": ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    "mistral of old": ("mistral", ("[TOOL_CALLS]",)),
    "kimi": (
        "kimi_k2",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "pythonic": ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
}


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": TOOLS,
        "max_tokens": 400,
        **fields,
    }


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def calls_of(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a result, their arguments read and validated."""
    ChatCompletion.model_validate(result, strict=False)
    calls = []
    for call in result["choices"][0]["message"].get("tool_calls", []):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        (tool,) = [t for t in TOOLS if t["function"]["name"] == function["name"]]
        validate_instance(arguments, tool["function"]["parameters"])
        calls.append((function["name"], arguments))
    return calls


def ask(model: LoadedModel, *bodies: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    results, _ = run(model, bodies, **options)
    assert all("choices" in result for result in results), results
    return results


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_calls_that_parse_and_validate(name: str) -> None:
    parser, marks = FORMATS[name]
    model = speaking.model(parser, marks)
    bodies = [
        chat(tool_choice=named("get_weather"), temperature=0),
        *(chat(tool_choice="required", temperature=1, seed=seed) for seed in range(3)),
    ]

    first, *others = ask(model, *bodies, close_json=True)

    assert [call for call, _ in calls_of(first)] == ["get_weather"]
    assert first["choices"][0]["finish_reason"] == "stop"
    for result in others:
        assert calls_of(result)
        assert result["choices"][0]["finish_reason"] == "tool_calls"
        assert result["choices"][0]["message"]["content"] is None


MERGED = {
    "type": "object",
    "$defs": {"Code": {"type": "string", "enum": ["123", "true"]}, "Zip": {"const": "04109"}},
    "properties": {
        "text": {"enum": ["null", " x ", "1.0", "</tool_call>"]},
        "code": {"$ref": "#/$defs/Code"},
    },
    "allOf": [
        {
            "properties": {"zip": {"$ref": "#/$defs/Zip"}, "never": False},
            "required": ["text", "code", "zip"],
        }
    ],
    "required": ["unlisted"],
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_texts_stay_texts_and_what_is_merged_is_written(name: str, strict: bool) -> None:
    """Texts that look like other JSON were taken for it; what `allOf` lists was left out."""
    model = speaking.model(*FORMATS[name])
    function = {"name": "f", "strict": strict, "parameters": MERGED}
    body = chat(tools=[{"type": "function", "function": function}], tool_choice=named("f"))
    bodies = [{**body, "temperature": 1, "seed": seed} for seed in range(3)]
    for result in ask(model, *bodies, close_json=True):
        (call,) = result["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        validate_instance(arguments, MERGED)
        assert {"text", "code", "zip", "unlisted"} <= arguments.keys()


TOGETHER = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}
LONG = {"type": "object", "properties": {"a": {"type": "string", "minLength": 9}}}


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        ("json", TOGETHER, ""),
        ("qwen3_coder", TOGETHER, "which arguments go together"),
        ("pythonic", TOGETHER, "which arguments go together"),
        ("qwen3_coder", LONG, "how texts look"),
        ("pythonic", LONG, ""),
        ("qwen3_coder", MERGED, ""),
    ],
)
def test_what_a_format_cannot_say_is_told(name: str, parameters: Any, told: str) -> None:
    model = speaking.model(*FORMATS[name])
    function = {"name": "f", "strict": True, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    (result,), _ = run(model, [chat(tools=tools, tool_choice=named("f"), max_tokens=2)])
    warnings = [w["message"] for w in result["warnings"] if w["code"] == "not_enforced"]
    assert (len(warnings), told in "".join(warnings)) == (bool(told), True)


def test_arguments_that_must_be_but_are_not_listed_are_left_to_the_model() -> None:
    """Nothing could be written but a call without arguments, which always failed."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
    call = Call("f", schema, lenient=True, properties={}, required=frozenset())
    for parser, writes in (("json_tools", True), ("qwen3_coder", False), ("pythonic", False)):
        found = format_of(parser, {})
        assert found is not None
        assert can_write(found, [call]) is writes


MODEL = speaking.model()


def test_the_choice_of_tools_is_kept() -> None:
    one = {"mode": "required", "tools": [named("stop")]}
    allowed = {"type": "allowed_tools", "allowed_tools": one}
    bodies = [
        chat(tool_choice=choice, parallel_tool_calls=False, seed=seed, temperature=1.5)
        for seed in range(4)
        for choice in (allowed, named("stop"), "required", "none")
    ]

    results = ask(MODEL, *bodies, close_json=True)

    for body, result in zip(bodies, results, strict=True):
        names = [name for name, _ in calls_of(result)]
        if body["tool_choice"] == "none":
            assert names == []
            assert "<tool_call>" not in result["choices"][0]["message"]["content"]
        else:
            assert len(names) == 1
            assert names == ["stop"] or body["tool_choice"] == "required"


def test_auto_calls_after_text_or_not_at_all() -> None:
    """A bias towards the start mark makes the model of noise call, now and then."""
    mark = MODEL.tokenizer.convert_tokens_to_ids("<tool_call>")
    bodies = [
        chat(seed=seed, temperature=1.2, logit_bias={str(mark): bias})
        for seed in range(4)
        for bias in (-100, 5, 100)
    ]

    results = ask(MODEL, *bodies)

    called = 0
    for body, result in zip(bodies, results, strict=True):
        choice = result["choices"][0]
        calls = calls_of(result)
        bias = body["logit_bias"][str(mark)]
        if bias == -100:
            assert not calls
        if calls and choice["finish_reason"] != "length":
            assert choice["finish_reason"] == "tool_calls"
            called += 1
        if bias == 100:
            assert choice["message"]["content"] is None
    assert called


def test_a_call_that_the_budget_cuts_off_is_left_out() -> None:
    (result,) = ask(MODEL, chat(tool_choice="required", max_tokens=12, temperature=0))
    choice = result["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] is None
    codes = [warning["code"] for warning in result["warnings"]]
    assert codes == ["tool_call_cut", "budget_too_small"]


def test_tools_next_to_a_format_call_or_answer_in_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"name": "A", "schema": schema, "strict": True}
    bodies = [
        chat(
            response_format={"type": "json_schema", "json_schema": wanted},
            seed=seed,
            temperature=1.5,
            tool_choice=choice,
        )
        for seed in range(6)
        for choice in ("auto", "none")
    ]

    results = ask(MODEL, *bodies, close_json=True)

    answered = 0
    for result in results:
        if not calls_of(result):
            validate_instance(json.loads(result["choices"][0]["message"]["content"]), schema)
            answered += 1
    assert answered >= 6


def test_ids_are_the_same_when_a_job_runs_again_and_differ_within_one() -> None:
    body = chat(tool_choice="required", n=3, seed=1, temperature=1)
    once, again = (ask(MODEL, body, close_json=True)[0] for _ in range(2))
    ids = [
        [call["id"] for choice in result["choices"] for call in choice["message"]["tool_calls"]]
        for result in (once, again)
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0]) >= 3


def test_the_openai_clients_own_parse_takes_calls_and_records() -> None:
    """The unmodified client, in strict validation, with the engine behind its transport."""

    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]
        days: int = Field(ge=1, le=9)

    def answer(request: httpx.Request) -> httpx.Response:
        body = {key: v for key, v in json.loads(request.content).items() if key != "model"}
        (result,) = ask(MODEL, body, close_json=True)
        return httpx.Response(200, json=result)

    client = OpenAI(
        api_key="x",
        base_url="http://mlx/v1",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        _strict_response_validation=True,
    )
    asked: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "Weather?"}],
        "max_tokens": 200,
        "temperature": 0,
    }

    called = client.chat.completions.parse(
        **asked, tools=[pydantic_function_tool(Weather)], tool_choice="required"
    )
    answered = client.chat.completions.parse(**asked, response_format=Weather)

    (call, *_) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    assert isinstance(answered.choices[0].message.parsed, Weather)


def test_a_model_without_tools_of_its_own_is_told_in_words() -> None:
    model = speaking.model(None, ())
    bodies = [
        chat(tool_choice="required", temperature=0),
        chat(
            tool_choice="required",
            temperature=0,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "stop", "arguments": '{"now": true}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            ],
        ),
    ]
    for result in ask(model, *bodies, close_json=True):
        assert calls_of(result)


@pytest.mark.parametrize("parser", ["gemma4", "function_gemma", "kimi_k3"])
def test_a_format_without_a_grammar_never_gives_an_invalid_call(parser: str) -> None:
    model = speaking.model(parser, ())
    results, _ = run(
        model, [chat(tool_choice=c, temperature=0, max_tokens=30) for c in ("auto", "required")]
    )
    for result in results:
        if "error" in result:
            assert result["error"]["code"] == "invalid_structured_output"
        else:
            assert result["choices"][0]["finish_reason"] in ("stop", "length")
            assert calls_of(result) == []
