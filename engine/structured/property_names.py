"""Writes what a schema says of the names and the number of properties in what is enforced."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher

from mlx_rq.engine.structured import formats
from mlx_rq.engine.structured.negation import MOST_BRANCHES
from mlx_rq.engine.structured.patterns import NO_PATTERN, compiled
from mlx_rq.jobs.openai.schemas import Schema, target

_ANY_NAME = {"^.*$", "^.+$", ".+"}
_ENDS_OR_LOOKS = re.compile(r"\$|\\[bBzZ]|\(\?[=!<]")
_LENGTHS = {"minLength", "maxLength"}
_MOST_COMPARED = 6
"""Patterns of which each is compared with each: that takes up to some milliseconds for two."""
_NOT_DISJOINT = re.compile("(can't determine if )?patternProperty regexes .* disjoint", re.DOTALL)
"""What the engine says of patterns that fit the same name, or of which it cannot tell."""


def without_property_names(root: Schema, node: dict[str, Any]) -> bool:
    """Takes `propertyNames` out of a schema; says whether other keywords now say all of it."""
    names = node.pop("propertyNames")
    while isinstance(names, dict) and names.keys() == {"$ref"}:
        names = target(root, names["$ref"])
    pattern, whole = _pattern_of(names)
    rest = node.get("additionalProperties", True)
    patterns = node.get("patternProperties", {})
    if len(patterns) == 1 and all(map(fits_all_names, patterns)) and not node.get("properties"):
        (rest,), patterns = patterns.values(), {}
    if pattern is None or patterns or (node.get("properties") and rest is not False):
        return False
    named = node.get("properties", {})
    try:
        unfit = [name for name in named if not compiled(pattern).search(name, timeout=0.1)]
    except (*NO_PATTERN, TimeoutError):
        return False
    named |= dict.fromkeys(unfit, False)
    if rest is not False:
        node["patternProperties"] = {pattern: rest}
        node["additionalProperties"] = False
    return whole


def without_property_counts(node: dict[str, Any]) -> list[Schema] | None:
    """Takes `minProperties` and `maxProperties` out of a schema where not all are required.

    Those the engine does not count. Returns alternatives that say the same, none where it need not
    be said; or None where it cannot be, or not for sure.
    """
    named, listed = node.get("properties", {}), node.get("required", [])
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    known = isinstance(named, dict) and isinstance(listed, list) and are_counts(least, most or 0)
    if not known:
        return []
    required = set(listed)
    if named.keys() <= required:  # the engine counts, but a name that comes twice counts twice
        return [] if least <= len(required) + 1 else None
    for key in ("minProperties", "maxProperties"):
        node.pop(key, None)
    shut = node.get("additionalProperties") is False and not node.get("patternProperties")
    if most is not None and not (shut and len(named.keys() | required) <= most):
        return None
    if least <= len(required):
        return []
    few = shut and least == 1 and len(named) <= MOST_BRANCHES
    return [{"required": [name]} for name in named] if few else None


def without_overlaps(patterns: dict[str, Any]) -> bool:
    """Makes one of patterns that fit the same name; says whether that says all they did."""
    whole = True
    while pair := _overlapping(patterns):
        one, other = (patterns.pop(pattern) for pattern in pair)
        whole = whole and one == other
        together = "|".join(f"(?:{pattern})" for pattern in pair)
        patterns[together] = one if one == other else {"anyOf": [one, other]}
    return whole


def _overlapping(patterns: Iterable[str]) -> tuple[str, str] | None:
    """Finds two patterns of which the engine says that a name fits both; of many, any two."""
    several = list(patterns)
    if len(several) < 2 or not _overlap(several):
        return None
    pairs = itertools.combinations(several, 2)
    if len(several) > _MOST_COMPARED:
        return next(pairs)
    return next((pair for pair in pairs if _overlap(pair)), None)


def _overlap(patterns: Iterable[str]) -> bool:
    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    return bool(_NOT_DISJOINT.match(LLMatcher.validate_grammar(grammar)))


def are_counts(*values: Any) -> bool:
    """Says whether values are integers, as what is counted has to be."""
    return all(isinstance(value, int) for value in values)


def fits_all_names(pattern: str) -> bool:
    """Says whether a pattern is sure to match all names: what it finds in none it finds in each."""
    if _ENDS_OR_LOOKS.search(pattern):
        return pattern in _ANY_NAME
    try:
        return pattern in _ANY_NAME or compiled(pattern).search("", timeout=0.1) is not None
    except (*NO_PATTERN, TimeoutError):
        return False


def _pattern_of(names: Any) -> tuple[str | None, bool]:
    """Writes a pattern that all names fit, None where there is none; and whether only they fit."""
    if not isinstance(names, dict):
        return ("", True) if names is True else (None, False)
    wanted = {
        key: value for key, value in names.items() if key not in ("title", "description", "type")
    }
    if names.get("type", "string") != "string":
        return None, False
    if not wanted:
        return "", True
    if "pattern" in wanted:
        return str(wanted["pattern"]), wanted.keys() == {"pattern"}
    if wanted.keys() == {"format"} and wanted["format"] in formats.PATTERNS:
        return formats.PATTERNS[wanted["format"]], True
    if wanted.keys() == {"enum"} and all(
        isinstance(name, str) and name.isalnum() for name in names["enum"]
    ):
        return f"^(?:{'|'.join(names['enum'])})$", True
    if wanted.keys() & _LENGTHS:
        least, most = wanted.get("minLength", 0), wanted.get("maxLength", "")
        return rf"^[\s\S]{{{least},{most}}}$", wanted.keys() <= _LENGTHS
    return None, False
