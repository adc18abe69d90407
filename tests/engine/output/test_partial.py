"""What is told of an answer while it is written is never taken back at its end."""

import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import speaking
from driving import AHEAD, finish, task, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from spoken_texts import EACH, TEXTS, TOKENIZERS
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Partial, Task
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.output.partial import partial
from mlx_rq.engine.structured.output_format import OutputFormat, OutputFormats
from mlx_rq.engine.text.detokenizer import SequenceText, held_back
from mlx_rq.jobs.openai.validation import validate

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "marks", "kept"),
    [
        ("one two", ["two three"], "one "),
        ("one two", ["x", "wo"], "one two"),  # a whole mark is for somebody else to see
        ("abab", ["abc"], "ab"),
        ("aa", ["ab", "aab"], ""),
        ("", ["a"], ""),
        ("text", [], "text"),
        ("a", ["a"], "a"),
    ],
)
def test_what_may_be_the_beginning_of_a_mark_is_held_back(
    text: str, marks: list[str], kept: str
) -> None:
    assert held_back(text, marks) == kept


@EACH
@settings(max_examples=60)
@given(text=TEXTS, data=st.data())
def test_a_text_that_stands_begins_the_finished_one(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stops = data.draw(st.lists(st.sampled_from(["cat", " bet", "\n", "本", "é"]), max_size=2))
    every = data.draw(st.integers(1, 5))
    sequence = SequenceText(tokenizer, stops)
    told = []
    for count, token in enumerate(tokens, 1):
        if sequence.add(token):
            break
        if count % every == 0:
            told.append(sequence.partial())
    told.append(sequence.partial())

    whole = sequence.finish()
    assert all(later.startswith(earlier) for earlier, later in pairwise(told))
    assert whole.startswith(told[-1])
    assert not stops or sequence.stopped_at is None or told[-1] == whole
    assert len(whole) - len(told[-1]) < 4  # nothing but half a character or half a stop is kept


@cache
def output_format(*, thinking: bool, tools: bool, is_open: bool = False) -> OutputFormat:
    """The form of a chat of a model that may reason and call tools."""
    model = speaking.model(thinking=thinking)
    body: dict[str, Any] = {"messages": HELLO, **({"tools": [TOOL]} if tools else {})}
    if thinking and is_open:
        body["chat_template_kwargs"] = {"open_thinking": True}
    request: Any = validate("chat", body)
    begun = model.tokenizer.encode("<think>\n" if is_open else "x", add_special_tokens=False)
    return OutputFormats(model).output_format_of(request, begun)


PIECES = [
    *("<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"),
    *("<|im_end|>", "<|im_", "end|>", "<", "thi", " ", "\n", "Hm.", " So", "it is", "<|im_start|>"),
]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_what_stands_of_a_choice_begins_what_is_read_at_its_end(
    thinking: bool, tools: bool, is_open: bool, pieces: list[str]
) -> None:
    wanted = output_format(thinking=thinking, tools=tools, is_open=is_open)
    try:
        reading = wanted.read("".join(pieces), "length", None, 100)
    except ValueError:
        return  # a call that cannot be read: the job ends with an error
    steps = ["", *accumulate("".join(pieces))]
    for text in steps:
        reasoning, content = partial(text, wanted)
        assert (reading.reasoning or "").startswith(reasoning), (text, reading)
        assert (reading.content or "").startswith(content), (text, reading)


def test_reasoning_is_whole_once_the_content_begins() -> None:
    wanted = output_format(thinking=True, tools=False)
    assert partial("  <thi", wanted) == ("", "")
    assert partial("<think> Hm", wanted) == ("Hm", "")
    assert partial("<think> Hm. </th", wanted) == ("Hm.", "")
    assert partial("<think> Hm. </think>\n", wanted) == ("Hm.", "")
    assert partial("<think> Hm. </think>\nSo <|im_", wanted) == ("Hm.", "So ")
    assert partial("<thought", wanted) == ("", "<thought")


def run(model: LoadedModel, *bodies: Any, **options: Any) -> tuple[list[Any], list[list[Any]]]:
    """Generates bodies; gives the results, and what was told of each after every step."""
    engine = MLXEngine(model, EngineOptions(**{"batch_size": 4, "chunk": 32, **options}))
    results, told = drive(engine, bodies)
    return results, told


def drive(engine: MLXEngine, bodies: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
    assert engine.add([task(str(i), body) for i, body in enumerate(bodies)]) == []
    results: dict[str, Any] = {}
    told: dict[str, list[Any]] = {str(i): [] for i in range(len(bodies))}
    for _ in range(20_000):
        if len(results) == len(bodies):
            break
        results.update((outcome.id, outcome.result) for outcome in engine.step())
        for task_id, said in engine.partial(told).items():
            told[task_id].append({partial.choice: partial for partial in said})
        engine.check()
    assert engine.partial(told) == {}
    return [results[str(i)] for i in range(len(bodies))], list(told.values())


def check(result: Any, told: list[dict[int, Partial]], *, least: int) -> None:
    """Sees that what was told grew, and begins what was answered, up to the last few characters."""
    assert len(told) >= least
    for index, whole in enumerate(texts(result)):
        said = [one[index].content for one in told if index in one]
        assert all(b.startswith(a) for a, b in pairwise(said))
        assert whole.startswith(said[-1])
        assert len(whole) - len(said[-1]) < 8


def test_sequences_tell_what_they_have_said_so_far() -> None:
    model = tiny_model("llama")
    chat = {"messages": HELLO, "max_tokens": 12, "min_tokens": 12, "seed": 3}
    completion = {"prompt": [1, 2, 3], "max_tokens": 12, "min_tokens": 12, "temperature": 0}
    bodies = [
        {**chat, "n": 3},
        completion,
        {**completion, "echo": True, "prompt": "Once"},
        {**completion, "prompt": ["a", "b"]},
    ]
    results, told = run(model, *bodies)
    for result, said in zip(results, told, strict=True):
        check(result, said, least=5)
    assert all(said[0].content.startswith("Once") for said in told[2])


def test_duplicates_tell_what_is_generated_for_both() -> None:
    model = tiny_model("llama")
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "min_tokens": 12, "temperature": 0}
    results, told = run(model, body, body)
    assert texts(results[0]) == texts(results[1])
    assert told[0] == told[1]
    check(results[1], told[1], least=5)


def test_a_response_was_created_when_it_was_submitted() -> None:
    engine = MLXEngine(tiny_model("llama"), EngineOptions(batch_size=4, chunk=32))
    request = validate("responses", {"input": "Hi", "max_output_tokens": 16})
    engine.add([Task("known", request, submitted_at=1000.5), Task("unknown", request)])
    results = finish(engine, 2)
    assert results["known"]["created_at"] == 1000
    assert results["known"]["completed_at"] != 1000
    assert abs(results["unknown"]["created_at"] - time.time()) < 60


def test_nothing_is_told_of_sequences_that_may_not_be_answered_with() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "best_of": 3, "n": 1}
    _, told = run(tiny_model("llama"), body)
    assert told == [[]]


def test_sequences_that_are_put_back_say_the_same_again() -> None:
    model = tiny_model("llama")
    bodies = [
        {"prompt": [i, i + 1], "max_tokens": 30, "min_tokens": 30, "temperature": 0}
        for i in range(4)
    ]
    cost = MLXEngine(model, EngineOptions())._running.memory.cost
    options = EngineOptions(batch_size=4, chunk=32, kv_bytes=cost.bytes(4, 15 + AHEAD), reserve=1)
    engine = MLXEngine(model, options)
    results, told = drive(engine, bodies)
    assert engine.totals.sequences_preempted > 0
    for result, said in zip(results, told, strict=True):
        check(result, said, least=5)


def test_structured_answers_and_calls_of_tools() -> None:
    model = speaking.model()
    schema = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3}},
        "required": ["tags"],
        "additionalProperties": False,
    }
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    chat = {"messages": HELLO, "max_tokens": 400, "temperature": 0}
    results, told = run(
        model,
        {**chat, "response_format": shaped},
        {**chat, "tools": [TOOL], "tool_choice": "required"},
    )
    check(results[0], told[0], least=3)
    assert results[1]["choices"][0]["message"]["tool_calls"]
    assert told[1] == []  # a call is told at the end
