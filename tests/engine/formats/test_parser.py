"""Taking texts apart: reasoning, content, calls."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import gemma4, json_tools, kimi_k3, mistral, qwen3_coder

from mlx_rq.engine.formats.parser import (
    ParsedCall,
    ParseFault,
    count_reasoning,
    split_calls,
    split_reasoning,
)
from mlx_rq.engine.formats.tool_formats import JSON_STRING, format_of

plain = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]))


def split(
    text: str,
    finished: bool = True,
    names: tuple[str, ...] = ("f", "g"),
    argument: str = JSON_STRING,
) -> Any:
    return split_calls(
        text,
        "<tool_call>",
        "</tool_call>",
        json_tools.parse_tool_call,
        finished=finished,
        names=names,
        argument=argument,
    )


def test_what_a_parser_of_another_library_says_stands_in_a_sentence() -> None:
    with pytest.raises(ParseFault) as told:
        split_calls(
            *("<tool_call>x</tool_call>", "<tool_call>", "</tool_call>"),
            qwen3_coder.parse_tool_call,
            finished=True,
            names=["f"],
            argument=JSON_STRING,
        )
    assert str(told.value) == "the call cannot be read: No function provided"


@given(reasoning=plain, rest=plain)
def test_reasoning_is_what_stands_before_its_end(reasoning: str, rest: str) -> None:
    expected = (reasoning.strip(), rest.lstrip())
    for text, is_open in (
        (f"{reasoning}</think>{rest}", True),
        (f"\n<think>{reasoning}</think>{rest}", False),
    ):
        assert split_reasoning(text, "<think>", "</think>", is_open=is_open) == expected


@given(text=plain)
def test_text_without_reasoning_stays_as_it_is(text: str) -> None:
    assert split_reasoning(text, "<think>", "</think>", is_open=False) == (None, text)
    assert split_reasoning(text, None, None, is_open=False) == (None, text)


@given(text=plain)
def test_reasoning_that_was_cut_off_takes_all(text: str) -> None:
    assert split_reasoning(text, "<think>", "</think>", is_open=True) == (text.strip(), "")


@pytest.mark.parametrize(
    ("tokens", "is_open", "count"),
    [
        ([5, 6, 2, 7], True, 2),
        ([1, 5, 6, 2, 7], False, 2),
        ([5, 6, 7], True, 3),
        ([5, 6, 2, 7], False, 0),
        ([9, 9, 1, 5, 6, 2, 7], False, 2),  # white space before it
        ([9, 5, 1, 5, 6, 2, 7], False, 0),
        ([2], True, 0),
        ([], True, 0),
    ],
)
def test_reasoning_tokens_are_counted_without_marks(
    tokens: list[int], is_open: bool, count: int
) -> None:
    def decode(some: Sequence[int]) -> str:
        return "".join("\n" if token == 9 else "x" for token in some)

    assert count_reasoning(tokens, [1], [2], is_open=is_open, decode=decode) == count


@given(
    before=plain,
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(plain, st.integers() | plain)),
        min_size=1,
        max_size=4,
    ),
    between=st.sampled_from(["", "\n", " "]),
)
def test_calls_come_back_as_they_were_written(
    before: str, calls: list[tuple[str, dict[str, Any]]], between: str
) -> None:
    written = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    found = split(before + between.join(written))
    assert found.before == before
    assert found.calls == [ParsedCall(name, arguments) for name, arguments in calls]
    assert not found.cut


@given(cut=st.integers(1, 200))
def test_a_call_that_was_cut_off_is_not_passed_off_as_whole(cut: int) -> None:
    one = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    two = '<tool_call>{"name": "g", "arguments": {"a": 2}}</tool_call>'
    text = (one + two)[: len(one) + cut % len(two)]
    found = split(text, finished=False)
    assert found.calls == [ParsedCall("f", {"a": 1})]
    assert found.cut == (len(text) >= len(one) + len("<tool_call>"))


MARKS = "</tool_call>", "<tool_call>", 'a "quoted" <tool_call>{} </tool_call>', "\\"


@pytest.mark.parametrize("text", MARKS)
def test_marks_within_an_argument_are_text(text: str) -> None:
    one = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'a': text}})}</tool_call>"
    for calls in (1, 2):
        found = split(one * calls)
        assert found.calls == [ParsedCall("f", {"a": text})] * calls
    for cut in (one[:-5], one[: len(one) - len('"}}</tool_call>')]):
        found = split(one + cut, finished=False)
        assert (found.calls, found.cut) == ([ParsedCall("f", {"a": text})], True)


def test_marks_within_a_raw_argument_are_text() -> None:
    found_format = format_of("qwen3_coder", {})
    assert found_format is not None
    body = "\n<function=f>\n<parameter=a>\nsay </tool_call>\n</parameter>\n</function>\n"
    found = split_calls(
        f"<tool_call>{body}</tool_call>",
        "<tool_call>",
        "</tool_call>",
        lambda text: qwen3_coder.parse_tool_call(text, []),
        finished=True,
        names=["f"],
        argument=found_format.argument,
    )
    assert found.calls == [ParsedCall("f", {"a": "say </tool_call>"})]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        '{"name": "f"}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": 1, "arguments": {}}',
        '["f"]',
        '{"name": "f", "arguments": {"a": [NaN]}}',
        '{"name": "unknown", "arguments": {}}',
    ],
)
def test_a_broken_call_is_a_fault(body: str) -> None:
    with pytest.raises(ParseFault):
        split(f"<tool_call>{body}</tool_call>")


def test_numbers_beyond_a_float_are_the_largest_one() -> None:
    """Written as they are read, Infinity, the arguments would be no JSON."""
    (call,) = split(
        '<tool_call>{"name": "f", "arguments": {"a": [1e400, {"b": -1e400}]}}</tool_call>'
    ).calls
    assert call.arguments == {"a": [sys.float_info.max, {"b": -sys.float_info.max}]}


def test_without_an_end_mark_a_call_ends_where_the_next_begins() -> None:
    text = 'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    found = split_calls(
        text, "[TOOL_CALLS]", "", mistral.parse_tool_call, finished=True, names=["f", "g"]
    )
    assert found.before == "Well."
    assert found.calls == [ParsedCall("f", {"a": 1}), ParsedCall("g", {})]

    cut = split_calls(
        text[:-1], "[TOOL_CALLS]", "", mistral.parse_tool_call, finished=False, names=["f", "g"]
    )
    assert cut.calls == [ParsedCall("f", {"a": 1})]
    assert cut.cut


def test_formats_that_are_only_parsed() -> None:
    gemma = '<|tool_call>call:f{city:<|"|>Paris<|"|>,n:2}<tool_call|>'
    kimi = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" '
        'type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    for text, module, arguments in (
        (gemma, gemma4, {"city": "Paris", "n": 2}),
        (kimi, kimi_k3, {"n": 2}),
    ):
        found = split_calls(
            text,
            module.tool_call_start,
            module.tool_call_end,
            module.parse_tool_call,
            finished=True,
            names=["f"],
        )
        assert found.calls == [ParsedCall("f", arguments)]
