"""The second look at finished JSON: as jsonschema sees it, but within bounds."""

import random
import re
from typing import Any

import pytest
from effort import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from mlx_rq.engine.structured.bounded import formats
from mlx_rq.engine.structured.json_schema import Check, SchemaFault
from mlx_rq.engine.structured.metaschema import is_valid

EVIL = "^(a|a)+$"
LONG = "a" * 60 + "!"
DRAFTS = {
    name: f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")
} | {f"draft-0{n}": f"http://json-schema.org/draft-0{n}/schema#" for n in (3, 4, 6, 7)}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.engine.structured.patterns._SECONDS", 0.05)


def soon(check: Check, value: Any) -> str | None:
    """The fault of a value, which must be found with the work of a second or two."""
    with at_most(100):
        return check.fault(value)


KEYWORDS: dict[str, tuple[dict[str, Any], Any]] = {
    "pattern": ({"pattern": EVIL}, LONG),
    "patternProperties": ({"patternProperties": {EVIL: {}}}, {LONG: 1}),
    "additionalProperties": (
        {"patternProperties": {EVIL: {}}, "additionalProperties": False},
        {LONG: 1},
    ),
    "unevaluatedProperties": (
        {"unevaluatedProperties": False, "patternProperties": {EVIL: {}}},
        {LONG: 1},
    ),
    "propertyNames": ({"propertyNames": {"pattern": EVIL}}, {LONG: 1}),
    "extends": ({"extends": {"pattern": EVIL}}, LONG),
    "dependencies": ({"dependencies": {"a": {"patternProperties": {EVIL: {}}}}}, {"a": 1, LONG: 1}),
    "type": ({"type": [{"pattern": EVIL}]}, LONG),
    "not": ({"not": {"pattern": EVIL}}, LONG),
    "if": ({"if": {"pattern": EVIL}, "then": False}, LONG),
    "contains": ({"contains": {"pattern": EVIL}}, [LONG]),
    "items": ({"items": {"pattern": EVIL}}, [LONG]),
}


def known(draft: str, keyword: str) -> bool:
    """Whether a draft has a keyword, so that it searches at all."""
    first = {"if": 7, "propertyNames": 6, "contains": 6, "not": 4, "unevaluatedProperties": 2019}
    last = {"extends": 3, "type": 3, "dependencies": 7}
    year = int(draft[:4]) if draft[0] == "2" else int(draft[-1])
    return first.get(keyword, 0) <= year <= last.get(keyword, 9999)


@pytest.mark.parametrize(
    ("draft", "keyword"), [(d, k) for d in DRAFTS for k in KEYWORDS if known(d, k)]
)
def test_no_keyword_of_any_draft_searches_without_end(draft: str, keyword: str) -> None:
    schema, value = KEYWORDS[keyword]
    fault = soon(Check({"$schema": DRAFTS[draft], **schema}), value)
    assert fault == "a regular expression of the schema takes too long on it"


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_schema_within_that_names_its_draft_is_bounded_too(draft: str) -> None:
    inner = {"$schema": DRAFTS[draft], "pattern": EVIL}
    for schema in (
        {"items": inner},
        {"$schema": DRAFTS[draft], "items": {"$ref": "#"}, "pattern": EVIL},
    ):
        assert "takes too long" in (soon(Check(schema), [LONG]) or "")


def test_the_time_is_for_all_searches_together() -> None:
    check = Check({"patternProperties": {EVIL: {}}})
    keys = {"a" * 17 + f"!{i}": i for i in range(2_000)}  # some milliseconds each
    assert "takes too long" in (soon(check, keys) or "")
    assert check.fault({"aaa": 1}) is None, "the next value has all of it again"


def test_many_items_are_compared_soon() -> None:
    check = Check({"type": "array", "uniqueItems": True})
    items = [{"n": number, "of": [number]} for number in range(20_000)]
    assert soon(check, items) is None
    assert "non-unique" in (soon(check, [*items, {"of": [1.0], "n": 1}]) or "")
    assert check.fault([1, True, "1", [1], [True], {"a": 1}, {"a": True}, 0, False]) is None


