"""Validates finished JSON against its schema, formats included.

The constraint keeps a text within its grammar; this is the second look, for what a grammar cannot
say (29 February, a keyword passed over in lenient mode). It runs on the thread that generates, so
it goes by time limits (`mlx_rq.engine.structured.bounded`), and nothing is ever fetched.
"""

import json
from collections.abc import Sequence
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry

from mlx_rq.engine.structured.bounded import bounded, formats, in_time
from mlx_rq.engine.structured.drafts import draft_of
from mlx_rq.engine.structured.metaschema import is_valid
from mlx_rq.engine.structured.patterns import Patterns
from mlx_rq.engine.structured.references import endless
from mlx_rq.jobs.openai.schemas import Schema
from mlx_rq.jobs.openai.structured import Shape

_LONGEST_MESSAGE = 300


class SchemaFault(ValueError):
    """A schema is no valid JSON schema."""


class Check:
    """Validates values against one schema; 2020-12, unless its `$schema` names another draft.

    Raises SchemaFault where the schema itself is not valid, or no value can be held against it.
    """

    def __init__(self, schema: Schema) -> None:
        draft = draft_of(schema)
        if not is_valid(schema, draft):
            try:
                check: Any = draft.check_schema  # whose stubs know no format checker
                check(dict(schema), format_checker=formats(draft))
            except SchemaError as error:
                raise SchemaFault(_message(error)) from None
        if reference := endless(schema):
            raise SchemaFault(
                f"the '$ref' to '{reference}' leads back to itself, whatever the value is."
            )
        self._patterns = Patterns(schema)
        self._validator = bounded(draft)(schema, registry=Registry(), format_checker=formats(draft))

    def fault(self, value: Any) -> str | None:
        """Says what is wrong with a value, and where; None where it is valid."""
        try:
            with self._patterns.in_use(), in_time():
                error = next(self._validator.iter_errors(value), None)
        except TimeoutError:
            slow = "a regular expression of the schema" if self._patterns.used_up else "validation"
            return f"{slow} takes too long on it"
        except Exception as unusable:  # a $ref, a pattern, a format's own reader: an answer's fault
            return f"it cannot be validated: {unusable}"
        return None if error is None else _message(error)


def shape_fault(
    shape: Shape, text: str, check: Check | None, complete: bool, stops: Sequence[str] = ()
) -> str | None:
    """Says why a finished text is not of a shape; None where it is.

    A stop string may have been cut off it that belongs to a shape other than JSON.
    """
    if not complete:
        return "it ended too early"
    if shape.kind == "choice" and not any(text + end in shape.value for end in ("", *stops)):
        return "it is none of the choices"
    if check is None:
        return None
    try:
        return check.fault(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"


def _message(error: ValidationError | SchemaError) -> str:
    text = error.message
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]}…{text[-_LONGEST_MESSAGE // 2 :]}"
    return f"{text} (at {error.json_path})"
