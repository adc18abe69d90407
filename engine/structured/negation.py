"""Reasons about schemas: what no value of one fits, and whether a value can fit two of them.

Only what is certain is said; all else is None, or False. The constraint engine knows no negation:
a schema that says the opposite in other keywords is what it can enforce.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from mlx_rq.engine.structured.references import circular, parts_of
from mlx_rq.jobs.openai.schemas import ANNOTATIONS, Schema, target

_KINDS = ("null", "boolean", "number", "string", "array", "object")
_DEEPEST = 12
_MOST_STEPS = 400
_MOST_IN_ALL = 20_000
"""Schemas within each other, looked at for one question, and for all; then nothing is certain."""

MOST_BRANCHES = 24
"""Branches of a negation, after which it is too much: each multiplies what it is merged with."""


class Document:
    """A schema as a whole, where references lead to, and how much may still be asked about it."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._steps = 0
        self._in_all = 0
        self._circular: set[str] | None = None

    def step(self, deep: int) -> bool:
        """Says whether one more schema may be looked at; branches of branches have no end."""
        self._steps = self._steps + 1 if deep else 0
        self._in_all += 1
        return deep <= _DEEPEST and self._steps < _MOST_STEPS and self._in_all < _MOST_IN_ALL

    @property
    def circles(self) -> set[str]:
        """The references that lead back to themselves."""
        if self._circular is None:
            self._circular = circular(self.root)
        return self._circular

    def comes_back(self, reference: Any) -> bool:
        """Says whether what a reference leads to leads back to it: that is never written out."""
        return isinstance(reference, str) and reference in self.circles


