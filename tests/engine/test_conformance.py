"""Every parameter of every kind of job: what it does, what it may be, and how it is refused.

One table. A row's effect is seen on a tiny random model, beside the same request without the
parameter; every answer is parsed by the `openai` client's own types, strictly.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import speaking
from driving import run
from openai._models import validate_type
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from tiny import tiny_model

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.prompts.render import render
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import CompletionRequest
from mlx_rq.jobs.openai.validation import validate

TYPES: dict[str, Any] = {"chat": ChatCompletion, "completion": Completion, "responses": Response}
BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    "completion": {"prompt": "Hello", "max_tokens": 16},
    "responses": {"input": "Hello", "max_output_tokens": 16},
}
ALL = ("chat", "completion", "responses")
BOTH = ("chat", "completion")
EOS, A, B = "258", "32", "33"


@dataclass(frozen=True)
class Said:
    """An answer, read alike for all kinds."""

    raw: dict[str, Any]
    text: str
    reason: str
    tokens: int
    prompt_tokens: int

    @property
    def choices(self) -> list[dict[str, Any]]:
        return list(self.raw["choices"])


def read(kind: str, result: dict[str, Any]) -> Said:
    """Parses an answer as the client does in strict validation, and reads it."""
    assert "choices" in result or "output" in result, result
    parsed = validate_type(type_=TYPES[kind], value=result)
    if isinstance(parsed, Response):
        assert parsed.usage is not None
        reason = "length" if parsed.status == "incomplete" else "stop"
        usage = parsed.usage
        return Said(result, parsed.output_text, reason, usage.output_tokens, usage.input_tokens)
    assert parsed.usage is not None
    choice = result["choices"][0]
    text = choice["text"] if kind == "completion" else choice["message"]["content"] or ""
    usage = result["usage"]
    return Said(
        result, text, choice["finish_reason"], usage["completion_tokens"], usage["prompt_tokens"]
    )


def say(kind: str, *bodies: dict[str, Any], model: Any = None) -> list[Said]:
    """Generates bodies beside each other, greedily unless they say otherwise."""
    full = [{**BASES[kind], "temperature": 0, **body} for body in bodies]
    results, _ = run(model or tiny_model("llama"), full)
    return [read(kind, result) for result in results]


Effect = Callable[[Said, Said], bool]
"""Compares the answer without the parameter and the one with it."""


@dataclass(frozen=True)
class Row:
    """A parameter: the value whose effect is shown (with others beside it), ends, and faults."""

    name: str
    kinds: tuple[str, ...]
    value: Any
    effect: Effect
    beside: dict[str, Any] = field(default_factory=dict)
    good: tuple[Any, ...] = ()
    bad: tuple[tuple[Any, str], ...] = ()
    wrong: Any = "text"
    speaks: bool = False
    """Whether it takes a model with real text, and tools."""
    thinks: bool = False


def differs(without: Said, with_it: Said) -> bool:
    return without.text != with_it.text


def same(without: Said, with_it: Said) -> bool:
    return without.text == with_it.text


def is_greedy(without: Said, with_it: Said) -> bool:
    kind = {"chat.completion": "chat", "text_completion": "completion"}
    (greedy,) = say(kind.get(with_it.raw["object"], "responses"), {})
    return with_it.text == greedy.text != without.text


def logprobs_of(said: Said) -> Any:
    return said.choices[0]["logprobs"]


def calls_of(said: Said) -> list[Any]:
    return list(said.choices[0]["message"].get("tool_calls") or [])


def reasoning_of(said: Said) -> str:
    return str(said.choices[0]["message"].get("reasoning"))


HOT = {"temperature": 1.5, "seed": 1}
ENDS = {"logit_bias": {EOS: 100}}
LIKES_A = {"logit_bias": {A: 8}}
ABOVE, BELOW = "decimal_above_max_value", "decimal_below_min_value"
MORE, LESS = "integer_above_max_value", "integer_below_min_value"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
    "additionalProperties": False}, "strict": True}}  # fmt: skip
FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
JSON_SCHEMA = {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}},
               "required": ["a"], "additionalProperties": False}, "strict": True}  # fmt: skip

HINTS = ("user", "safety_identifier", "prompt_cache_key", "service_tier")

ROWS = [
    # How tokens are chosen.
    Row("temperature", ALL, 2, differs, {"seed": 1}, (0, 2), ((-0.1, BELOW), (2.1, ABOVE))),
    Row("top_p", ALL, 0, is_greedy, HOT, (0, 1), ((-0.1, BELOW), (1.1, ABOVE))),
    Row("top_k", ALL, 1, is_greedy, HOT, (0, 10**9), ((-1, LESS),)),
    Row("min_p", ALL, 1, is_greedy, HOT, (0, 1), ((-0.1, BELOW), (1.1, ABOVE))),
    Row("seed", ALL, 5, differs, {"temperature": 1.5}, (-(2**63), 2**63 - 1), ((2**63, MORE),)),
    Row("presence_penalty", ALL, 2, differs, LIKES_A, (-2, 2), ((-2.1, BELOW), (2.1, ABOVE))),
    Row("frequency_penalty", ALL, 2, differs, LIKES_A, (-2, 2), ((-2.1, BELOW), (2.1, ABOVE))),
    Row("repetition_penalty", ALL, 2, differs, LIKES_A, (0.1, 2), ((0, BELOW), (2.1, ABOVE))),
    Row("logit_bias", ALL, {A: 100}, lambda _, s: s.text == "A" * 16,
        good=({}, {A: -100, B: 100}), bad=(({A: 101}, ABOVE), ({A: -101}, BELOW)), wrong=[]),
    Row("min_tokens", ALL, 5, lambda w, s: (w.tokens, s.tokens) == (0, 5), ENDS, (0, 10**6),
        ((-1, LESS),)),
    Row("ignore_eos", ALL, True, lambda w, s: (w.reason, s.reason) == ("stop", "length"), ENDS,
        (False,), wrong=1),
    Row("stop", ALL, ["A", "zz"], lambda w, s: (s.text, s.reason) == ("", "stop"),
        {"logit_bias": {A: 100}}, ("a", ["a"] * 4),
        (([], "empty_array"), (["a"] * 5, "array_above_max_length"), ("", "invalid_value")),
        wrong=5),
    # How much.
    Row("max_tokens", BOTH, 3, lambda w, s: (w.tokens, s.tokens, s.reason) == (16, 3, "length"),
        good=(1, 10**6), bad=((0, LESS), (-1, LESS))),
    Row("max_completion_tokens", ("chat",), 5, lambda w, s: (w.tokens, s.tokens) == (16, 5),
        good=(1,), bad=((0, LESS),)),
    Row("max_output_tokens", ("responses",), 17, lambda w, s: (w.tokens, s.tokens) == (16, 17)
        and s.raw["incomplete_details"] == {"reason": "max_output_tokens"},
        good=(16,), bad=((15, LESS),)),
    Row("n", BOTH, 3, lambda _, s: [c["index"] for c in s.choices] == [0, 1, 2] and s.tokens == 48,
        good=(1, 128), bad=((0, LESS), (129, MORE))),
    Row("best_of", ("completion",), 3, lambda _, s: (len(s.choices), s.tokens) == (1, 48),
        good=(1, 20), bad=((21, MORE), (-1, LESS), (0, "invalid_value"))),
    # What else is told.
    Row("logprobs", ("chat",), True, lambda w, s: logprobs_of(w) is None
        and len(logprobs_of(s)["content"]) == 16, good=(False,), wrong=1),
    Row("logprobs", ("completion",), 0, lambda w, s: logprobs_of(w) is None
        and [len(t) for t in logprobs_of(s)["top_logprobs"]] == [1] * 16,
        good=(0, 5), bad=((-1, LESS), (6, MORE))),
    Row("top_logprobs", ("chat",), 2, lambda w, s: {len(c["top_logprobs"]) for c in
        logprobs_of(s)["content"]} == {2}, {"logprobs": True}, (0, 20), ((-1, LESS), (21, MORE))),
    Row("top_logprobs", ("responses",), 2, lambda w, s: {len(t["top_logprobs"]) for t in
        s.raw["output"][0]["content"][0]["logprobs"]} == {2} and s.raw["top_logprobs"] == 2,
        good=(0, 20), bad=((-1, LESS), (21, MORE))),
    Row("include", ("responses",), ["message.output_text.logprobs"], lambda w, s:
        len(s.raw["output"][0]["content"][0]["logprobs"]) == 16, good=([],),
        bad=((["x"], "invalid_value"),)),
    Row("echo", ("completion",), True, lambda w, s: s.text == "Hello" + w.text, good=(False,),
        wrong=1),
    # The form of the answer.
    Row("response_format", ("chat",), {"type": "json_schema", "json_schema": JSON_SCHEMA},
        lambda _, s: json.loads(s.text)["a"] in (True, False),
        {"max_tokens": 60}, ({"type": "text"}, {"type": "json_object"}),
        (({"type": "xml"}, "invalid_value"), ({}, "missing_required_parameter")), speaks=True),
    Row("text", ("responses",), {"format": {"type": "json_schema", **JSON_SCHEMA}},
        lambda _, s: json.loads(s.text)["a"] in (True, False)
        and s.raw["text"]["format"]["name"] == "n", {"max_output_tokens": 60},
        ({}, {"format": None}, {"format": {"type": "text"}, "verbosity": "low"}),
        (({"format": {"type": "xml"}}, "invalid_value"),), speaks=True),
    *(
        Row(name, BOTH, value, lambda _, s: s.text in ("cat", "dog"), {"max_tokens": 40},
            good, bad, wrong, speaks=True)
        for name, value, good, bad, wrong in [
            ("structured_outputs", {"choice": ["cat", "dog"]}, ({"regex": "a"},),
             (({}, "invalid_value"), ({"x": 1}, "unknown_parameter")), 5),
            ("guided_choice", ["cat", "dog"], (["a"],), (([], "empty_array"),), 5),
            ("guided_regex", "cat|dog", ("a",), (("", "invalid_value"),), 5),
            ("guided_grammar", 'start: "cat" | "dog"', (), (("", "invalid_value"),), 5),
        ]
    ),
    Row("guided_json", BOTH, {"const": "x"}, lambda _, s: s.text == '"x"', {"max_tokens": 40},
        ({}, "{}"), (("[", "invalid_value"),), 5, speaks=True),
    Row("tools", ("chat",), [TOOL], lambda w, s: s.prompt_tokens > w.prompt_tokens,
        good=([], [{"type": "function", "function": {"name": f"f{i}"}} for i in range(128)]),
        bad=(([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
              "array_above_max_length"), ([{"type": "web_search"}], "invalid_value")),
        speaks=True),
    Row("tool_choice", ("chat",), "required", lambda _, s: s.reason == "tool_calls"
        and len(calls_of(s)) >= 1, {"tools": [TOOL], "max_tokens": 200},
        ("none", "auto", {"type": "function", "function": {"name": "f"}}),
        (("maybe", "invalid_value"),), 5, speaks=True),
    Row("parallel_tool_calls", ("chat",), False, lambda _, s: len(calls_of(s)) == 1,
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}, (True,), wrong=1,
        speaks=True),
    Row("tools", ("responses",), [FLAT_TOOL], lambda w, s: s.prompt_tokens > w.prompt_tokens
        and s.raw["tools"][0]["name"] == "f", good=([],),
        bad=(([{"type": "web_search"}], "invalid_value"),), speaks=True),
    Row("tool_choice", ("responses",), {"type": "function", "name": "f"}, lambda _, s:
        [i["type"] for i in s.raw["output"]] == ["function_call"] and s.reason == "stop",
        {"tools": [FLAT_TOOL], "max_output_tokens": 200}, ("none", "auto", "required"),
        (("maybe", "invalid_value"),), 5, speaks=True),
    Row("parallel_tool_calls", ("responses",), False, lambda _, s: len(s.raw["output"]) == 1
        and s.raw["parallel_tool_calls"] is False,
        {"tools": [FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 200}, (True,),
        wrong=1, speaks=True),
    # What the template is told.
    Row("reasoning_effort", ("chat",), "none", lambda w, s: s.prompt_tokens != w.prompt_tokens,
        {"max_tokens": 4},
        ("minimal", "low", "medium", "high"), (("huge", "invalid_value"),), 5, thinks=True),
    Row("reasoning", ("responses",), {"effort": "none"}, lambda w, s: s.prompt_tokens
        > w.prompt_tokens and s.raw["reasoning"]["effort"] == "none",
        good=({}, {"effort": "high", "summary": "auto"}),
        bad=(({"effort": "huge"}, "invalid_value"),), thinks=True),
    Row("reasoning_length", ("chat",), {"max": 7}, lambda w, s: len(reasoning_of(s)) == 7
        < len(reasoning_of(w)), {"chat_template_kwargs": {"open_thinking": True}, "max_tokens": 60},
        ({}, {"min": 0}, {"min": 1, "max": 100_000}),
        (({"min": -1}, LESS), ({"max": 100_001}, MORE), ({"most": 1}, "unknown_parameter")), 5,
        thinks=True),
    Row("chat_template_kwargs", ("chat", "responses"), {"open_thinking": True},
        lambda w, s: s.prompt_tokens != w.prompt_tokens, good=({},), thinks=True),
    Row("instructions", ("responses",), "Be brief.", lambda w, s: s.prompt_tokens
        > w.prompt_tokens + 9 and s.raw["instructions"] == "Be brief.", good=("",), wrong=5),
    # What is kept, or only told again.
    Row("model", ALL, "m", lambda w, s: (w.raw["model"], s.raw["model"]) == ("tiny-llama", "m"),
        good=("x" * 256,), bad=(("x" * 257, "string_above_max_length"), ("", "invalid_value")),
        wrong=5),
    Row("adapters", ALL, "a", lambda w, s: (w.raw["model"], s.raw["model"]) == ("m", "m:a"),
        {"model": "m"}, good=("x" * 256,),
        bad=(("x" * 257, "string_above_max_length"), ("", "invalid_value")), wrong=5),
    Row("metadata", ("chat", "responses"), {"k": "v"}, same,
        good=({}, {f"{i:064}": "v" * 512 for i in range(16)}),
        bad=(({"k": "v" * 513}, "string_above_max_length"),
             ({"k" * 65: ""}, "string_above_max_length"),
             ({str(i): "" for i in range(17)}, "object_above_max_properties"))),
    Row("store", ("chat", "responses"), True, same, good=(False,), wrong=1),
    Row("background", ("responses",), True, lambda w, s: same(w, s) and s.raw["background"],
        good=(False,), wrong=1),
    Row("background_options", ("responses",), {"completion_window": "8h"}, same, good=({},),
        bad=(({"completion_window": "1d"}, "invalid_value"),)),
    Row("max_tool_calls", ("responses",), 3, lambda w, s: same(w, s)
        and s.raw["max_tool_calls"] == 3, good=(1,), bad=((0, LESS),)),
    Row("truncation", ("responses",), "auto", lambda w, s: same(w, s)
        and s.raw["truncation"] == "auto", good=("disabled",), bad=(("x", "invalid_value"),),
        wrong=5),
    *(Row(hint, ALL, "x", same, wrong=None) for hint in HINTS),
]  # fmt: skip
EACH = [pytest.param(row, kind, id=f"{kind}-{row.name}") for row in ROWS for kind in row.kinds]


def model_for(row: Row) -> Any:
    if row.thinks:
        return speaking.model(thinking=True)
    return speaking.model() if row.speaks else None


def refused(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(RequestError) as refusal:
        validate(kind, body)
    error = refusal.value.error
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("row", "kind"), EACH)
def test_it_has_its_effect(row: Row, kind: str) -> None:
    beside = {key: value for key, value in row.beside.items() if kind != "responses"
              or key != "max_tokens"}  # fmt: skip
    without, with_it = say(kind, beside, {**beside, row.name: row.value}, model=model_for(row))
    assert row.effect(without, with_it), (without, with_it)


@pytest.mark.parametrize(("row", "kind"), EACH)
def test_what_it_may_be_and_what_not(row: Row, kind: str) -> None:
    base = {**BASES[kind], **row.beside}
    plain = {name: value for name, value in base.items() if name != row.name}
    assert validate(kind, {**plain, row.name: None}) == validate(kind, plain)
    for value in row.good:
        request = validate(kind, {**base, row.name: value})
        assert getattr(request, row.name) is not None
    for value, code in row.bad:
        error = refused(kind, {**base, row.name: value})
        assert error["code"] == code, value
        assert error["param"].startswith(row.name)
    if row.wrong is not None:
        error = refused(kind, {**base, row.name: row.wrong})
        assert (error["code"], error["param"]) in [
            ("invalid_type", row.name),
            ("invalid_value", row.name),
        ]


@pytest.mark.parametrize("kind", ALL)
def test_every_field_is_in_the_table(kind: str) -> None:
    told = {row.name for row in ROWS if kind in row.kinds}
    elsewhere = {
        "messages",
        "prompt",
        "input",
        "suffix",
        "previous_response_id",
    }
    assert set(type(validate(kind, BASES[kind])).model_fields) - elsewhere == told - set(HINTS)


def test_the_order_of_choices_is_prompt_by_prompt() -> None:
    body = {"prompt": ["Hello", [1, 2]], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 6}
    two = {**body, "prompt": ["Hello", "#$"]}
    with pytest.raises(RequestError):
        validate("completion", body)  # strings and tokens do not mix
    (said,) = say("completion", two)
    (first,) = say("completion", {**two, "prompt": "Hello"})

    assert [choice["index"] for choice in said.choices] == [0, 1, 2, 3]
    assert [c["text"] for c in said.choices[:2]] == [c["text"] for c in first.choices]
    assert len({choice["text"] for choice in said.choices}) == 4
    assert said.prompt_tokens == len("Hello") + len("#$")


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    (said,) = say("chat", {"max_tokens": 9, "max_completion_tokens": 4})
    assert said.tokens == 4


def test_a_token_that_does_not_exist_is_refused() -> None:
    bodies = [{**BASES["responses"], "logit_bias": {token: 1}} for token in ("259", "x", "-1")]
    (result,), _ = run(tiny_model("llama"), bodies[:1])
    assert (result["error"]["code"], result["error"]["param"]) == ("invalid_value", "logit_bias")
    for body in bodies[1:]:  # no number of a token, whatever the model
        with pytest.raises(RequestError) as refusal:
            run(tiny_model("llama"), [body])
        assert (refusal.value.code, refusal.value.param) == ("invalid_value", "logit_bias")


class TestEcho:
    def test_no_new_token_is_a_real_request(self) -> None:
        (said,) = say("completion", {"echo": True, "max_tokens": 0})
        assert (said.text, said.tokens, said.reason) == ("Hello", 0, "length")
        error = refused("completion", {"prompt": "Hello", "max_tokens": 0})
        assert (error["code"], error["param"]) == ("integer_below_min_value", "max_tokens")

    def test_every_prompt_is_echoed_before_each_of_its_choices(self) -> None:
        (said,) = say("completion", {"prompt": [[39, 40], [41]], "n": 2, "echo": True})
        assert [c["text"][: 2 - c["index"] // 2] for c in said.choices] == ["HI", "HI", "J", "J"]


class TestSuffix:
    def test_a_model_that_cannot_fill_in_refuses_it(self) -> None:
        (result,), _ = run(tiny_model("llama"), [{"prompt": "a", "suffix": "b"}])
        assert (result["error"]["code"], result["error"]["param"]) == (
            "unsupported_parameter",
            "suffix",
        )

    def test_a_model_that_can_gets_it_in_its_own_way(self) -> None:
        marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        model = speaking.model(parser=None, marks=marks)
        request = validate("completion", {"prompt": "the dog", "suffix": "The end"})
        assert isinstance(request, CompletionRequest)
        (prompt,) = render(
            request, model.tokenizer, model.vocab_size, model_format_of(model.tokenizer)
        )
        assert model.tokenizer.decode(prompt) == (
            "<|fim_prefix|>the dog<|fim_suffix|>The end<|fim_middle|>"
        )
        for mark in marks:
            assert prompt.count(model.tokenizer.convert_tokens_to_ids(mark)) == 1
        (said,) = say("completion", {"prompt": "the dog", "suffix": "The end"}, model=model)
        assert said.tokens == 16

    def test_an_empty_one_asks_for_nothing(self) -> None:
        without, with_it = say("completion", {}, {"suffix": ""})
        assert without.text == with_it.text

    def test_echo_does_not_go_with_it(self) -> None:
        error = refused("completion", {"prompt": "a", "suffix": "b", "echo": True})
        assert (error["code"], error["param"]) == ("invalid_value", "echo")


class TestBestOf:
    def test_the_likeliest_of_those_generated_are_returned(self) -> None:
        body = {"temperature": 1, "seed": 5, "logprobs": 0, "max_tokens": 6}
        (every,) = say("completion", {**body, "n": 6})
        (best,) = say("completion", {**body, "n": 2, "best_of": 6})

        def mean(choice: dict[str, Any]) -> float:
            values = choice["logprobs"]["token_logprobs"]
            return float(sum(values) / len(values))

        likeliest = sorted(every.choices, key=mean, reverse=True)[:2]
        assert [c["text"] for c in best.choices] == [c["text"] for c in likeliest]
        assert [c["index"] for c in best.choices] == [0, 1]
        assert best.tokens == every.tokens

    def test_more_choices_than_are_generated_are_refused(self) -> None:
        error = refused("completion", {"prompt": "a", "n": 3, "best_of": 2})
        assert error["param"] == "best_of"
        assert "(currently 3) to be at most 'best_of' (currently 2)" in error["message"]


class TestResponses:
    def test_a_prompt_beyond_the_context_is_refused_in_its_own_names(self) -> None:
        (result,), _ = run(tiny_model("llama"), [{"input": "x" * 2048}])
        assert result["error"]["code"] == "context_length_exceeded"
        assert result["error"]["param"] == "input"

    def test_truncation_drops_the_oldest_turns_and_keeps_the_instructions(self) -> None:
        items = [
            {"role": "user", "content": "a" * 900},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "b" * 1100},
            {"role": "user", "content": "d" * 700},
        ]
        body = {"input": items, "instructions": "e" * 50, "max_output_tokens": 16}
        (refusal,), _ = run(tiny_model("llama"), [{**body, "truncation": "disabled"}])
        assert refusal["error"]["code"] == "context_length_exceeded"

        # As few as will do: the call with its output fits, once the first turn is gone.
        one, two = say("responses", {**body, "truncation": "auto"}, {**body, "input": items[1:]})
        assert (one.text, one.prompt_tokens) == (two.text, two.prompt_tokens)
        # An output never stays without its call.
        longer = {**body, "instructions": "e" * 300}
        one, two = say(
            "responses", {**longer, "truncation": "auto"}, {**longer, "input": items[3:]}
        )
        assert (one.text, one.prompt_tokens) == (two.text, two.prompt_tokens)

    def test_reasoning_is_an_item_of_its_own(self) -> None:
        model = speaking.model(thinking=True)
        body = {
            "chat_template_kwargs": {"open_thinking": True},
            "reasoning": {"summary": "auto"},
            "previous_response_id": "resp_earlier",
        }
        (said,) = say("responses", body, model=model)
        (item,) = said.raw["output"]  # the budget ends within the reasoning
        assert (item["type"], item["id"], item["status"]) == ("reasoning", "rs_0", "incomplete")
        assert item["content"][0]["text"] == item["summary"][0]["text"] != ""
        assert said.raw["usage"]["output_tokens_details"]["reasoning_tokens"] == 16
        assert said.raw["previous_response_id"] == "resp_earlier"

    def test_calls_have_ids_that_their_outputs_can_name(self) -> None:
        body = {"tools": [FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 200}
        (said,) = say("responses", body, model=speaking.model())
        for item in said.raw["output"]:
            assert item["type"] == "function_call"
            assert item["id"].removeprefix("fc_") == item["call_id"].removeprefix("call_")
            assert json.loads(item["arguments"])["a"] in (True, False)
