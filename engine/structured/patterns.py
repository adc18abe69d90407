"""Searches with the patterns of a schema: as the constraint engine reads them, and within a time.

JSON Schema's patterns are ECMA-262's: `\\d` and `\\w` are ASCII, `$` is the end of the text alone.
The engine goes by that, Python does not: a text that the one allows the other would refuse. And
`re`, which jsonschema uses, can be held up for ever by a hostile pattern.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import regex

from mlx_rq.jobs.openai.schemas import Schema

NO_PATTERN = (regex.error, RecursionError, OverflowError)
"""What compiling raises for what is no pattern."""

_SECONDS = 0.5
"""For all searches in one value together: a schema may have many patterns, a value many texts."""

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NO_SPACE = (
    r"\x00-\x08\x0e-\x1f!-\x84\x86-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e"
    r"\u2030-\u205e\u2060-\u2fff\u3001-\U0010ffff"
)
_CLASSES = {
    r"\d": "0-9",
    r"\D": r"\x00-/:-\U0010ffff",
    r"\w": "0-9A-Z_a-z",
    r"\W": r"\x00-/:-@\[-\^`\{-\U0010ffff",
    r"\s": _SPACE,
    r"\S": _NO_SPACE,
}
_PIECE = regex.compile(r"\\.|[\[\]$]", regex.DOTALL)


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern; raises one of NO_PATTERN."""
    in_class = False
    pieces = []
    end = 0
    for match in _PIECE.finditer(pattern):
        pieces.append(pattern[end : match.start()])
        end = match.end()
        piece = match[0]
        if piece in _CLASSES:
            piece = _CLASSES[piece] if in_class else f"[{_CLASSES[piece]}]"
        elif piece == "$" and not in_class:
            piece = r"\Z"
        elif piece == "[" and not in_class:
            in_class = True
        elif piece == "]":
            in_class = False
        pieces.append(piece)
    return regex.compile("".join(pieces) + pattern[end:])


class Patterns:
    """The regular expressions of one schema, compiled ahead, and the time that is left for them."""

    def __init__(self, schema: Schema) -> None:
        self._left = _SECONDS
        self._compiled: dict[str, regex.Pattern[str]] = {}
        for pattern in _patterns(schema):
            try:
                self._compiled[pattern] = compiled(pattern)
            except NO_PATTERN:
                continue  # where it is needed, the value says so; it may be no pattern at all

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Has `found_in` search with these, from now on with all of the time."""
        self._left = _SECONDS
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    @property
    def used_up(self) -> bool:
        """Whether the time for searches is over."""
        return self._left <= 0

    def match(self, pattern: str, text: str) -> bool:
        """Says whether a pattern is found in a text; raises TimeoutError when the time is over."""
        if self._left <= 0:
            raise TimeoutError
        begun = time.perf_counter()
        if pattern not in self._compiled:
            self._compiled[pattern] = compiled(pattern)
        try:
            return self._compiled[pattern].search(text, timeout=self._left) is not None
        finally:
            self._left -= time.perf_counter() - begun


_in_use: ContextVar[Patterns] = ContextVar("patterns")


def found_in(pattern: str, text: str) -> bool:
    """Says whether a pattern is found in a text, by the patterns in use; raises as they do."""
    return _in_use.get().match(pattern, text)


def _patterns(schema: Any) -> Iterator[str]:
    """Finds all that may be a pattern, wherever a `$ref` might lead."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            if isinstance(node.get("patternProperties"), Mapping):
                yield from node["patternProperties"]
            todo += node.values()
        elif isinstance(node, list):
            todo += node
