"""The draft of JSON Schema that a schema is written in."""

from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)
from jsonschema.protocols import Validator

from mlx_rq.jobs.openai.schemas import Schema

OLD = (Draft3Validator, Draft4Validator, Draft6Validator, Draft7Validator)
"""The drafts in which a `$ref` stands alone: nothing beside it counts."""

_ALL = (*OLD, Draft201909Validator, Draft202012Validator)


def name_of(draft: type[Validator]) -> str:
    """Gives the URI that a `$schema` names a draft by."""
    metaschema = draft.META_SCHEMA
    return str(metaschema.get("$id") or metaschema["id"])


def draft_of(schema: Schema) -> type[Validator]:
    """Gives the draft that a schema names, 2020-12 where it names none that is known."""
    named = schema.get("$schema")
    return _BY_NAME.get(_bare(named) if isinstance(named, str) else "", Draft202012Validator)


def _bare(name: str) -> str:
    """Takes off a name what people write as it comes: whether with https, or an empty fragment."""
    return name.removeprefix("https").removeprefix("http").removesuffix("#")


_BY_NAME: dict[str, type[Validator]] = {_bare(name_of(draft)): draft for draft in _ALL}
