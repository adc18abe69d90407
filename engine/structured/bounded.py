"""What jsonschema could take for ever to validate, within bounds.

jsonschema uses `re`, which a hostile pattern can hold up for ever. All places where it does so with
a pattern out of a schema are replaced here: `pattern`, `patternProperties`, and the two keywords
that ask which properties others have looked at. Of the formats, those whose reader is slow.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import regex
from jsonschema import FormatChecker
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing.jsonschema import lookup_recursive_ref

from mlx_rq.jobs.openai.schemas import Schema

_NOT_ASCII = re.compile("[\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd]")
"""The characters that an IRI may have, and a URI not (RFC 3987, `ucschar`)."""

_NO_PATTERN = (regex.error, RecursionError, OverflowError)
"""What compiling raises for what is no pattern."""

_SECONDS = 0.5
"""For all searches in one value together: a schema may have many patterns, a value many texts."""


class Patterns:
    """The regular expressions of one schema, compiled ahead, and the time that is left for them."""

    def __init__(self, schema: Schema) -> None:
        self._left = _SECONDS
        self._compiled: dict[str, regex.Pattern[str]] = {}
        for pattern in _patterns(schema):
            try:
                self._compiled[pattern] = regex.compile(pattern)
            except _NO_PATTERN:
                continue  # where it is needed, the value says so; it may be no pattern at all

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Has the keywords search with these, from now on with all of the time."""
        self._left = _SECONDS
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def match(self, pattern: str, text: str) -> bool:
        """Says whether a pattern is found in a text; raises TimeoutError when the time is over."""
        if self._left <= 0:
            raise TimeoutError
        begun = time.perf_counter()
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = self._compiled[pattern] = regex.compile(pattern)
        try:
            return compiled.search(text, timeout=self._left) is not None
        finally:
            self._left -= time.perf_counter() - begun


_in_use: ContextVar[Patterns] = ContextVar("patterns")


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


@cache
def bounded(draft: type[Validator]) -> type[Validator]:
    """Gives a draft's validator whose regular expressions have a time limit.

    It stays of that class wherever it goes; jsonschema would go over to the unbounded class of the
    draft that a schema within names (`$schema`), and be it the schema itself (`"$ref": "#"`).
    """
    keywords: dict[str, Any] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    if "unevaluatedProperties" in draft.VALIDATORS:
        keywords["unevaluatedProperties"] = _unevaluated_properties
    made: Any = extend(draft, keywords)  # type: ignore[no-untyped-call]
    evolve = made.evolve

    def evolve_within(self: Any, **changes: Any) -> Any:
        schema = changes.get("schema", self.schema)
        if isinstance(schema, Mapping) and "$schema" in schema:
            changes["schema"] = {name: v for name, v in schema.items() if name != "$schema"}
        return evolve(self, **changes)

    made.evolve = evolve_within
    validator: type[Validator] = made
    return validator


@cache
def formats(draft: type[Validator]) -> FormatChecker:
    """Gives a draft's formats: patterns as they are searched with, IRIs as URIs.

    `re`, which jsonschema asks, does not know `\\p{L}`, which the constraint engine enforces. For
    IRIs it has a parser that takes some milliseconds for each character; here they are read by way
    of the URIs that they can be written as.
    """
    known = draft.FORMAT_CHECKER
    checker = FormatChecker(formats=())
    checker.checkers = dict(known.checkers)

    @checker.checks("regex", raises=_NO_PATTERN)
    def is_pattern(value: object) -> bool:
        return not isinstance(value, str) or bool(regex.compile(value))

    for uri in ("uri", "uri-reference"):
        iri = uri.replace("uri", "iri")
        if iri in known.checkers:

            @checker.checks(iri)
            def is_iri(value: object, uri: str = uri) -> bool:
                text = _NOT_ASCII.sub("%00", value) if isinstance(value, str) else value
                return known.conforms(text, uri)

    return checker


def _matches(pattern: str, text: str) -> bool:
    return _in_use.get().match(pattern, text)


def _pattern(validator: Any, pattern: str, value: Any, schema: Schema) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Schema, value: Any, schema: Schema
) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        for pattern, inner in patterns.items():
            for key, item in value.items():
                if _matches(pattern, key):
                    yield from validator.descend(item, inner, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, additional: Any, value: Any, schema: Schema
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    patterns = schema.get("patternProperties", {})
    for key, item in value.items():
        if key in schema.get("properties", {}) or any(_matches(p, key) for p in patterns):
            continue
        if additional is False:
            yield ValidationError(f"additional property {key!r} is not allowed")
        elif isinstance(additional, dict):
            yield from validator.descend(item, additional, path=key)


def _unevaluated_properties(
    validator: Any, unevaluated: Any, value: Any, schema: Schema
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    # Without this keyword itself, which comes after all others.
    others = {name: v for name, v in schema.items() if name != "unevaluatedProperties"}
    known = _evaluated(validator, others, value)
    for key, item in value.items():
        if key in known:
            continue
        if unevaluated is False:
            yield ValidationError(f"unevaluated property {key!r} is not allowed")
        else:
            yield from validator.descend(item, unevaluated, path=key)


def _evaluated(validator: Any, schema: Any, value: dict[str, Any]) -> set[str]:
    """Finds the properties of a value that a schema which it fits has looked at.

    Those are what its own keywords name, and what the schemas within look at that apply to the
    value as a whole. `validator` is the schema's own, which knows where its references lead.
    """
    if not isinstance(schema, Mapping):
        return set()
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    known = {key for key in value if key in named or any(_matches(p, key) for p in patterns)}
    for rest in ("additionalProperties", "unevaluatedProperties"):
        if rest in schema:
            others = {key: item for key, item in value.items() if key not in known}
            known |= {key for key, item in others.items() if _fits(validator, schema[rest], item)}
    for target, inner in _applied(validator, schema, value):
        known |= _evaluated(target, inner, value)
    return known


def _applied(validator: Any, schema: Schema, value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields what of the schemas in a schema applies to a value as a whole, with its validator."""
    resolver = validator._resolver
    refs = [resolver.lookup(schema[k]) for k in ("$ref", "$dynamicRef") if k in schema]
    if "$recursiveRef" in schema:
        refs.append(lookup_recursive_ref(resolver))
    for resolved in refs:
        contents = resolved.contents
        yield validator.evolve(schema=contents, _resolver=resolved.resolver), contents
    inner = [s for key, s in schema.get("dependentSchemas", {}).items() if key in value]
    for several in ("allOf", "anyOf", "oneOf"):
        inner += [s for s in schema.get(several, ()) if _fits(validator, s, value)]
    if "if" in schema:
        branches = ("if", "then") if _fits(validator, schema["if"], value) else ("else",)
        inner += [schema[branch] for branch in branches if branch in schema]
    for one in inner:
        yield validator, one


def _fits(validator: Any, schema: Any, value: Any) -> bool:
    return next(validator.descend(value, schema), None) is None
