"""Writes out what is merged with a schema that leads back to it, which the engine cannot follow.

    node: {properties: {next: {$ref: node, required: [id]}}}

The engine merges as it reads, and then `node` is not read yet. Named, and with a copy of `node` in
the place of the reference, what is merged refers to itself by nothing but its name.
"""

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from mlx_rq.engine.structured.references import (
    IN_PLACE,
    TooManySteps,
    circular,
    has_one_base,
    looked_at,
)
from mlx_rq.jobs.openai.schemas import ANNOTATIONS, Schema, subschemas, target

_MERGED = "mlx-rq-merged-"
"""How definitions begin that are merged schemas."""
_OF_DOCUMENTS = ("$defs", "$id", "$schema", "definitions", "id")
_MOST_COPIED = 10_000
"""Schemas in all copies; beyond, a schema is left as it is, and refused."""


def without_circles(root: dict[str, Any]) -> dict[str, Any]:
    """Gives a schema in which nothing is merged with what leads back to it; the same without such.

    Where that takes too many copies, or references have several bases, the schema as it is.
    """
    circles = circular(root)
    if not circles or not has_one_base(root):
        return root
    try:
        writing = _Writing(root, circles)
        return writing.done() if writing.wanted else root
    except (TooManySteps, RecursionError):
        return root


class _Writing:
    """Copies one document, with what is merged in circles named."""

    def __init__(self, root: dict[str, Any], circles: set[str]) -> None:
        self._root = root
        self._circles = circles
        self._names: dict[str, str] = {}
        self._named: dict[str, Any] = {}
        self._copied = 0
        led_to = cache(self._led_to)
        self.wanted = {
            json.dumps(node)
            for node in subschemas(root)
            if _merges(node) and any(id(node) in led_to(one) for one in self._merged(node))
        }

    def done(self) -> dict[str, Any]:
        copied = copy.deepcopy(self._root)
        self._name_within(copied)
        if self._copied > _MOST_COPIED:
            return self._root
        return {**copied, "$defs": {**copied.get("$defs", {}), **self._named}}

    def _led_to(self, reference: str) -> set[int]:
        """Finds the schemas that a reference leads to, by other references too."""
        todo, followed, found = [reference], {reference}, set()
        while todo:
            for node in looked_at(target(self._root, todo.pop())):
                found.add(id(node))
                inner = node.get("$ref")
                if isinstance(inner, str) and inner not in followed:
                    followed.add(inner)
                    todo.append(inner)
        return found

    def _merged(self, node: Any) -> Iterator[str]:
        """Yields the circular references that apply to the same value as a schema."""
        if isinstance(node, dict):
            if node.get("$ref") in self._circles:
                yield node["$ref"]
            for key in IN_PLACE:
                for one in node[key] if isinstance(node.get(key), list) else ():
                    yield from self._merged(one)

    def _name_within(self, schema: dict[str, Any]) -> None:
        """Puts names in the place of what is merged in circles, in this copy."""
        for node in subschemas(schema):
            self._copied += 1
            if self._copied > _MOST_COPIED:
                return
            if _merges(node) and (key := json.dumps(node)) in self.wanted:
                if key not in self._names:
                    name = self._names[key] = f"{_MERGED}{len(self._names)}"
                    self._named[name] = merged = copy.deepcopy(self._written_out(node, ()))
                    self._name_within(merged)
                node.clear()
                node["$ref"] = f"#/$defs/{self._names[key]}"

    def _written_out(self, node: Any, within: tuple[str, ...]) -> Any:
        """Puts the schema itself in the place of each circular reference that is merged."""
        if not isinstance(node, dict):
            return node
        written = {
            key: [self._written_out(one, within) for one in value]
            if key in IN_PLACE and isinstance(value, list)
            else value
            for key, value in node.items()
            if key not in _OF_DOCUMENTS
        }
        reference = written.get("$ref")
        if reference not in self._circles or reference in within:
            return written
        first = next(iter(written)) == "$ref"
        del written["$ref"]
        led_to = self._written_out(target(self._root, reference), (*within, reference))
        if not written.keys() - ANNOTATIONS:
            return led_to
        return {"allOf": [led_to, written] if first else [written, led_to]}


def _merges(node: Schema) -> bool:
    """Says whether several schemas apply to the value of this one as a whole."""
    said = node.keys() - ANNOTATIONS
    if len(said) != 1:
        return not said.isdisjoint(("$ref", *IN_PLACE))
    return "allOf" in said and isinstance(node["allOf"], list) and len(node["allOf"]) > 1
