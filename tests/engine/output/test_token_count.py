"""A token count says what usage says once the same body is really generated from."""

from dataclasses import replace
from typing import Any

import pytest
import speaking
from driving import run, task
from speaking import with_template
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.output.response import WRITERS
from mlx_rq.jobs.openai.kinds import KINDS

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
HI = [{"role": "user", "content": "Hello, Grüße 🌍"}]
FUNCTION = {"name": "look", "description": "Looks something up.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": true}'}}
CALLED = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "c"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *HI]},
    "prefilled": {"messages": [*HI, {"role": "assistant", "content": "Well,"}]},
    "tools": {"messages": HI, "tools": [TOOL]},
    "a call and its result": {"messages": CALLED, "tools": [TOOL]},
    "structured": {"messages": HI, "response_format": FORMAT},
    "choices": {"messages": HI, "n": 3},
    "text": {"prompt": "Once upon a time"},
    "texts": {"prompt": ["Once", "Twice, and again"], "n": 2},
    "tokens": {"prompt": [1, 2, 3]},
    "token arrays": {"prompt": [[1, 2, 3], [4]]},
    "echo": {"prompt": "Once", "echo": True, "logprobs": 1},
    "input": {"input": "Hello"},
    "instructions": {"input": "Hello", "instructions": "Be brief."},
    "items": {"input": [{"role": "user", "content": "Hello"}], "text": FLAT},
    "function tools": {"input": "Hello", "tools": [{"type": "function", **FUNCTION}]},
    "a hint": {"input": "Hello", "user": "somebody", "stream": False},
}


@pytest.mark.parametrize(
    "model",
    [speaking.model(), speaking.model(None), speaking.model(thinking=True)],
    ids=["calls tools", "gets tools in words", "reasons"],
)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_count_is_the_usage_of_the_same_body(body: dict[str, Any], model: LoadedModel) -> None:
    budget = {"max_output_tokens": 16} if "input" in body else {"max_tokens": 2}
    (result,), _ = run(model, [{**body, **budget}])
    usage = result["usage"]
    tokens = usage["input_tokens"] if "input" in body else usage["prompt_tokens"]
    assert tokens > 0
    assert counted(model, body) == {"object": "response.input_tokens", "input_tokens": tokens}


def counted(model: LoadedModel, body: dict[str, Any]) -> Any:
    """The count of a body, which ends as soon as it is added."""
    engine = MLXEngine(model)
    (outcome,) = engine.add([task("count", {"count_tokens": body})])
    assert (engine.running, engine.waiting, engine.in_flight) == (0, 0, set())
    assert engine.step() == []
    assert (engine.totals.tasks, engine.totals.prefilled_tokens) == (0, 0)
    return outcome.result


def test_a_prompt_that_does_not_fit_is_counted_all_the_same() -> None:
    model = tiny_model("llama")
    found = counted(model, {"prompt": [7] * (model.context_length + 5)})
    assert found["input_tokens"] == model.context_length + 5


def test_a_conversation_that_is_to_be_shortened_is_counted_as_it_is_generated_from() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    model = replace(speaking.model(), tokenizer=with_template(template), context_length=80)
    turns = [{"role": "user", "content": f"{number}" * 30} for number in range(4)]
    whole = counted(model, {"input": turns})["input_tokens"]
    body = {"input": turns, "truncation": "auto", "max_output_tokens": 16}
    short = counted(model, body)["input_tokens"]
    (result,), _ = run(model, [body])
    assert result["usage"]["input_tokens"] == short < whole


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [999_999]}, "prompt"),
        ({"input": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"no": 1}}, "input"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_the_names_of_its_body(
    body: dict[str, Any], param: str
) -> None:
    template = "{% if no %}{{ raise_exception('No.') }}{% endif %}x"
    model = replace(speaking.model(), tokenizer=with_template(template))
    error = counted(model, body)["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]


def test_every_kind_has_a_writer() -> None:
    assert list(WRITERS) == list(KINDS)
