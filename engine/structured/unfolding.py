"""Foresees how many schemas the constraint engine makes of one, which it does without a bound.

It writes out each alternative that a value has: of an `allOf` of `anyOf`s all combinations, each
with a copy of what is within, whose alternatives are written out again. Its memory would end first.
"""

from collections.abc import Iterable
from typing import Any

from mlx_rq.jobs.openai.schemas import ANNOTATIONS, Schema, target

MOST_UNFOLDED = 400_000
"""Of what the engine can compile after all, the most that was seen in 5,000 real schemas. It takes
some microseconds and up to a kilobyte for each.
"""

_Alternatives = dict[str, tuple[int, int]]
"""By type: the alternatives for a value of it, and how many schemas those are with all in them."""

_ONE_EACH: _Alternatives = dict.fromkeys(
    ("null", "boolean", "number", "string", "array", "object"), (1, 1)
)
_MAPS = ("patternProperties", "properties")
_VALUES = ("additionalProperties", "items", "prefixItems")


def unfolded(schema: Schema | None) -> int:
    """Counts the schemas that the engine would make of a schema, about."""
    if schema is None:
        return 0
    unfolding = _Unfolding(schema)
    named = [schema.get(key) for key in ("$defs", "definitions")]
    try:
        return unfolding.size(schema) + sum(
            unfolding.size(one) for of in named if isinstance(of, dict) for one in of.values()
        )
    except RecursionError:  # schemas that refer to one another in a long row, to be merged
        return MOST_UNFOLDED + 1


class _Unfolding:
    """Counts in one document; each schema once, however often it is referred to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[int, _Alternatives] = {}

    def size(self, schema: Any) -> int:
        return sum(size for _, size in self._alternatives(schema).values())

    def _alternatives(self, schema: Any) -> _Alternatives:
        if not isinstance(schema, dict):
            return {} if schema is False else _ONE_EACH
        if id(schema) not in self._known:
            self._known[id(schema)] = _ONE_EACH  # for what leads back to it
            self._known[id(schema)] = self._counted(schema)
        return self._known[id(schema)]

    def _counted(self, schema: Schema) -> _Alternatives:
        counted = self._own(schema)
        for part in _listed(schema, "allOf"):
            counted = _both(counted, self._alternatives(part))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                counted = _both(counted, _any(map(self._alternatives, _listed(schema, key))))
        if "enum" in schema:
            counted = _both(counted, _any(map(_value, _listed(schema, "enum"))))
        if "const" in schema:
            counted = _both(counted, _value(schema["const"]))
        if "$ref" in schema and schema.keys() - ANNOTATIONS != {"$ref"}:  # else only referred to
            counted = _both(counted, self._alternatives(target(self._root, schema["$ref"])))
        return counted

    def _own(self, schema: Schema) -> _Alternatives:
        """Counts what a schema says by itself."""
        within = {"array": 1, "object": 1}
        for key in (*_MAPS, *_VALUES):
            inner = schema.get(key)
            if isinstance(inner, dict):
                of = "array" if key == "items" else "object"
                inner = inner.values() if key in _MAPS else [inner]
                within[of] += sum(map(self.size, inner))
            elif isinstance(inner, list):
                within["array"] += sum(map(self.size, inner))
        kinds = schema.get("type", list(_ONE_EACH))
        kinds = ["number" if kind == "integer" else kind for kind in _as_list(kinds)]
        return {kind: (1, within.get(kind, 1)) for kind in _ONE_EACH if kind in kinds}


def _both(one: _Alternatives, other: _Alternatives) -> _Alternatives:
    """Counts the combinations of alternatives, each with all that is in both."""
    return {
        kind: (count * other[kind][0], size * other[kind][0] + other[kind][1] * count)
        for kind, (count, size) in one.items()
        if kind in other
    }


def _any(several: Iterable[_Alternatives]) -> _Alternatives:
    together: _Alternatives = {}
    for alternatives in several:
        for kind, (count, size) in alternatives.items():
            counted, sizes = together.get(kind, (0, 0))
            together[kind] = counted + count, sizes + size
    return together


def _value(value: Any) -> _Alternatives:
    """Counts a value as the schema that only it fits."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        size = 1 + sum(size for one in inner for _, size in _value(one).values())
        return {"object" if isinstance(value, dict) else "array": (1, size)}
    kinds = {bool: "boolean", str: "string", type(None): "null"}
    return {kinds.get(type(value), "number"): (1, 1)}


def _listed(schema: Schema, key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
