"""What JSON schemas are refused at every `submit()`: by caps, and for what can only be a mistake.

The caps keep out what would take the worker's constraint engine seconds or hundreds of megabytes:
its own limits do not reach large `multipleOf` (whose automaton has that many states), and an
object's optional properties cost the square of their number at every token. All else is left to the
engine, which says at the worker what it cannot do.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

MAX_SCHEMA_BYTES = 256 * 1024
MAX_NESTING = 120
"""Levels of JSON, about two for each level of objects. The engine's own reader ends at 128."""
MAX_ENUM_VALUES = 10_000
MAX_PROPERTIES = 5_000
MAX_OPTIONAL_PROPERTIES = 1_000
MAX_MULTIPLE = 10_000
MAX_MULTIPLES = 100_000
"""Of all multiples in a schema together: each has an automaton of its own."""
_TOO_DEEP = f"it is nested more than {MAX_NESTING} levels deep."
_EXACT = 2**53
"""Beyond it, the engine rounds what is a `const`, or in an `enum`, to what a 64-bit float holds."""
_LARGEST = 2**63
_ENDLESS = 10**30
"""Larger numbers are not told apart: none of them is near the cap."""

Schema = Mapping[str, Any]

_SCHEMA_KEYWORDS = (
    *("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED_KEYWORDS = (
    *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"),
    "properties",
)


ANNOTATIONS = {
    *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
    *("description", "examples", "id", "readOnly", "title", "writeOnly"),
}
"""Keywords that say nothing of a value."""


def said_of(schema: Any) -> str:
    """Writes what a schema says of a value: the same of schemas that differ in annotations only."""
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    return json.dumps(schema, sort_keys=True)


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and every schema within it, outer before inner; values are not looked into.

    The caller may change what was yielded before it asks for the next.
    """
    todo = [schema]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        yield node
        todo += (node[key] for key in _SCHEMA_KEYWORDS if key in node)
        for key in _LIST_KEYWORDS:
            if isinstance(node.get(key), list):
                todo += node[key]
        for key in _NAMED_KEYWORDS:
            if isinstance(node.get(key), dict):
                todo += node[key].values()


def target(root: Schema, reference: Any) -> Any:
    """Finds the schema that a reference leads to; None where it is none within the document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    pointer = unquote(reference[1:])
    if not pointer:
        return root
    if not pointer.startswith("/"):
        return None
    for step in pointer[1:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node if isinstance(node, (dict, bool)) else None


def schemas_in(root: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and every schema within it, and what references lead to in other places."""
    todo: list[Any] = [root]
    seen: set[int] = set()
    while todo:
        place = todo.pop()
        for node in subschemas(place) if id(place) not in seen else ():
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                if "$ref" in node:
                    todo.append(target(root, node["$ref"]))


def why_refused(schema: Any) -> str | None:
    """Says why a schema is refused, as the end of an error message; None where it is not."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
        if size > MAX_SCHEMA_BYTES:
            return f"it has {size:,} bytes; the limit is {MAX_SCHEMA_BYTES:,}."
        return _why_refused(text)
    except RecursionError:
        return _TOO_DEEP
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, which is no text."
    except (TypeError, ValueError) as error:  # an object of Python's, or an endless integer
        return f"it is not JSON: {error}."


@lru_cache(maxsize=32)
def _why_refused(text: str) -> str | None:
    """Says why a schema's JSON is refused, but for its size.

    The lines of a batch mostly have one schema: that is looked through once.
    """
    schema = json.loads(text)
    if _nesting(schema) > MAX_NESTING:
        return _TOO_DEEP
    enums = properties = 0
    multiples: set[int] = set()
    for node in schemas_in(schema):
        named = node.get("properties")
        if isinstance(named, dict):
            properties += len(named)
            required = node.get("required")
            optional = len(named) - (len(required) if isinstance(required, list) else 0)
            if optional > MAX_OPTIONAL_PROPERTIES:
                return (
                    f"an object has {optional:,} optional properties; "
                    f"the limit is {MAX_OPTIONAL_PROPERTIES:,}."
                )
        if _has_only_twins(node.get("oneOf")):
            return (
                "no value can satisfy a 'oneOf' whose alternatives all come twice: what fits one "
                "of them fits another. Use 'anyOf'."
            )
        if (number := _rounded([node.get("const"), node.get("enum")])) is not None:
            return (
                f"the number {number} is one of its values, and would be rounded: integers are "
                "exact up to 2**53. Let it be a string."
            )
        enums += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        multiples.add(_states(node.get("multipleOf")))
    if enums > MAX_ENUM_VALUES:
        return f"it has {enums:,} enum values; the limit is {MAX_ENUM_VALUES:,}."
    if properties > MAX_PROPERTIES:
        return f"it has {properties:,} properties; the limit is {MAX_PROPERTIES:,}."
    together = _together(multiples, merged=_merges(schema))
    if together > MAX_MULTIPLE:
        told = f"{together:,}" if together < _ENDLESS else "an endless number"
        return f"'multipleOf' comes to {told}; the limit is {MAX_MULTIPLE:,}."
    multiples.discard(1)  # of schemas without one
    if sum(multiples) > MAX_MULTIPLES:
        return (
            f"its different 'multipleOf' come to {sum(multiples):,} together; "
            f"the limit is {MAX_MULTIPLES:,}."
        )
    return None


def _has_only_twins(alternatives: Any) -> bool:
    """Says whether each of some alternatives is there twice, whatever its description says."""
    if not isinstance(alternatives, list) or len(alternatives) < 2:
        return False
    return min(Counter(map(said_of, alternatives)).values()) > 1


def _rounded(values: list[Any]) -> float | None:
    """Finds a number in values, and what they hold, that the engine cannot write as it is.

    The smallest integer of 64 bits ends the program: the engine overflows its stack.
    """
    todo = values
    while todo:
        value = todo.pop()
        if isinstance(value, (dict, list)):
            todo += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and not _keeps(value):
            return value
    return None


def _keeps(number: float) -> bool:
    return abs(number) <= _EXACT or (abs(number) < _LARGEST and int(float(number)) == number)


def _together(multiples: Set[int], *, merged: bool) -> int:
    """Gives the most states that an automaton needs; where that is too many, some such number.

    Where schemas are merged, a number must be a multiple of the least common multiple.
    """
    if not merged:
        return max(multiples, default=1)
    together = 1
    for multiple in multiples:
        together = math.lcm(together, multiple)
        if together > MAX_MULTIPLE:  # all of them together may have a million digits
            break
    return together


def _nesting(value: Any) -> int:
    """Measures how deep JSON is nested, level by level: recursion could overflow on hostile input.

    Deeper than the cap is not looked.
    """
    level, depth = [value], 0
    while level and depth <= MAX_NESTING:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _states(multiple: Any) -> int:
    """Counts the states of the automaton for a `multipleOf`: its digits, read as an integer."""
    if not isinstance(multiple, (int, float)) or isinstance(multiple, bool) or multiple <= 0:
        return 1
    if isinstance(multiple, int):
        return min(multiple, _ENDLESS)
    if not math.isfinite(multiple):
        return _ENDLESS
    number = Decimal(str(multiple))
    exponent = number.normalize().as_tuple().exponent
    scaled = number.scaleb(-min(0, exponent)) if isinstance(exponent, int) else number
    return min(max(1, int(scaled)), _ENDLESS)


def _merges(schema: Any) -> bool:
    return any("allOf" in node or "$ref" in node for node in schemas_in(schema))
