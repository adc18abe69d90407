"""What is read off a sequence's text, whether or not its grammar is there."""

import json
import threading
from typing import Any

import pytest
import speaking
from driving import run

from mlx_rq.engine.structured.compilers import Compilation
from mlx_rq.engine.structured.output_format import InvalidAnswer, OutputFormat, OutputFormats
from mlx_rq.jobs.openai.validation import kind_of, validate

MODEL = speaking.model()
LONG = {"type": "string", "minLength": 500}
FORMAT = {"type": "json_schema", "name": "X", "strict": True, "schema": LONG}


def output_format_of(output_formats: OutputFormats, body: dict[str, Any]) -> OutputFormat:
    return output_formats.output_format_of(validate(kind_of(body), body).generated_from(), [1])


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "guided_json": LONG, **fields}


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        (chat(max_completion_tokens=20), "Raise max_completion_tokens."),
        (chat(max_tokens=20), "Raise max_completion_tokens."),
        ({"prompt": "x", "max_tokens": 20, "guided_json": LONG}, "Raise max_tokens."),
        ({"prompt": "x", "guided_json": LONG}, "Raise max_tokens."),
        (
            {"input": "x", "max_output_tokens": 20, "text": {"format": FORMAT}},
            "Raise max_output_tokens.",
        ),
    ],
)
def test_a_budget_too_small_names_the_field_of_this_kind_of_request(
    body: dict[str, Any], advice: str
) -> None:
    (result,), _ = run(MODEL, [body])
    assert [warning["code"] for warning in result["warnings"]] == ["budget_too_small"]
    assert result["warnings"][0]["message"].endswith(advice)


def test_where_the_context_is_the_budget_no_field_is_named() -> None:
    output_format = output_format_of(OutputFormats(MODEL), chat())
    constraint = output_format.start(20)
    (warning,) = output_format.read('"', "length", constraint, 20).warnings
    assert warning["code"] == "budget_too_small"
    assert warning["message"].endswith("Shorten the prompt.")


def held_up(monkeypatch: pytest.MonkeyPatch) -> OutputFormats:
    """Forms whose grammars are never compiled; to wait for one fails."""
    output_formats = OutputFormats(MODEL)
    monkeypatch.setattr(output_formats._compilers, "_compile", lambda _: threading.Event().wait(60))

    def waits(_: Compilation) -> None:
        raise AssertionError("reading a text waits for its grammar")

    monkeypatch.setattr(Compilation, "result", waits)
    return output_formats


def test_reading_never_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    output_formats = held_up(monkeypatch)
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "guided_json": LONG}
    output_format = output_format_of(output_formats, body)
    assert not output_format.ready
    reading = output_format.read("", "length", None, 0)
    assert (reading.content, reading.warnings) == ("", [])
    with pytest.raises(InvalidAnswer, match="was not compiled"):
        output_format.read("", "stop", None, 0)


@pytest.mark.parametrize("compiled", ["start: nonsense", 'start: "a" "b" "c"'])
def test_a_sequence_that_generates_nothing_is_read_alike_whatever_its_grammar(
    compiled: str,
) -> None:
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "guided_grammar": compiled}
    output_format = output_format_of(OutputFormats(MODEL), body)
    assert output_format.compilation is not None
    assert output_format.compilation._run.ended.wait(60)
    assert output_format.read("", "length", None, 0).warnings == []


def test_a_sequence_that_generates_nothing_is_answered_whatever_its_grammar() -> None:
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "guided_grammar": "start: nonsense"}
    (result, other), _ = run(MODEL, [body, {"prompt": "x", "max_tokens": 2}])
    assert result["choices"][0]["text"] == "x"
    assert "choices" in other


MARKS = "</tool_call>", "a <tool_call> b", "<|im_end|>"


@pytest.mark.parametrize("text", MARKS)
def test_the_spelling_of_a_mark_can_be_an_answer_or_an_argument(text: str) -> None:
    parameters = {"type": "object", "properties": {"e": {"const": text}}, "required": ["e"]}
    function = {"name": "f", "strict": True, "parameters": parameters}
    tools = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    messages = [{"role": "user", "content": "x"}]
    bodies: list[dict[str, Any]] = [
        {"messages": messages, "temperature": 0, "max_tokens": 300, **fields}
        for fields in (
            tools,
            {"guided_choice": [text]},
            {**tools, "tool_choice": "auto", "guided_choice": [f"say {text}"]},
        )
    ]
    (called, chosen, either), _ = run(MODEL, bodies)

    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"e": text}
    assert chosen["choices"][0]["message"]["content"] == text
    message = either["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"] == f"say {text}"


def test_schemas_whose_grammars_are_equal_are_each_checked_by_their_own() -> None:
    """That items differ is only checked at the end: it leaves no trace in the grammar."""
    plain = {"type": "array", "items": {"const": 1}, "minItems": 2}
    schemas = [plain, {**plain, "uniqueItems": True}, plain]
    formats = OutputFormats(MODEL)
    outcomes = []
    for schema in schemas:
        output_format = output_format_of(formats, chat(guided_json=schema))
        constraint = output_format.start(20)
        assert constraint is not None
        text = "[1,1]"
        for token in MODEL.tokenizer.encode(text, add_special_tokens=False):
            constraint.accept(token)
        try:
            outcomes.append(output_format.read(text, "stop", constraint, 20).content)
        except InvalidAnswer as invalid:
            outcomes.append(str(invalid))
    assert outcomes[0] == outcomes[2] == "[1,1]"
    assert "has non-unique elements" in str(outcomes[1])
