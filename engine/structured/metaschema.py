"""Says soon whether a schema is valid, by its draft's metaschema.

jsonschema's own check looks up each reference of the metaschema, and makes a validator, at each
schema within a schema: that takes more than all else of compiling. Here the metaschema is one
document that is walked as it is. What is wrong with a schema, that check is left to say.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

from mlx_rq.engine.structured.bounded import formats
from mlx_rq.jobs.openai.schemas import target

_ITSELF = {"$dynamicRef": "#meta"}, {"$recursiveRef": "#"}
"""How the vocabularies of a metaschema mean it as a whole."""

_UNIQUE = "uniqueItems"


def is_valid(schema: Any, draft: type[Validator]) -> bool:
    """Says whether a schema is valid in a draft, its formats included."""
    validator = _validator(draft)
    return next(validator.descend(schema, validator.schema), None) is None


@cache
def _validator(draft: type[Validator]) -> Any:
    """Gives a draft's validator of schemas, which makes no other validator as it goes."""
    whole = _whole(draft.META_SCHEMA)

    @cache
    def followed(reference: str) -> Any:
        return target(whole, reference)

    def follow(self: Any, reference: str, value: Any, _: Any) -> Iterator[ValidationError]:
        yield from descend(self, value, followed(reference))

    def descend(self: Any, instance: Any, schema: Any, **_: Any) -> Iterator[ValidationError]:
        for keyword, wanted in schema.items() if schema is not True else ():
            if keyword in keywords:
                yield from keywords[keyword](self, wanted, instance, schema) or ()

    made: Any = extend(draft, {"$ref": follow})  # type: ignore[no-untyped-call]
    keywords = made.VALIDATORS
    made.descend = descend
    return made(whole, format_checker=formats(draft))


def _whole(metaschema: Any) -> Any:
    """Writes a metaschema and its vocabularies as one document."""
    whole = {**metaschema, "$defs": {}}
    for part in whole.pop("allOf", ()):
        vocabulary = REGISTRY.contents(metaschema["$id"].removesuffix("schema") + part["$ref"])
        for key in ("properties", "$defs"):
            whole[key] = {**vocabulary.get(key, {}), **whole[key]}
    # Old drafts forbid it, where newer ones do not: an enum that repeats itself says nothing else.
    enum = {key: value for key, value in whole["properties"]["enum"].items() if key != _UNIQUE}
    whole["properties"] = {**whole["properties"], "enum": enum}
    return _within(whole)


def _within(value: Any) -> Any:
    """Copies a part of a metaschema, its references kept within the document."""
    if isinstance(value, list):
        return [_within(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value in _ITSELF:
        return {"$ref": "#"}
    copied = {key: _within(one) for key, one in value.items()}
    if isinstance(reference := value.get("$ref"), str):
        copied["$ref"] = "#" + reference.partition("#")[2]
    return copied
