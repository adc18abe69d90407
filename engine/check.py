"""Validates finished JSON against its schema, formats included.

The constraint keeps a text within its grammar; this is the second look, for what a grammar cannot
say (29 February, a keyword passed over in lenient mode). It runs on the thread that generates, so
regular expressions out of a schema get a time limit, and nothing is ever fetched.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from mlx_rq.jobs.schemas import Schema

_REGEX_SECONDS = 0.25
_LONGEST_MESSAGE = 300


class SchemaFault(ValueError):
    """A schema is no valid JSON schema."""


class Check:
    """Validates values against one schema; 2020-12, unless its `$schema` names another draft.

    Raises SchemaFault where the schema itself is not valid.
    """

    def __init__(self, schema: Schema) -> None:
        draft = validator_for(schema, default=Draft202012Validator)
        try:
            draft.check_schema(dict(schema))
        except SchemaError as error:
            raise SchemaFault(_message(error)) from None
        self._validator = _bounded(draft)(
            schema, registry=Registry(), format_checker=draft.FORMAT_CHECKER
        )

    def fault(self, value: Any) -> str | None:
        """Says what is wrong with a value, and where; None where it is valid."""
        try:
            error = next(self._validator.iter_errors(value), None)
        except TimeoutError:
            return "a regular expression of the schema takes too long on it"
        except (Unresolvable, RecursionError, regex.error) as unusable:
            return f"it cannot be validated: {unusable}"
        return None if error is None else _message(error)


def _message(error: ValidationError | SchemaError) -> str:
    text = error.message
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "…"
    return f"{text} (at {error.json_path})"


@cache
def _bounded(draft: type[Validator]) -> type[Validator]:
    """Gives a draft's validator whose regular expressions have a time limit.

    jsonschema uses `re`, which a hostile pattern can hold up for ever.
    """
    keywords = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    bounded: type[Validator] = extend(draft, keywords)  # type: ignore[no-untyped-call]
    return bounded


def _matches(pattern: str, text: str) -> bool:
    return regex.search(pattern, text, timeout=_REGEX_SECONDS) is not None


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
