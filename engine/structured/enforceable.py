"""Rewrites schemas into keywords that the constraint engine enforces, which mean the same.

What cannot be said otherwise stays as it is, for the engine to refuse, or to pass over where the
schema is not strict. Some things are left to the check at the end even where it is, and told: that
only one of several alternatives fits, that many items differ, a `not` of what has no opposite.
"""

import copy
import functools
import itertools
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mlx_rq.engine.structured import bounded, formats
from mlx_rq.engine.structured.alternatives import both, excluding_each_other
from mlx_rq.engine.structured.circles import without_circles
from mlx_rq.engine.structured.closing import closed
from mlx_rq.engine.structured.drafts import OLD, draft_of, name_of
from mlx_rq.engine.structured.lookarounds import plain_patterns, with_plain_classes
from mlx_rq.engine.structured.negation import Document, negated, other_than
from mlx_rq.engine.structured.numbers import write_plainly
from mlx_rq.engine.structured.places import gathered
from mlx_rq.engine.structured.property_names import (
    are_counts,
    fits_all_names,
    without_overlaps,
    without_property_counts,
    without_property_names,
)
from mlx_rq.engine.structured.references import at_most_steps
from mlx_rq.jobs.openai.schemas import Schema, subschemas, target

_PLAIN = re.compile(r"[A-Za-z0-9_ -]+")
_MOST_STEPS = 500_000
"""About a second; no schema that was seen in use took more than 30,000."""
_MOST_UNIQUE = 4
"""Values of an enum of which all arrangements are written out."""
_MOST_DEPENDENCIES = 6


