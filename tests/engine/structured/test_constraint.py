"""Constrained sequences in the batch: the same answers as alone, always valid, nobody held up."""

import json
import random
import threading
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import speaking
from asking import answers, chat, masked_walk, structured
from driving import AHEAD, finish, run, task
from effort import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import measure_kv
from mlx_rq.engine.structured.compilers import Compilers
from mlx_rq.engine.structured.constraint import GrammarFault, Masks, mask
from mlx_rq.engine.structured.grammar import Grammar
from mlx_rq.engine.structured.output_format import OutputFormats

MODEL = speaking.model()
THINKER = speaking.model(thinking=True)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "日本"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


KINDS: list[dict[str, Any]] = [
    {},
    structured(SCHEMA),
    {"guided_regex": "[a-z]{3,9} [0-9]{2}"},
    {"guided_choice": ["yes", "no", "maybe so"]},
    {"guided_grammar": 'start: a "-" b\na[capture]: /[a-z]{2,5}/\nb[capture="bee"]: /[0-9]+/'},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "none"},
    {"response_format": {"type": "json_object"}},
    {"reasoning_length": {"min": 5, "max": 30}, **structured(SCHEMA)},
]


def mixed(seed: int, jobs: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        chat(
            dice.choice(["Hello", "A record", "Grüße"]) + str(dice.randrange(6)),
            max_tokens=dice.randrange(4, 60),
            chat_template_kwargs={"open_thinking": dice.random() < 0.5},
            **KINDS[index % len(KINDS)],
            **({"temperature": 1.0, "seed": index} if dice.random() < 0.4 else {}),
        )
        for index in range(jobs)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("close_json", [False, True])
def test_all_kinds_mixed_answer_as_alone_joining_and_leaving(close_json: bool) -> None:
    """Sequences through a batch of 16 come and go; each is what it is in a batch of its own."""
    bodies = mixed(seed=3, jobs=32)
    together, _ = run(THINKER, bodies, batch_size=16, chunk=64, close_json=close_json)
    for body, result in zip(bodies, together, strict=True):
        (alone,), _ = run(THINKER, [body], batch_size=1, close_json=close_json)
        assert answers(result) == answers(alone)
    assert sum("error" not in result for result in together) == len(bodies)


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), sequences=st.integers(1, 6), arrivals=st.integers(1, 5))
def test_late_constrained_sequences_change_nobody(seed: int, sequences: int, arrivals: int) -> None:
    bodies = mixed(seed, jobs=12)
    engine = MLXEngine(THINKER, EngineOptions(batch_size=sequences, chunk=32))
    results: dict[str, Any] = {}
    for index, body in enumerate(bodies):
        engine.add([task(str(index), body)])
        for _ in range(arrivals):
            results.update((outcome.id, outcome.result) for outcome in engine.step())
    results.update(finish(engine, len(bodies) - len(results)))
    free = [index for index, body in enumerate(bodies) if index % len(KINDS) in (0, 1)]
    for index in free:
        (alone,), _ = run(THINKER, [bodies[index]], batch_size=1)
        assert answers(results[str(index)]) == answers(alone)


def test_one_prompt_asked_for_in_many_forms_is_answered_in_each() -> None:
    """Equal prompts are generated once only where the form is the same too."""
    choices = [["a"], ["b"], ["c", "d"], ["a"]]
    bodies = [chat("x", max_tokens=9), *(chat("x", max_tokens=9, guided_choice=c) for c in choices)]
    free, *chosen = run(MODEL, bodies)[0]
    contents = [result["choices"][0]["message"]["content"] for result in chosen]
    assert [content in c for content, c in zip(contents, choices, strict=True)] == [True] * 4
    assert free["choices"][0]["message"]["content"] not in "abcd"


def test_a_sequence_that_was_put_back_goes_on_within_its_grammar() -> None:
    bodies = [chat(f"Record {i}", max_tokens=90, **structured(SCHEMA)) for i in range(6)]
    roomy, _ = run(MODEL, bodies, batch_size=6)
    kv_bytes = 180_000 + 6 * AHEAD * measure_kv(MODEL.model).per_token
    tight, engine = run(MODEL, bodies, batch_size=6, kv_bytes=kv_bytes, reserve=1)
    assert engine.totals.sequences_preempted > 0
    assert [answers(result) for result in tight] == [answers(result) for result in roomy]