def negated(root: Document, schema: Any, deep: int = 0) -> Any:
    """Writes the schema that fits exactly what this one does not fit; None where it cannot."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or not root.step(deep):
        return None
    branches = []
    for keyword in schema.keys() - ANNOTATIONS:
        if keyword not in _NEGATED:
            return None
        branch = _NEGATED[keyword](root, schema[keyword], deep + 1)
        if branch is None:
            return None
        branches.append(branch)
    return _any(branches)


def _any(branches: list[Any]) -> Any:
    """Writes that one of these schemas fits; None where one of them, or all together, are none."""
    if any(branch is None for branch in branches):
        return None
    wanted = [branch for branch in branches if branch is not False]
    if any(branch is True for branch in wanted):
        return True
    flat = [
        one
        for branch in wanted
        for one in (branch["anyOf"] if [*branch] == ["anyOf"] else [branch])
    ]
    if len(flat) > MOST_BRANCHES:
        return None
    return {"anyOf": flat} if len(flat) > 1 else flat[0] if flat else False


def _all(schemas: list[Any]) -> Any:
    if any(schema is None for schema in schemas):
        return None
    if any(schema is False for schema in schemas):
        return False
    wanted = [schema for schema in schemas if schema is not True]
    return {"allOf": wanted} if len(wanted) > 1 else wanted[0] if wanted else True


def _not_type(root: Document, kinds: Any, deep: int) -> Any:
    listed = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(listed, list) or ("integer" in listed and "number" not in listed):
        return None  # that a number is no integer cannot be said
    others = [kind for kind in _KINDS if kind not in listed]
    return {"type": others} if others else False


def _not_values(root: Document, values: Any, deep: int) -> Any:
    """Writes that a value is none of these, which are no arrays and no objects."""
    if not isinstance(values, list) or any(isinstance(value, (list, dict)) for value in values):
        return None
    texts = [value for value in values if isinstance(value, str)]
    truths = [value for value in values if isinstance(value, bool)]
    numbers = sorted({v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)})
    others = ["array", "object"] + ([] if None in values else ["null"])
    branches: list[Any] = []
    if len(truths) == 1:
        branches.append({"const": not truths[0]})
    elif not truths:
        others.append("boolean")
    if texts:
        pattern = other_than(texts)
        branches.append(None if pattern is None else {"type": "string", "pattern": pattern})
    else:
        others.append("string")
    if numbers:
        for low, high in pairwise([None, *numbers, None]):
            between: dict[str, Any] = {"type": "number"}
            between |= {} if low is None else {"exclusiveMinimum": low}
            between |= {} if high is None else {"exclusiveMaximum": high}
            branches.append(between)
    else:
        others.append("number")
    return _any([{"type": others}, *branches])


def other_than(texts: list[str]) -> str | None:
    """Writes a pattern for every text but these; None where their characters need escapes."""
    if any(not char.isalnum() and char not in " _-.:/" for text in texts for char in text):
        return None
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_other(tree)}$"


def _other(tree: dict[str, Any]) -> str:
    chars = [char for char in tree if char]
    escaped = "".join(f"\\{char}" if char in "-./" else char for char in chars)
    ways = [rf"[^{escaped}][\s\S]*" if chars else r"[\s\S]+"]
    ways += [(f"\\{char}" if char in "./" else char) + _other(tree[char]) for char in chars]
    way = f"(?:{'|'.join(ways)})"
    return way if "" in tree else f"{way}?"


def _not_required(root: Document, names: Any, deep: int) -> Any:
    if not isinstance(names, list):
        return None
    return _any([{"type": "object", "properties": {name: False}} for name in names])


def _not_properties(root: Document, properties: Any, deep: int) -> Any:
    if not isinstance(properties, dict):
        return None
    branches = []
    for name, schema in properties.items():
        other = negated(root, schema, deep)
        branch = {"type": "object", "properties": {name: other}, "required": [name]}
        branches.append(other if other is None or other is False else branch)
    return _any(branches)


def _bound(kind: str, keyword: str, by: int = 0, least: int | None = None) -> Callable[..., Any]:
    """Negates a bound by the opposite one; nothing is below the `least` there is."""

    def bound(root: Document, value: Any, deep: int) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if least is not None and value + by < least:
            return False
        return {"type": kind, keyword: value + by}

    return bound


_NEGATED: dict[str, Callable[[Document, Any, int], Any]] = {
    "$ref": lambda root, ref, deep: (
        None if root.comes_back(ref) else negated(root, target(root.root, ref), deep)
    ),
    "allOf": lambda root, schemas, deep: _any([negated(root, one, deep) for one in schemas]),
    "anyOf": lambda root, schemas, deep: _all([negated(root, one, deep) for one in schemas]),
    "not": lambda root, schema, deep: copy.deepcopy(schema),
    "type": _not_type,
    "const": lambda root, value, deep: _not_values(root, [value], deep),
    "enum": _not_values,
    "required": _not_required,
    "properties": _not_properties,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1, 0),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1, 0),
    "maxItems": _bound("array", "minItems", 1),
}


def disjoint(root: Document, one: Any, other: Any, deep: int = 0) -> bool:
    """Says whether it is certain that no value fits both schemas."""
    if one is False or other is False:
        return True
    if not root.step(deep):
        return False
    ones, others = (list(parts_of(root.root, schema, sure=True)) for schema in (one, other))
    if any(_apart(a, b) for a in ones for b in others):
        return True
    for parts, against in ((ones, other), (others, one)):
        for part in parts:
            for branches in (part.get("anyOf"), part.get("oneOf")):
                rest = {"allOf": against}
                if branches and all(disjoint(root, one, rest, deep + 1) for one in branches):
                    return True
    names = {name for part in (*ones, *others) for name in part.get("required", ())}
    return _may_be([*ones, *others]) == {"object"} and any(
        disjoint(root, a, b, deep + 1)
        for name in names
        for a in _schemas_at(ones, name)
        for b in _schemas_at(others, name)
    )


def _apart(one: Schema, other: Schema) -> bool:
    """Says whether two schemas, without those in them, have no value in common."""
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(_same(a, b) for a in values for b in others)
    if not _kinds(one) & _kinds(other):
        return True
    ends = ("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")
    return any(
        low.get(least, float("-inf")) > high.get(most, float("inf"))
        for low, high in ((one, other), (other, one))
        for (least, most), kind in zip(ends, ("number", "string", "array"), strict=True)
        if _kinds(one) & _kinds(other) == {kind}
    )


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _kinds(schema: Schema) -> set[str]:
    """Lists the types that values of a schema may have; an integer is a number here."""
    values = _values(schema)
    if values is not None:
        return {_kind(value) for value in values}
    listed = schema.get("type", _KINDS)
    listed = [listed] if isinstance(listed, str) else listed
    return {"number" if kind == "integer" else kind for kind in listed}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", list: "array", dict: "object"}
    return next((name for of, name in names.items() if isinstance(value, of)), "number")


def _may_be(parts: list[dict[str, Any]]) -> set[str]:
    """Lists the types that a value of all these parts may have."""
    kinds = set(_KINDS)
    for part in parts:
        kinds &= _kinds(part)
    return kinds


def _schemas_at(parts: list[dict[str, Any]], name: str) -> Iterator[Any]:
    """Yields the schemas that a property of a value of all these parts must fit."""
    for part in parts:
        properties = part.get("properties", {})
        if name in properties:
            yield properties[name]
        elif "additionalProperties" in part and "patternProperties" not in part:
            yield part["additionalProperties"]
