"""Takes a sequence's text apart: reasoning, content, tool calls. Pure: text in, parts out."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_rq.jobs.openai.words import in_a_sentence


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it; `id` only where its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls in a text: those that are whole, and whether one was cut off at the end."""

    before: str
    calls: list[ParsedCall] = field(default_factory=list)
    cut: bool = False


class ParseFault(ValueError):
    """A tool call is there, but cannot be read."""


def split_reasoning(
    text: str, start: str | None, end: str | None, *, is_open: bool
) -> tuple[str | None, str]:
    """Splits a text into reasoning (None where there is none) and what follows it.

    `is_open` where the prompt had begun the reasoning. Reasoning without an end takes all.
    """
    if start is None or end is None:
        return None, text
    if not is_open:
        stripped = text.lstrip()
        if not stripped.startswith(start):
            return None, text
        text = stripped[len(start) :]
    reasoning, _, rest = text.partition(end)
    return reasoning.strip(), rest.lstrip()


def count_reasoning(
    tokens: Sequence[int],
    start: Sequence[int],
    end: Sequence[int],
    *,
    is_open: bool,
    decode: Callable[[Sequence[int]], str],
) -> int:
    """Counts the tokens that `split_reasoning` takes for reasoning, the marks not counted."""
    begin = 0
    if not is_open:
        opened = _find(tokens, start)
        if opened is None or decode(tokens[:opened]).strip():
            return 0
        begin = opened + len(start)
    closed = _find(tokens, end, begin)
    return (len(tokens) if closed is None else closed) - begin


def _find(tokens: Sequence[int], mark: Sequence[int], begin: int = 0) -> int | None:
    places = range(begin, len(tokens) - len(mark) + 1)
    return next((at for at in places if list(tokens[at : at + len(mark)]) == list(mark)), None)


def split_calls(
    text: str,
    start: str,
    end: str,
    parse: Callable[[str], Any],
    *,
    finished: bool,
    names: Sequence[str],
    argument: str = r"(?!)",
) -> Calls:
    """Splits a text into what stands before the first call, and the calls.

    A call without its end mark is cut off where the text was not `finished`. With no end mark in
    the format, a call ends where the next begins. No mark is what an `argument` holds, a pattern:
    the grammar lets any text stand there. Raises ParseFault.
    """
    before, found, rest = text.partition(start)
    calls: list[ParsedCall] = []
    while found:
        body, ended, after = _until(rest, end or start, argument)
        if not ended and finished:  # what the model wrote before the mark was no whole argument
            body, ended, after = rest.partition(end or start)
        if not ended and not finished:
            return Calls(before, calls, cut=True)
        calls += _read(body, parse, names)
        _, found, rest = after.partition(start) if end else ("", ended, after)
    return Calls(before, calls)


def _until(text: str, mark: str, argument: str) -> tuple[str, str, str]:
    """Partitions a text at the first mark that does not stand within an argument."""
    for match in re.finditer(f"{argument}|(?P<mark>{re.escape(mark)})", text, re.DOTALL):
        if match["mark"]:
            return text[: match.start()], mark, text[match.end() :]
    return text, "", ""


def _read(body: str, parse: Callable[[str], Any], names: Sequence[str]) -> list[ParsedCall]:
    """Reads what stands between two marks, one call or several."""
    if body.strip() in names:  # some formats write a call without arguments as its bare name
        return [ParsedCall(body.strip(), {})]
    try:
        read = parse(body)
    except Exception as error:  # mlx-lm's parsers raise whatever the text makes them raise
        raise ParseFault(f"the call cannot be read: {in_a_sentence(error)}") from None
    calls = []
    for call in read if isinstance(read, list) else [read]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ParseFault("the call has no name, or no arguments")
        if name not in names:
            raise ParseFault(f"the function '{name}' was called, which is not among the tools")
        calls.append(ParsedCall(name, _finite(arguments), call.get("id")))
    return calls


def _finite(value: Any) -> Any:
    """Writes numbers too large for a float as the largest one: Infinity is no JSON."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise ParseFault("a number in it is NaN")
        return math.copysign(sys.float_info.max, value)
    return value