def test_mask_leaves_free_sequences_bit_identical() -> None:
    class Only:
        done = False
        vocabulary = 77

        def __init__(self, *tokens: int) -> None:
            self.tokens = tokens

        def fill(self, others: Any, masks: Masks) -> None:
            for constraint, index in others:
                masks[index] = 0
                for token in constraint.tokens:
                    masks[index, token >> 5] |= np.uint32(1 << (token & 31)).view(np.int32)

    for dtype in (mx.float32, mx.bfloat16):
        logits = mx.random.normal((3, 77)).astype(dtype)
        masked = mask(logits, [None, Only(0, 31, 32, 76), None])  # type: ignore[list-item]
        assert masked.dtype == dtype
        assert mx.array_equal(masked[0::2], logits[0::2])
        allowed = [i for i in range(77) if masked[1, i].item() != -float("inf")]
        assert allowed == [0, 31, 32, 76]
        assert mask(logits, [None] * 3) is logits


@pytest.mark.parametrize("narrower", [1, 40, 200])
def test_a_tokenizer_may_have_more_tokens_than_the_model(narrower: int) -> None:
    """As Gemma 3's text models: 262145 tokens, of which the last has no logits."""
    width = len(MODEL.tokenizer) // 32 * 32 - narrower
    output_formats = OutputFormats(replace(MODEL, vocab_size=width))
    output_format = output_formats.output_format_of(
        task("x", chat("x", guided_choice=["yes", "no"])).request, [1]
    )  # type: ignore[arg-type]
    constraint = output_format.start(10)
    logits = mx.random.normal((3, width))

    masked = mask(logits, [None, constraint, None])

    allowed = [i for i in range(width) if masked[1, i].item() != -float("inf")]
    assert {MODEL.tokenizer.decode([token])[0] for token in allowed} == {"y", "n"}
    assert mx.array_equal(masked[0::2], logits[0::2])


