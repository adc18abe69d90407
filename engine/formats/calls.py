"""A function that may be called, as the formats of calls write it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_rq.jobs.openai.schemas import Schema

_OF_THE_WHOLE = (
    *("anyOf", "dependentRequired", "dependentSchemas", "if", "maxProperties", "minProperties"),
    *("not", "oneOf", "propertyNames"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A function that may be called: its name, its closed or open schema, how strictly.

    `properties` and `required` as they are once what the schema merges is merged.
    """

    name: str
    schema: Schema
    lenient: bool
    properties: Mapping[str, Any]
    required: frozenset[str]

    @property
    def needs_unlisted(self) -> bool:
        """Whether there must be arguments, though none is listed."""
        return not self.properties and self.schema.get("minProperties", 0) > 0

    @property
    def notes(self) -> list[str]:
        """What of the schema is not said where the properties are written one by one."""
        beside = any(key in self.schema for key in _OF_THE_WHOLE)
        return ["which arguments go together, in this model's calls"] if beside else []

    def within(self, part: Any) -> dict[str, Any]:
        """Makes a part of the schema stand alone: the definitions it refers to come along."""
        keys = ("$defs", "definitions")
        own = part if isinstance(part, dict) else {}
        return {key: self.schema[key] for key in keys if key in self.schema} | own
