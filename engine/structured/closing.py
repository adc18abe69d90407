"""Closes the objects of a strict schema: what does not say has no properties beside those named.

As OpenAI's strict mode has it, where a schema must say so itself. Closed is what an object comes to
once its schemas are merged: `allOf`, a `$ref` beside `properties`, branches that add some. Each
closed for itself, together they would allow nothing.
"""

from collections.abc import Sequence
from typing import Any

from mlx_rq.engine.structured.references import IN_PLACE, has_one_base, parts_of
from mlx_rq.jobs.openai.schemas import Schema, target

_OPEN = "mlx-rq-open-"
"""How definitions begin that are copies of others, without their closing, to be merged."""

_BOUND = {"patternProperties", "properties", "required"}
_OF_DOCUMENTS = ("$anchor", "$defs", "$id", "$schema", "definitions", "id")
_VALUES = ("additionalProperties", "contains", "items", "unevaluatedItems", "unevaluatedProperties")
_VALUE_LISTS = ("items", "prefixItems")
_VALUE_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_MERGED_MAPS = ("dependencies", "dependentSchemas")


def closed(schema: Schema) -> dict[str, Any]:
    """Copies a schema with all objects closed that do not say whether they are."""
    return _Closing(schema).done()


class _Closing:
    """Copies one schema. A place is where a schema stands for a whole value of its own."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._one_base = has_one_base(root)
        self._names: dict[str, str] = {}
        self._opened: dict[str, Any] = {}

    def done(self) -> dict[str, Any]:
        copied: dict[str, Any] = self._place(dict(self._root))
        if self._opened:
            copied["$defs"] = {**copied.get("$defs", {}), **self._opened}
        return copied

    def _place(self, node: Any) -> Any:
        """Copies what stands for a whole value, closed."""
        if not isinstance(node, dict):
            return node
        parts = list(parts_of(self._root, node))
        sure = list(parts_of(self._root, node, sure=True))
        if not any(map(_lists, parts)):
            return self._copied(node, self._place)
        if any(map(_says, sure)):
            return self._open(node)
        if not any(map(_lists, parts[1:])):
            return self._shut(self._open(node), parts)
        if not self._one_base:
            return self._open(node)  # one cannot tell where references lead
        merges = [key for key in ("$ref", *IN_PLACE) if key in node]
        if not _BOUND & node.keys() and len(merges) == 1 and len(node.get("allOf", "-")) == 1:
            return self._copied(node, self._place)  # nothing is merged: each closes for itself
        choices = [(part, key) for part in sure for key in ("anyOf", "oneOf") if key in part]
        if len(choices) == 1 and choices[0][0] is node:
            return self._branches(node, choices[0][1], sure)
        copied: dict[str, Any] = self._open(node)
        return copied if any(map(_says, parts)) else self._shut(copied, parts)

    def _branches(self, node: Schema, key: str, sure: Sequence[Schema]) -> dict[str, Any]:
        """Copies what branches once, with each branch closed as it is merged."""
        copied: dict[str, Any] = self._open(node)
        for index, branch in enumerate(node[key]):
            parts = list(parts_of(self._root, branch))
            if isinstance(branch, dict) and not any(map(_says, parts)):
                self._shut(copied[key][index], [*parts, *sure])
        return copied

    def _open(self, node: Any) -> Any:
        """Copies what is merged with others: not closed itself, but the values within are."""
        if not isinstance(node, dict):
            return node
        copied = self._copied(node, self._open)
        if "$ref" in node and self._one_base:
            copied["$ref"] = self._reference(node["$ref"])
        return copied

    def _reference(self, reference: Any) -> Any:
        """Gives a reference to an open copy of what a reference leads to."""
        found = target(self._root, reference)
        if not isinstance(found, dict) or not any(map(_lists, parts_of(self._root, found))):
            return reference
        if reference not in self._names:
            name = self._names[reference] = f"{_OPEN}{len(self._names)}"
            bare = {key: value for key, value in found.items() if key not in _OF_DOCUMENTS}
            self._opened[name] = self._open(bare)
        return f"#/$defs/{self._names[reference]}"

    def _shut(self, node: dict[str, Any], parts: Sequence[Schema]) -> dict[str, Any]:
        """Closes a copy but for what its parts name."""
        names: dict[str, Any] = {}
        patterns: dict[str, Any] = {}
        for part in parts:
            names |= dict.fromkeys(_names(part), True)
            required = part.get("required")
            names |= dict.fromkeys(required if isinstance(required, list) else (), True)
            if isinstance(part.get("patternProperties"), dict):
                patterns |= dict.fromkeys(part["patternProperties"], True)
        own = _names(node)
        node["properties"] = {**own, **{n: True for n in names if n not in own}}
        if patterns:
            node["patternProperties"] = patterns | node.get("patternProperties", {})
        node["additionalProperties"] = False
        return node

    def _copied(self, node: dict[str, Any], merged: Any) -> dict[str, Any]:
        """Copies a schema: the values within as places, what applies to the same value `merged`.

        `not`, `if` and the values of `const`, `enum` and `default` stay as they are.
        """
        copied = dict(node)
        for key, value in node.items():
            if key in IN_PLACE and isinstance(value, list):
                copied[key] = [merged(one) for one in value]
            elif key in ("then", "else"):
                copied[key] = self._open(value)
            elif key in _MERGED_MAPS and isinstance(value, dict):
                copied[key] = {name: self._open(one) for name, one in value.items()}
            elif key in _VALUE_LISTS and isinstance(value, list):
                copied[key] = [self._place(one) for one in value]
            elif key in _VALUES:
                copied[key] = self._place(value)
            elif key in _VALUE_MAPS and isinstance(value, dict):
                copied[key] = {name: self._place(one) for name, one in value.items()}
        return copied


def _names(node: Schema) -> dict[str, Any]:
    properties = node.get("properties")
    return properties if isinstance(properties, dict) else {}


def _lists(node: Schema) -> bool:
    """Says whether a schema lists properties, and be it none."""
    return isinstance(node.get("properties"), dict)


def _says(node: Schema) -> bool:
    """Says whether a schema mentions what other properties there may be."""
    return "additionalProperties" in node or "unevaluatedProperties" in node
