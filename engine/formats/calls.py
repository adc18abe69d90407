"""A function that may be called, as the formats of calls write it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_rq.jobs.openai.schemas import Schema


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

    def within(self, part: Any) -> dict[str, Any]:
        """Makes a part of the schema stand alone: the definitions it refers to come along."""
        keys = ("$defs", "definitions")
        own = part if isinstance(part, dict) else {}
        return {key: self.schema[key] for key in keys if key in self.schema} | own
