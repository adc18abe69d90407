"""The numbers of a schema, as the constraint engine reads them."""

import math
from typing import Any

_LARGEST = 9.2e18
"""The engine counts integers in 64 bits."""
_EXACT = 2**53
_COUNTS = (
    *("maxContains", "maxItems", "maxLength", "maxProperties"),
    *("minContains", "minItems", "minLength", "minProperties"),
)
_MOST_COUNTED = 10**9
"""No answer is so long. The engine knows no counts beyond 32 bits; larger ones stand in schemas
that mean "as many as you like".
"""
_UPPER = ("exclusiveMaximum", "maximum")
_LOWER = ("exclusiveMinimum", "minimum")


def write_plainly(node: dict[str, Any]) -> None:
    """Writes numbers as the engine reads them: counts as integers, bounds as it can count them."""
    for key in _COUNTS:
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])
        if isinstance(node.get(key), int):
            node[key] = min(node[key], _MOST_COUNTED)
    for keys, way in ((_UPPER, -math.inf), (_LOWER, math.inf)):
        for key in keys:
            if isinstance(node.get(key), (int, float)) and not isinstance(node[key], bool):
                node[key] = _bound(node[key], way)


def _bound(value: float, inwards: float) -> float:
    """Gives the same bound, or where the engine would round it, the next one inwards."""
    outer = -math.copysign(_LARGEST, inwards)
    if abs(value) > _LARGEST and (value > 0) == (outer > 0):
        return outer
    if isinstance(value, int) and abs(value) > _EXACT:
        near = float(value)
        beyond = near > value if inwards < 0 else near < value
        return math.nextafter(near, inwards) if beyond else near
    return value