def enforceable(schema: Schema, *, close: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Rewrites a schema, its objects closed or not; and says what is only checked at the end.

    Raises TooManySteps or RecursionError where that is too much.
    """
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return dict(schema), []  # refused elsewhere
    return _rewritten(text, close)


@lru_cache(maxsize=32)  # of up to some megabytes each
def _rewritten(text: str, close: bool) -> tuple[dict[str, Any], list[str]]:
    root = json.loads(text)
    with at_most_steps(_MOST_STEPS):
        root = gathered(root)
        root = closed(root) if close else root
        rewriting = _Rewriting(root)
        copied = copy.deepcopy(root)
        if "$schema" in copied:  # the engine takes one that it does not know for a document
            copied["$schema"] = name_of(draft_of(root))
        for node in subschemas(copied):
            rewriting.rewrite(node)
        copied = without_circles(copied)
    return copied, list(dict.fromkeys(rewriting.notes))


class _Rewriting:
    """Rewrites the schemas in one document, each in place; references lead to the original."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._document = Document(root)
        draft = draft_of(root)
        self._old = draft in OLD
        self._formats = bounded.formats(draft).checkers
        self.notes: list[str] = []

    def rewrite(self, node: dict[str, Any]) -> None:
        if self._old and "$ref" in node:  # which stood alone in them
            for key in node.keys() - {"$ref", "definitions", "$defs", "$schema", "id", "$id"}:
                del node[key]
        if "if" not in node:  # without which they say nothing
            node.pop("then", None)
            node.pop("else", None)
        write_plainly(node)
        for keyword, step in _STEPS.items():
            if keyword in node:
                step(self, node)

    def _pattern(self, node: dict[str, Any]) -> None:
        if not isinstance(node["pattern"], str):
            return
        plain = with_plain_classes(node["pattern"])
        (*others, node["pattern"]), whole = plain_patterns(plain)
        for pattern in others:
            _add(node, None, {"pattern": pattern})
        if not whole:
            self.notes.append("what a 'pattern' looks ahead or back to")

    def _not(self, node: dict[str, Any]) -> None:
        other = negated(self._document, node["not"])
        if other is None:
            del node["not"]
            self.notes.append("what a 'not' excludes")
        else:
            _add(node, "not", other)

    def _if(self, node: dict[str, Any]) -> None:
        condition = node["if"]
        otherwise = negated(self._document, condition)
        then, other = node.pop("then", True), node.pop("else", True)
        if (
            otherwise is None
        ):  # of what does not fit the condition, it is only known what it must be
            otherwise = True
            self.notes.append("what is to fit under a condition ('if')")
        branches = [both(condition, then), both(otherwise, other)]
        any_of = {"anyOf": [branch for branch in branches if branch is not False]}
        _add(node, "if", True if True in branches else any_of)

    def _dependencies(self, node: dict[str, Any]) -> None:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            wanted = node.get(keyword)
            if not isinstance(wanted, dict):
                continue
            del node[keyword]
            for name, needed in list(wanted.items())[:_MOST_DEPENDENCIES]:
                names = [needed] if isinstance(needed, str) else needed
                names = [name, *(names if isinstance(names, list) else ())]
                # Listed too, and so in this order where the object lists none of them.
                with_it: Any = {"properties": dict.fromkeys(names, True), "required": names}
                if isinstance(needed, (dict, bool)):
                    with_it = both(with_it, needed)
                without = {"properties": {name: False}}
                _add(node, None, {"anyOf": [without, *([with_it] if with_it else ())]})
            if len(wanted) > _MOST_DEPENDENCIES:
                self.notes.append(f"what {len(wanted)} properties need beside them ('{keyword}')")

    def _one_of(self, node: dict[str, Any]) -> None:
        branches = node["oneOf"]
        if not isinstance(branches, list) or not branches:
            return
        base = {"type": node["type"]} if "type" in node else {}
        exclusive, whole = excluding_each_other(self._document, branches, base)
        if not whole:
            self.notes.append("that no more than one alternative of a 'oneOf' fits")
        _add(node, "oneOf", {"anyOf": exclusive} if exclusive else False)

    def _unique(self, node: dict[str, Any]) -> None:
        if node["uniqueItems"] is not True:
            del node["uniqueItems"]
            return
        items, most = node.get("items"), node.get("maxItems")
        if most in (0, 1) or _kinds(node) <= {
            "null",
            "boolean",
            "number",
            "integer",
            "string",
            "object",
        }:
            del node["uniqueItems"]
            return
        while isinstance(items, dict) and items.keys() == {"$ref"}:
            items = target(self._root, items["$ref"])
        values: list[Any] = (items.get("enum") if isinstance(items, dict) else None) or []
        few = values and len(values) <= _MOST_UNIQUE and not _repeated(values)
        if few and "prefixItems" not in node and most is None:
            del node["uniqueItems"], node["items"]
            counts = range(node.pop("minItems", 0), len(values) + 1)
            arranged = [
                {
                    "prefixItems": [both({"const": value}, items) for value in row],
                    "items": False,
                    "minItems": count,
                }
                for count in counts
                for row in itertools.permutations(values, count)
            ]
            _add(node, None, {"anyOf": arranged})
            return
        del node["uniqueItems"]
        self.notes.append("that the items of an array differ ('uniqueItems')")

    def _counts(self, node: dict[str, Any]) -> None:
        others = without_property_counts(node)
        if others is None:
            self.notes.append("how many properties an object has")
        elif others:
            _add(node, None, {"anyOf": others})

    def _format(self, node: dict[str, Any]) -> None:
        name = (
            formats.SAME.get(node["format"], node["format"])
            if isinstance(node["format"], str)
            else ""
        )
        if name in formats.PATTERNS:
            del node["format"]
            pattern = {"pattern": formats.PATTERNS[name]}
            if "pattern" in node:
                _add(node, None, pattern)
            else:
                node.update(pattern)
        elif name in formats.OF_THE_ENGINE:
            node["format"] = name
        else:
            del node["format"]
            unknown = "" if name in self._formats else ", which nothing checks"
            self.notes.append(f"the format '{name}'{unknown}")

    def _names(self, node: dict[str, Any]) -> None:
        if not without_property_names(self._root, node):
            self.notes.append("what the names of properties are ('propertyNames')")

    def _patterns(self, node: dict[str, Any]) -> None:
        """Writes patterns that have no name in common, as the engine demands it."""
        patterns = node["patternProperties"]
        if not isinstance(patterns, dict):
            return
        node["patternProperties"] = {with_plain_classes(one): patterns[one] for one in patterns}
        if self._document.circles:
            self._patterns_in_circles(node)
        elif for_all := [one for one in node["patternProperties"] if fits_all_names(one)]:
            everywhere = [node["patternProperties"].pop(pattern) for pattern in for_all]
            node["additionalProperties"] = functools.reduce(both, everywhere)
            for key in ("patternProperties", "properties"):
                for name, schema in node.get(key, {}).items():
                    node[key][name] = both(schema, node["additionalProperties"])
        if not without_overlaps(node["patternProperties"]):
            self.notes.append("which of several 'patternProperties' a property's name fits")

    def _patterns_in_circles(self, node: dict[str, Any]) -> None:
        """Takes listed properties out of a pattern for all: merged in circles, nothing would go."""
        named, patterns = node.get("properties"), node["patternProperties"]
        if not named:
            return
        for pattern in filter(fits_all_names, list(patterns)):
            others = other_than(list(named))
            if others is not None and others not in patterns:
                for_all = patterns.pop(pattern)
                patterns[others] = for_all
                if any(schema != for_all for schema in named.values()):
                    self.notes.append("what listed properties have to be by a 'patternProperties'")

    def _contains(self, node: dict[str, Any]) -> None:
        least, most = node.get("minContains", 1), node.get("maxContains")
        if not are_counts(least, most or 0, node.get("minItems", 0)):
            return
        for key in ("contains", "minContains", "maxContains"):
            node.pop(key, None)
        if least or most is not None:
            node["minItems"] = max(node.get("minItems", 0), least)
            self.notes.append("what an array contains ('contains')")


def _repeated(values: list[Any]) -> bool:
    return any(one == other for one, other in itertools.combinations(values, 2))


def _kinds(node: Schema) -> set[str]:
    kinds = node.get("type", "array")
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _add(node: dict[str, Any], keyword: str | None, schema: Any) -> None:
    """Puts a schema in the place of a keyword, where there is one.

    At the end, so that the keys of objects come in the order in which the schema lists them.
    """
    if keyword is not None:
        del node[keyword]
    if schema is not True:
        if isinstance(schema, dict) and schema.keys() == {"anyOf"} and "anyOf" not in node:
            node.update(schema)
        else:
            several = node.pop("allOf", [])
            node["allOf"] = [*several, schema]


_STEPS: dict[str, Callable[[_Rewriting, dict[str, Any]], None]] = {
    "pattern": _Rewriting._pattern,
    "not": _Rewriting._not,
    "if": _Rewriting._if,
    "dependencies": _Rewriting._dependencies,
    "dependentRequired": _Rewriting._dependencies,
    "dependentSchemas": _Rewriting._dependencies,
    "oneOf": _Rewriting._one_of,
    "uniqueItems": _Rewriting._unique,
    "format": _Rewriting._format,
    "propertyNames": _Rewriting._names,
    "patternProperties": _Rewriting._patterns,
    "minProperties": _Rewriting._counts,
    "maxProperties": _Rewriting._counts,
    "contains": _Rewriting._contains,
}
