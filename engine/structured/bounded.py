"""What jsonschema could take for ever to validate, within bounds.

jsonschema uses `re`, which a hostile pattern can hold up for ever. All places where it does so with
a pattern out of a schema are replaced here: `pattern`, `patternProperties`, and the two keywords
that ask which properties others have looked at. Of the formats, those whose reader is slow. Of the
keywords, those that compare all with all, or collect faults that nobody reads. And each keyword
looks at the clock: branches of branches can take for ever, too.

One keyword is replaced for what it says: by jsonschema's division, 19.99 is no multiple of 0.01.
"""

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from typing import Any

from jsonschema import (
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    FormatChecker,
)
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing.jsonschema import lookup_recursive_ref

from mlx_rq.engine.structured.patterns import NO_PATTERN, compiled, found_in
from mlx_rq.jobs.openai.schemas import Schema

_NOT_ASCII = re.compile("[\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd]")
"""The characters that an IRI may have, and a URI not (RFC 3987, `ucschar`)."""
_WITH_IRIS = (Draft7Validator, Draft201909Validator, Draft202012Validator)
"""The drafts that name the formats of IRIs."""

_MOST_SECONDS = 2.0
"""Of CPU, to validate one value: it is the thread that generates which does it."""

_given_up: ContextVar[float] = ContextVar("given_up")
"""When, on this thread's clock of CPU, the value that is being validated is given up."""


@contextmanager
def in_time() -> Iterator[None]:
    """Has validators made here raise TimeoutError when a value takes too long from now on."""
    token = _given_up.set(time.thread_time() + _MOST_SECONDS)
    try:
        yield
    finally:
        _given_up.reset(token)


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
        "anyOf": _any_of,
        "oneOf": _one_of,
        "uniqueItems": _unique_items,
        "unevaluatedProperties": _unevaluated_properties,
        "multipleOf": _multiple_of,
        "divisibleBy": _multiple_of,
    }
    keywords = {
        name: _timed(keywords.get(name, keyword)) for name, keyword in draft.VALIDATORS.items()
    }
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
    IRIs it would take a parser that needs more than a second to be imported, and milliseconds for
    each character; here they are read by way of the URIs that they can be written as.
    """
    known = draft.FORMAT_CHECKER
    checker = FormatChecker(formats=())
    checker.checkers = dict(known.checkers)

    @checker.checks("regex", raises=NO_PATTERN)
    def is_pattern(value: object) -> bool:
        return not isinstance(value, str) or bool(compiled(value))

    if draft in _WITH_IRIS:
        for uri in ("uri", "uri-reference"):

            @checker.checks(uri.replace("uri", "iri"))
            def is_iri(value: object, uri: str = uri) -> bool:
                text = _NOT_ASCII.sub("%00", value) if isinstance(value, str) else value
                return known.conforms(text, uri)

    return checker


def _timed(keyword: Any) -> Any:
    def timed(validator: Any, wanted: Any, value: Any, schema: Schema) -> Any:
        if time.thread_time() > _given_up.get():
            raise TimeoutError
        return keyword(validator, wanted, value, schema)

    return timed


def _any_of(validator: Any, schemas: Any, value: Any, schema: Schema) -> Iterator[ValidationError]:
    if not any(_fits(validator, one, value) for one in schemas):
        yield ValidationError(f"{value!r} is not valid under any of the given schemas")


def _one_of(validator: Any, schemas: Any, value: Any, schema: Schema) -> Iterator[ValidationError]:
    fitting = [one for one in schemas if _fits(validator, one, value)]
    if not fitting:
        yield ValidationError(f"{value!r} is not valid under any of the given schemas")
    elif len(fitting) > 1:
        listed = ", ".join(map(repr, fitting))
        yield ValidationError(f"{value!r} is valid under each of {listed}")


def _unique_items(
    validator: Any, unique: Any, value: Any, schema: Schema
) -> Iterator[ValidationError]:
    if unique and isinstance(value, list) and len(set(map(_hashable, value))) < len(value):
        yield ValidationError(f"{value!r} has non-unique elements")


def _multiple_of(
    validator: Any, multiple: Any, value: Any, schema: Schema
) -> Iterator[ValidationError]:
    if validator.is_type(value, "number") and not _is_multiple(value, multiple):
        yield ValidationError(f"{value!r} is not a multiple of {multiple!r}")


def _is_multiple(value: float, multiple: float) -> bool:
    """Says so of numbers as they are written, in decimals."""
    return abs(value) < math.inf and _exact(value) % _exact(multiple) == 0


def _exact(number: float) -> Fraction:
    return Fraction(number if isinstance(number, int) else repr(number))


def _hashable(value: Any) -> Any:
    """Gives what is equal where two values are equal JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, bool):
        return (bool, value)
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    return value


def _matches(pattern: str, text: str) -> bool:
    return found_in(pattern, text)


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