def random_schema(dice: random.Random, depth: int = 3) -> Any:
    """A schema of the keywords that are enforced; always one that some value fits."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "text"]
    kind = dice.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds)
    low = dice.randrange(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "minLength": dice.randrange(3), "maxLength": 8}
        case "text":
            return {
                "type": "string",
                **dice.choice(
                    [{"pattern": "^[a-f]{1,4}$"}, {"format": "date"}, {"format": "uuid"}]
                ),
            }
        case "integer":
            return dice.choice(
                [
                    {"type": "integer", "minimum": low, "maximum": low + dice.randrange(200)},
                    {"type": "integer", "multipleOf": dice.randrange(1, 40), "minimum": 0},
                    {"type": ["integer", "null"], "exclusiveMaximum": low},
                ]
            )
        case "number":
            return {"type": "number", "minimum": low / 4, "maximum": low / 4 + 10}
        case "enum":
            return {"enum": dice.sample(["a", "é\n", '"', 1, None, True, [1, {"k": 2}], 0.5], 3)}
        case "object":
            names = dice.sample(["id", "größe", "a b", "日本", 'q"', "x"], dice.randrange(5))
            return {
                "type": "object",
                "properties": {name: random_schema(dice, depth - 1) for name in names},
                "required": [name for name in names if dice.random() < 0.7],
                "additionalProperties": dice.choice([False, False, {"type": "integer"}]),
            }
        case "array":
            return {
                "type": "array",
                "items": random_schema(dice, depth - 1),
                "minItems": dice.randrange(2),
                "maxItems": dice.randrange(2, 4),
            }
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth - 1) for _ in range(2)]}
        case _:
            return {"type": kind}


@pytest.mark.slow
def test_five_hundred_random_schemas_and_every_finished_text_validates() -> None:
    dice = random.Random(11)
    schemas = [random_schema(dice) for _ in range(500)]
    bodies = [
        chat(
            f"{index % 7}",
            max_tokens=120,
            **structured(schema),
            **({"temperature": 1.0, "seed": index} if index % 2 else {}),
        )
        for index, schema in enumerate(schemas)
    ]
    finished = 0
    for close_json in (False, True):
        some = slice(0, 250) if close_json else slice(250, 500)
        results, _ = run(MODEL, bodies[some], batch_size=16, chunk=256, close_json=close_json)
        for schema, result in zip(schemas[some], results, strict=True):
            if "error" in result:  # caught, not passed off: a day that the calendar does not have
                assert "date" in result["error"]["message"], result
            elif result["choices"][0]["finish_reason"] == "stop":
                value = json.loads(result["choices"][0]["message"]["content"])
                checker = Draft202012Validator.FORMAT_CHECKER
                Draft202012Validator(schema, format_checker=checker).validate(value)
                finished += 1
    assert finished > 350


HOSTILE: dict[str, Any] = {
    "multipleOf": {"type": "integer", "multipleOf": 999_983},
    "multipleOf, merged": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
    "depth": json.loads('{"items":' * 200 + "{}" + "}" * 200),
    "size": {"enum": ["x" * 300_000]},
    "enum": {"enum": list(range(20_000))},
    "properties": {"type": "object", "properties": {f"p{i}": {} for i in range(2_000)}},
    "itself": {"$ref": "#"},
    "merging": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"x{i}": {"const": j}}} for j in range(4)]}
            for i in range(12)
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_ends_in_an_error_soon_and_holds_up_nobody(name: str) -> None:
    from mlx_rq.jobs.openai.errors import RequestError

    with at_most(125):
        try:
            ((error, other), _) = run(
                MODEL,
                [chat("x", max_tokens=5, **structured(HOSTILE[name])), chat("y", max_tokens=5)],
            )
            assert "choices" in other
        except RequestError as refused:  # before it gets to the engine
            error = {"error": refused.error}
    assert error["error"]["message"].startswith("Invalid schema for response_format 'X': ")
    assert (error["error"]["param"], error["error"]["code"]) == ("response_format", None)


def test_hostile_patterns_neither_hang_the_mask_nor_the_check() -> None:
    schema = {"type": "string", "pattern": "^(a+)+b?$", "maxLength": 60}
    body = chat("x", max_tokens=40, logit_bias={str(MODEL.tokenizer.encode("a")[0]): 100})
    with at_most(250):
        (result,), _ = run(MODEL, [{**body, **structured(schema)}], close_json=True)
    assert "choices" in result or "regular expression" in result["error"]["message"]


def test_a_compilation_past_its_time_is_given_up_and_others_go_on(monkeypatch: Any) -> None:
    monkeypatch.setattr("mlx_rq.engine.structured.compilers._STARVED", 1e6)  # of a busy machine
    release = threading.Event()

    def compile(grammar: Grammar) -> Any:
        while grammar.lark == "slow" and not release.is_set() and time.thread_time() < 10:
            pass
        return grammar.lark

    compilers = Compilers(compile, threads=1, seconds=0.1)
    slow = compilers.submit(Grammar("slow", ()))
    with pytest.raises(GrammarFault, match=r"more than 0\.1 s"):
        slow.result()
    quick = compilers.submit(Grammar("quick", ()))
    assert quick.result() == "quick"
    release.set()
    assert compilers.submit(Grammar("quick", ())) is quick


def test_a_sequence_waits_for_its_grammar_while_others_go_on(monkeypatch: Any) -> None:
    engine = MLXEngine(MODEL, EngineOptions(batch_size=4, chunk=64))
    release = threading.Event()
    compile = engine._output_formats._compilers._compile

    def wait(grammar: Grammar) -> Any:
        release.wait(60)
        return compile(grammar)

    monkeypatch.setattr(engine._output_formats._compilers, "_compile", wait)
    monkeypatch.setattr(engine._output_formats._compilers, "_seconds", 60)
    engine.add([task("bound", chat("x", max_tokens=60, **structured({"const": "ok"})))])
    engine.add([task("free", chat("y", max_tokens=5))])
    assert set(finish(engine, 1)) == {"free"}
    assert engine.waiting == 1
    release.set()
    result = finish(engine, 1)["bound"]
    assert result["choices"][0]["message"]["content"] == '"ok"'


def test_a_budget_too_small_says_so() -> None:
    schema = {
        "type": "object",
        "properties": {f"property_{i}": {"type": "integer"} for i in range(5)},
        "required": [f"property_{i}" for i in range(5)],
    }
    (small, cut, enough), _ = run(
        MODEL,
        [
            chat("x", max_tokens=10, **structured(schema)),
            chat("x", max_tokens=90, **structured({"type": "string", "minLength": 500})),
            chat("x", max_tokens=400, **structured({"const": 12})),
        ],
    )
    assert small["choices"][0]["finish_reason"] == "length"
    (warning,) = small["warnings"]
    assert warning["code"] == "budget_too_small"
    assert "budget is 10" in warning["message"]
    assert cut["warnings"][0]["code"] in ("budget_too_small", "cut_off")
    assert enough["choices"][0]["finish_reason"] == "stop"
    assert "warnings" not in enough


def test_close_json_ends_within_the_budget_and_says_so() -> None:
    body = chat("x", max_tokens=80, **structured(SCHEMA))
    (open_end,), _ = run(MODEL, [body])
    (closed,), _ = run(MODEL, [body], close_json=True)
    assert open_end["choices"][0]["finish_reason"] == "length"
    assert closed["choices"][0]["finish_reason"] == "stop"
    assert [warning["code"] for warning in closed["warnings"]] == ["closed_early"]
    Draft202012Validator(SCHEMA).validate(json.loads(closed["choices"][0]["message"]["content"]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date-time"},
        {"type": "array", "items": {"type": "integer", "multipleOf": 16}, "minItems": 4},
        {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 4},
        {"type": "object", "additionalProperties": {"type": "object"}, "minProperties": 2},
        {"anyOf": [SCHEMA, {"type": "string", "pattern": "^[0-9]{40}$"}]},
    ],
)
def test_close_json_closes_what_is_awkward_to_close(schema: Any) -> None:
    bodies = [
        chat("x", max_tokens=100, seed=seed, **structured(schema)) | {"temperature": 1.0}
        for seed in range(3)
    ]
    results, _ = run(MODEL, bodies, close_json=True)
    checker = Draft202012Validator.FORMAT_CHECKER
    for result in results:
        assert result["choices"][0]["finish_reason"] == "stop", result
        value = json.loads(result["choices"][0]["message"]["content"])
        Draft202012Validator(schema, format_checker=checker).validate(value)


def test_close_json_looks_for_no_end_beyond_the_budget() -> None:
    """Each step of the batch waited for a search of a quarter of a second."""
    schema = {"type": "array", "minItems": 10**6}
    with at_most(40):
        (result,), _ = run(MODEL, [chat("x", guided_json=schema, max_tokens=90)], close_json=True)
    assert result["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("open_thinking", [True, False])
def test_reasoning_comes_before_the_structure(open_thinking: bool) -> None:
    body = chat(
        "x",
        max_tokens=300,
        reasoning_length={"min": 10, "max": 40},
        chat_template_kwargs={"open_thinking": open_thinking},
        **structured(SCHEMA),
    )
    (result,), _ = run(THINKER, [body], close_json=True)
    message = result["choices"][0]["message"]
    Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))
    assert message["reasoning"] == message["reasoning_content"]
    assert 1 <= len(message["reasoning"]) <= 40
    details = result["usage"]["completion_tokens_details"]
    assert 1 <= details["reasoning_tokens"] < result["usage"]["completion_tokens"]


def test_no_reasoning_where_the_effort_is_none() -> None:
    body = chat("x", max_tokens=200, reasoning_effort="none", **structured(SCHEMA))
    (result,), _ = run(THINKER, [body], close_json=True)
    assert "reasoning" not in result["choices"][0]["message"]
    assert result["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_captures_come_back_in_order() -> None:
    grammar = 'start: word ("," word)* ";" rest\nword[capture]: /[a-z]+/\nrest[capture]: /[0-9]/'
    (result,), _ = run(MODEL, [chat("x", max_tokens=100, guided_grammar=grammar)], close_json=True)
    choice = result["choices"][0]
    words, _, rest = choice["message"]["content"].partition(";")
    assert choice["captures"] == [
        *({"name": "word", "text": word} for word in words.split(",")),
        {"name": "rest", "text": rest},
    ]


def test_a_text_that_does_not_validate_is_an_error(monkeypatch: Any) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"const": 1}, "minItems": 2}
    (result,), _ = run(
        MODEL, [chat("x", max_tokens=90, **structured(schema, False))], close_json=True
    )
    assert result["error"]["code"] == "invalid_structured_output"
    assert "non-unique" in result["error"]["message"]


def test_every_keyword_that_is_not_enforced_is_warned_of() -> None:
    schema = {"type": "object", "properties": {}, "not": {"type": "array", "contains": {}}}
    lenient = {**schema, "additionalProperties": {"type": "string", "format": "telephone"}}
    body = chat("x", max_tokens=90, **structured(lenient, False))
    (result,), _ = run(MODEL, [body], close_json=True)
    told = [w["message"] for w in result["warnings"] if w["code"] == "not_enforced"]
    assert len(told) == 2
    assert "telephone" in "".join(told)
    assert "'not'" in "".join(told)


def test_completions_are_constrained_too() -> None:
    body = {"prompt": "Say:", "guided_choice": ["alpha", "beta"], "temperature": 0}
    (result,), _ = run(MODEL, [body])
    assert result["choices"][0]["text"] in ("alpha", "beta")


def test_a_tokenizer_that_cannot_be_constrained_is_refused_with_a_reason() -> None:
    from dataclasses import replace

    class Odd:
        def __getattr__(self, name: str) -> Any:
            return getattr(MODEL.tokenizer, name)

        _tokenizer = object()

        def __len__(self) -> int:
            return 10

    odd: LoadedModel = replace(MODEL, tokenizer=Odd())  # type: ignore[arg-type]
    (result,), _ = run(odd, [chat("x", max_tokens=5, **structured({"type": "integer"}))])
    assert "tokenizer cannot be constrained" in result["error"]["message"]


NAMED = {"type": "function", "function": {"name": "add"}}
BEGUN: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": NAMED},
    {"tools": TOOLS, "tool_choice": NAMED, "temperature": 1.0, "seed": 5, "n": 2},
    {"tools": TOOLS, "tool_choice": NAMED, "frequency_penalty": 1.5, "min_tokens": 30},
    {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 3},
    {"guided_regex": "A town: [a-z]{3,9}"},
    {"guided_regex": "A town: [a-z]{3,9}", "stop": ["n:"]},
    {"guided_regex": "A town: [a-z]{3,9}", "logprobs": True, "top_logprobs": 2},
    {"guided_choice": ["no other way"]},
    {"guided_regex": "A town: [a-z]{3,9}", "stop": [" "]},
]


def test_a_beginning_that_is_decided_is_prefilled_and_the_answer_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = [chat(f"Add {i}", **{"max_tokens": 60, **kind}) for i, kind in enumerate(BEGUN)]
    got, engine = run(MODEL, bodies)
    masked_walk(monkeypatch)
    expected, stepwise = run(MODEL, bodies)

    def told(result: dict[str, Any]) -> Any:
        logprobs = [choice.get("logprobs") for choice in result.get("choices", [])]
        return answers(result), result.get("usage"), logprobs

    assert list(map(told, got)) == list(map(told, expected))
    cut, stopped, measured, chosen = got[3], got[5], got[6], got[7]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3
    assert stopped["error"]["message"].endswith("it ended too early: A tow")
    counted = measured["usage"]["completion_tokens"]
    assert len(measured["choices"][0]["logprobs"]["content"]) == counted
    assert chosen["choices"][0]["message"]["content"] == "no other way"
    call = MODEL.tokenizer.encode('<tool_call>\n{"name": "add", "arguments": ')
    spared = stepwise.totals.decoded_tokens - engine.totals.decoded_tokens
    assert spared > 4 * len(call)
    assert engine.totals.prefilled_tokens - stepwise.totals.prefilled_tokens <= spared
    assert engine.totals.prefilled_tokens <= engine.totals.distinct_tokens * 1.1


@pytest.mark.parametrize(
    ("shape", "stop", "left", "fits"),
    [
        ({"guided_regex": "alphabet( soup)*"}, "be", "alpha", False),
        ({"guided_regex": "(été ){3}"}, "té ", "é", False),
        ({"guided_grammar": 'start: "abc" /b*/'}, "b", "a", False),
        ({"guided_grammar": 'start: "ab" /b*/'}, "b", "a", True),
        ({"guided_regex": "abc\n"}, "\n", "abc", True),
        ({"guided_regex": "(alphabet )+"}, "bet ", "alpha", True),
        ({"guided_choice": ["al", "alphabetic"]}, "ha", "alp", False),
        ({"guided_choice": ["al", "alphabetic"]}, "pha", "al", True),
        ({"guided_choice": ["yes."]}, ".", "yes", True),
        (structured({"const": {"a": "b"}}), "}", None, False),
    ],
)
def test_what_a_stop_string_leaves_of_an_answer_has_to_fit_without_it_or_with_it(
    shape: dict[str, Any], stop: str, left: str, fits: bool
) -> None:
    longest = {str(MODEL.tokenizer.eos_token_id): -100}
    body = chat("x", max_tokens=40, stop=stop, logit_bias=longest, logprobs=True, **shape)

    (result,), _ = run(MODEL, [body])

    if fits:
        assert result["choices"][0]["message"]["content"] == left
    elif left is not None:
        assert result["error"]["message"].endswith(f"it ended too early: {left}")
    else:
        assert "it is not JSON" in result["error"]["message"]


def test_who_has_a_decided_beginning_alone_has_not_begun() -> None:
    """It is no partial answer, may be another worker's, and answers for a duplicate."""
    engine = MLXEngine(MODEL, EngineOptions(batch_size=1))
    one, other = (chat("x", max_tokens=40, guided_regex="A town: [a-z]{3,9}") for _ in range(2))
    engine.add([task("a", chat("first", max_tokens=40)), task("b", one), task("c", other)])
    while "a" in engine.task_ids and not engine.spare(1):
        engine.step()

    assert engine.spare(2) == ["b"]
    assert engine.partial(["b", "c"]) == {}
    results = finish(engine, len(engine.task_ids))
    assert answers(results["b"]) == answers(results["c"])
    assert results["c"]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(
        MODEL.tokenizer.apply_chat_template(one["messages"], add_generation_prompt=True)
    )