def test_branches_of_branches_take_no_time_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.engine.structured.bounded._MOST_SECONDS", 0.1)
    steps = {f"s{n}": {"items": {"anyOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2}} for n in range(40)}
    check = Check({"$ref": "#/$defs/s0", "$defs": {**steps, "s40": {"type": "string"}}})
    value: Any = 1
    for _ in range(40):
        value = [value]
    assert soon(check, value) == "validation takes too long on it"
    assert check.fault([]) is None


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/elsewhere", "elsewhere": {"properties": 5}}, {"a": 1}),
        ({"$ref": "https://example.com/schema.json"}, 1),
        ({"anyOf": [{"$ref": "#"}]}, 1),
    ],
)
def test_what_cannot_be_validated_is_a_fault_of_the_value(schema: Any, value: Any) -> None:
    assert (soon(Check(schema), value) or "").startswith("it cannot be validated: ")


def test_patterns_may_name_kinds_of_characters() -> None:
    check = Check({"pattern": r"^\p{Lu}\p{L}*$"})
    assert check.fault("Émile") is None
    assert "does not match" in (check.fault("émile") or "")
    assert Check({"format": "regex"}).fault(r"\p{L}") is None


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("pattern", ["(", r"\p{Nonsense}", "a{99999999999999999999}", "(" * 10_000])
def test_what_is_no_pattern_is_a_fault_of_the_schema(draft: str, pattern: str) -> None:
    with pytest.raises(SchemaFault, match=r"is not a 'regex'|…"):
        Check({"$schema": DRAFTS[draft], "pattern": pattern})
    assert soon(Check({"$schema": DRAFTS[draft], "format": "regex"}), pattern)


SCHEMAS: list[Any] = [
    {"type": "objct"},
    {"type": ["string", "string"]},
    {"type": [{"pattern": "("}]},
    {"enum": []},
    {"enum": {}},
    {"required": True},
    {"required": ["a", "a"]},
    {"properties": {"a": {"items": [{"minLength": -1}]}}},
    {"properties": {"a": {"items": {"minLength": 1.0}}}},
    {"properties": {"a": True}},
    {"properties": {"a": None}},
    {"patternProperties": {"(": {}}},
    {"additionalProperties": {"maximum": "1"}},
    {"exclusiveMinimum": True},
    {"exclusiveMinimum": 1},
    {"multipleOf": 0},
    {"allOf": []},
    {"anyOf": [{"not": {"$ref": 5}}]},
    {"dependencies": {"a": ["b"], "c": {"type": 1}}},
    {"dependentRequired": {"a": "b"}},
    {"$defs": {"x": {"uniqueItems": 1}}},
    {"definitions": {"x": {"uniqueItems": 1}}},
    {"$id": "a b"},
    {"$ref": "#/%zz"},
    {"$recursiveAnchor": 1},
    {"if": {"contains": {"propertyNames": {"const": 1, "pattern": "("}}}},
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_schemas_are_judged_as_jsonschema_judges_them(draft: str) -> None:
    validator: Any = validator_for({"$schema": DRAFTS[draft]})

    def stock(schema: Any) -> str | None:
        try:
            validator.check_schema(schema, format_checker=formats(validator))
        except SchemaError as error:
            return error.message
        return None

    for schema in SCHEMAS:
        fault = stock(schema)
        assert is_valid(schema, validator) == (fault is None), schema
        if fault is not None:
            with pytest.raises(SchemaFault, match=re.escape(fault[:100])):
                Check({"$schema": DRAFTS[draft], **schema})
    assert is_valid(validator.META_SCHEMA, validator)
    assert not is_valid([], validator)
    assert is_valid({"enum": [1, 1.0]}, validator), "which old drafts forbid"


def test_a_large_schema_is_found_valid_soon() -> None:
    large = {"properties": {f"p{i}": {"items": {"type": "string"}} for i in range(2_000)}}
    with at_most(15):
        assert is_valid(large, Draft202012Validator)


IRIS = {
    "iri": (
        ["http://é.de/日本?ü#ß", "x:y"],
        ["é:y", "a b:c", "/é", "http://é\x85"],
    ),
    "iri-reference": (["", "/é", "é", "http://é.de"], ["a b", "é\x85", "%", "\\\\é"]),
}


@pytest.mark.parametrize("format", IRIS)
def test_iris_are_told_from_other_texts_soon(format: str) -> None:
    check = Check({"format": format})
    good, bad = IRIS[format]
    assert [text for text in good if check.fault(text)] == []
    assert [text for text in bad if not check.fault(text)] == []
    assert soon(check, "http://é/" + "日本/" * 20_000) is None
    assert check.fault(1) is None


def objects(dice: random.Random, depth: int = 3) -> Any:
    """A schema for objects, of all that `unevaluatedProperties` looks through."""

    def inner() -> Any:
        return objects(dice, depth - 1) if depth else {"required": [dice.choice("abc")]}

    schema: dict[str, Any] = {}
    for keyword in dice.sample(list(OF_OBJECTS), dice.randrange(1, 4)):
        schema[keyword] = OF_OBJECTS[keyword](dice, inner)
    return schema


OF_OBJECTS: dict[str, Any] = {
    "properties": lambda dice, _: {name: {} for name in dice.sample("abcd", 2)},
    "patternProperties": lambda dice, _: {f"^[{dice.choice('abcd')}b]": {"type": "integer"}},
    "additionalProperties": lambda dice, _: {"type": dice.choice(["integer", "string"])},
    "unevaluatedProperties": lambda dice, _: dice.choice([False, {"type": "string"}]),
    "dependentSchemas": lambda dice, inner: {dice.choice("abcd"): inner()},
    "allOf": lambda _, inner: [inner()],
    "anyOf": lambda _, inner: [inner(), inner()],
    "oneOf": lambda _, inner: [inner(), inner()],
    "if": lambda _, inner: inner(),
    "then": lambda _, inner: inner(),
    "else": lambda _, inner: inner(),
    "$ref": lambda dice, _: f"#/$defs/{dice.choice('xy')}",
}


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_values_are_judged_as_jsonschema_judges_them(seed: int) -> None:
    dice = random.Random(seed)
    definitions = {
        "x": {"properties": {"a": {}}},
        "y": {"patternProperties": {"^c": {}}, "minProperties": 1},
    }
    schema = {**objects(dice), "unevaluatedProperties": False, "$defs": definitions}
    check = Check(schema)
    stock = Draft202012Validator(schema)
    for _ in range(20):
        names = dice.sample("abcd", dice.randrange(4))
        value = {name: dice.choice([1, "s"]) for name in names}
        assert (check.fault(value) is None) == stock.is_valid(value), (schema, value)


def test_recursive_references_of_2019_are_followed() -> None:
    schema = {
        "$schema": DRAFTS["2019-09"],
        "$recursiveAnchor": True,
        "properties": {"a": {}, "next": {"$recursiveRef": "#"}},
        "unevaluatedProperties": False,
    }
    check, stock = Check(schema), Draft201909Validator(schema)
    for value in ({"a": 1}, {"next": {"a": 1}}, {"next": {"b": 1}}, {"b": 1}):
        assert (check.fault(value) is None) == stock.is_valid(value)


@pytest.mark.parametrize(
    ("multiple", "value", "fits"),
    [
        (0.01, 19.99, True),
        (0.01, 290124.11, True),
        (0.1, 3.8, True),
        (0.1, 0.3, True),
        (0.1, 0.35, False),
        (2.5, 10**310, True),
        (2.5, 10**310 + 1, False),
        (7, 10**310 * 7, True),
        (0.5, 1e300, True),
        (0.01, float("inf"), False),
        (0.01, True, True),
        (0.01, "x", True),
    ],
)
def test_decimals_are_multiples_as_they_are_written(
    multiple: float, value: Any, fits: bool
) -> None:
    assert (Check({"multipleOf": multiple}).fault(value) is None) is fits


def test_draft_3_calls_multiples_divisible() -> None:
    schema = {"$schema": DRAFTS["draft-03"], "divisibleBy": 0.01}
    assert Check(schema).fault(19.99) is None
    assert Check(schema).fault(0.005) == "0.005 is not a multiple of 0.01 (at $)"
