"""What a schema says is enforced, or refused with the reason: never ignored."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import speaking
from effort import at_most

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.structured.closing import closed
from mlx_rq.engine.structured.compilers import Compilers
from mlx_rq.engine.structured.constraint import Compiled, GrammarFault
from mlx_rq.engine.structured.enforceable import enforceable
from mlx_rq.engine.structured.grammar import grammar_of
from mlx_rq.engine.structured.llguidance_backend import Guidance
from mlx_rq.engine.structured.references import circular, endless
from mlx_rq.engine.structured.unfolding import unfolded
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.validation import validate

MODEL = speaking.model()
GUIDANCE = Guidance(MODEL)
MODEL_FORMAT = model_format_of(MODEL.tokenizer)
MESSAGES = [{"role": "user", "content": "x"}]


def compiled(reasoning: bool | None = False, **body: Any) -> Compiled:
    request = validate("chat", {"messages": MESSAGES, **body})
    grammar = grammar_of(request, MODEL_FORMAT, reasoning)
    assert grammar is not None
    return GUIDANCE.compile(grammar)


def json_schema(schema: Any, strict: bool = True) -> dict[str, Any]:
    wanted = {"name": "X", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def fits(grammar: Compiled, text: str) -> bool:
    """Whether the constraint lets exactly this text through."""
    constraint = grammar.start(10_000, close=False)
    assert constraint is not None
    for token in MODEL.tokenizer.encode(text, add_special_tokens=False):
        masks = np.full((1, (MODEL.vocab_size + 31) // 32), -1, np.int32)
        if constraint.done:
            return False
        constraint.fill([(constraint, 0)], masks)
        if not int(masks[0, token >> 5]) >> (token & 31) & 1:
            return False
        constraint.accept(token)
    assert constraint.fault is None
    return constraint.complete


OBJECT = {"type": "object"}
# Keyword: the schema, what fits it, what does not.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type string": ({"type": "string"}, ["", 'aé日\n"\\'], [1, None]),
    "type integer": ({"type": "integer"}, [0, -12, 10**20], [1.5, "1"]),
    "type number": ({"type": "number"}, [0, -1.5, 1e10], ["1", True]),
    "type boolean": ({"type": "boolean"}, [True, False], [0, "true"]),
    "type null": ({"type": "null"}, [None], [0, ""]),
    "type array": ({"type": "array"}, [[], [1, "a", None]], [{}]),
    "type object": (OBJECT, [{}, {"a": [1]}], [[]]),
    "several types": ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    "no type": ({}, [1, "a", None, [], {"a": 1}], []),
    "true": ({"type": "array", "items": True}, [[1, "a"]], [1]),
    "nullable": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    "enum": ({"enum": ["a", 1, None, "日本", [1]]}, ["a", 1, None, "日本", [1]], ["b", 2, [2]]),
    "big enum": ({"enum": [f"v{i}" for i in range(5000)]}, ["v0", "v4999"], ["v5000", "v"]),
    "const": ({"const": {"a": [1, "é"]}}, [{"a": [1, "é"]}], [{"a": [2, "é"]}, {}]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4]),
    "maximum": ({"type": "integer", "maximum": 12}, [12, -50], [13, 100]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, [4], [3, 0]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, [2, -1], [3, 4]),
    "bounds of numbers": (
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 2.25},
        [-0.5, 0, 2.2499],
        [-0.51, 2.25, 3],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 7, 49, -14], [1, 50]),
    "multipleOf decimal": ({"type": "number", "multipleOf": 0.25}, [0.25, 1.75], [0.3]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "éé"], ["a", "é", ""]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["ab", "日本", ""], ["abc"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2}$"}, ["ab"], ["ad", "abc", "a"]),
    "pattern in the middle": ({"type": "string", "pattern": "b+"}, ["abbc", "b"], ["a", ""]),
    "pattern with length": (
        {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 4},
        ["aa", "aaaa"],
        ["a", "aaaaa", "ab"],
    ),
    "format date": ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "x"]),
    "format date-time": (
        {"type": "string", "format": "date-time"},
        ["2024-02-28T10:00:00Z"],
        ["2024-02-28"],
    ),
    "format uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567"],
    ),
    "format email": ({"type": "string", "format": "email"}, ["a@b.de"], ["a.b.de"]),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1"]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[1, "a"], [1], []],
        [["a"], [1, "a", 2]],
    ),
    "properties": (
        {**OBJECT, "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        [{}, {"a": 1}, {"b": "x"}],
        [{"a": "x"}],
    ),
    "required": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "required": ["b"]},
        [{"a": 1, "b": 2}, {"b": 2}],
        [{}, {"a": 1}],
    ),
    "additionalProperties false": (
        {**OBJECT, "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    "additionalProperties schema": (
        {**OBJECT, "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1, "é": 2}],
        [{"x": "a"}],
    ),
    "patternProperties": (
        {
            **OBJECT,
            "patternProperties": {"^n_": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"n_a": 1}],
        [{"n_a": "x"}, {"a": 1}],
    ),
    "unicode keys": (
        {**OBJECT, "properties": {"größe 日本": {"type": "integer"}}, "required": ["größe 日本"]},
        [{"größe 日本": 1}],
        [{"grösse": 1}],
    ),
    "empty object": (
        {**OBJECT, "properties": {}, "additionalProperties": False},
        [{}],
        [{"a": 1}, []],
    ),
    "minProperties": ({**OBJECT, "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}]),
    "anyOf": (
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        [1, [1]],
        ["a", ["a"]],
    ),
    "oneOf apart": (
        {
            "oneOf": [
                {**OBJECT, "properties": {"k": {"const": "a"}, "x": {}}, "required": ["k"]},
                {**OBJECT, "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ]
        },
        [{"k": "a", "x": 1}, {"k": "b"}],
        [{"k": "c"}],
    ),
    "allOf": (
        {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
        [2, 4],
        [1, 5],
    ),
    "allOf of objects": (
        {
            "allOf": [
                {**OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {**OBJECT, "properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"a": "x", "b": "x"}],
    ),
    "$ref": (
        {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
        [[1]],
        [["a"]],
    ),
    "definitions": (
        {"definitions": {"n": {"type": "integer"}}, "$ref": "#/definitions/n"},
        [1],
        ["a"],
    ),
    "recursion": (
        {
            "$defs": {
                "tree": {
                    **OBJECT,
                    "properties": {
                        "v": {"type": "integer"},
                        "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                    },
                    "required": ["v", "c"],
                }
            },
            "$ref": "#/$defs/tree",
        },
        [{"v": 1, "c": [{"v": 2, "c": []}]}],
        [{"v": 1, "c": [{"v": 2}]}],
    ),
    "title, description, default, examples": (
        {"type": "integer", "title": "T", "description": "D", "default": 1, "examples": [2]},
        [3],
        ["a"],
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "$ within a pattern": (
        {"type": "string", "pattern": "^([a-z]*($|/))*$"},
        r"'$' can stand only at the end of a pattern; in /^([a-z]*($|\/))*$/ it stands within.",
    ),
    "bounds beyond 64 bits": (
        {"type": "integer", "minimum": 2**64},
        "its bounds leave no numbers but those beyond 64 bits",
    ),
    "unevaluatedProperties": (
        {**OBJECT, "unevaluatedProperties": False},
        '"unevaluatedProperties"',
    ),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, '"unevaluatedItems"'),
    "a lookahead in a pattern of names": (
        {**OBJECT, "patternProperties": {"a(?=b)": {}}},
        "look-around",
    ),
    "false": ({**OBJECT, "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
    "oneOf of which never one fits": (
        {"oneOf": [{"type": "string"}, {"type": ["string"]}]},
        "nsatisfiable",
    ),
    "no number between": ({"type": "integer", "minimum": 3, "maximum": 2}, "greater than"),
    "foreign $ref": ({"$ref": "https://example.com/schema.json"}, "example.com"),
    "missing $ref": ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
    "$ref to itself": ({"$ref": "#"}, "leads back to itself"),
    "$ref to itself beside others": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "minLength": 1}}},
        "leads back to itself",
    ),
    "properties that are merged in a circle": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "allOf": [{"$ref": "#/$defs/b"}, {"properties": {"x": {"minProperties": 1}}}]
                },
                "b": {"properties": {"x": {"$ref": "#/$defs/a"}}},
            },
        },
        "leads back to itself",
    ),
    "unknown type": ({"type": "text"}, "'text' is not valid"),
    "wrong keyword value": ({"type": "integer", "minimum": "3"}, "is not of type 'number'"),
}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_keyword_is_enforced(keyword: str) -> None:
    schema, valid, invalid = ENFORCED[keyword]
    grammar = compiled(**json_schema(schema))

    assert [v for v in valid if not fits(grammar, json.dumps(v, ensure_ascii=False))] == []
    assert [v for v in invalid if fits(grammar, json.dumps(v, ensure_ascii=False))] == []
    assert not grammar.warnings


A, B = ({**OBJECT, "properties": {"t": {"const": name}}, "required": ["t"]} for name in "ab")
OPEN = {**OBJECT, "additionalProperties": True}
SHUT = {**OBJECT, "additionalProperties": False}
# Keyword: a schema that is enforced in other words, what fits it, what does not.
NODE = "#/$defs/node"


def node(next: Any) -> dict[str, Any]:
    """An object with a value, and a next one."""
    return {**OBJECT, "properties": {"v": {"type": "integer"}, "next": next}}


REWRITTEN: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "not type": ({"not": {"type": ["string", "null"]}}, [1, [], True], ["a", None]),
    "not const": ({"type": "string", "not": {"const": "ab"}}, ["a", "abc", "", "b"], ["ab", 1]),
    "not enum": ({"not": {"enum": ["a", 2, None]}}, ["b", 1, 2.5, 3, [], True], ["a", 2, None]),
    "not required": ({**OPEN, "not": {"required": ["a", "b"]}}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    "not of a property": (
        {**OPEN, "properties": {"t": {"type": "string"}}, "not": A},
        [{"t": "b"}, {}],
        [{"t": "a"}],
    ),
    "not either": ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, [2, -1.5], [3, "a"]),
    "if": (
        {**OPEN, "if": A, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
        [{"t": "a", "x": 1}, {"t": "b", "y": 1}, {"y": 1}],
        [{"t": "a", "y": 1}, {"t": "b", "x": 1}, {}],
    ),
    "lookaheads that begin a pattern": (
        {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*(1|2))[A-Z0-9]{3,}$"},
        ["AB1", "2A0"],
        ["ABC", "A1", "123", "A1-"],
    ),
    "names of a format": (
        {"type": "object", "propertyNames": {"format": "date"}},
        [{"2026-11-29": 1}, {}],
        [{"2026-11-31": 1}],
    ),
    "minProperties of what may all be absent": (
        {**SHUT, "properties": {"a": {}, "b": {}}, "minProperties": 1},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "maxProperties that cannot be more": (
        {**SHUT, "properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "a $ref to a place of its own": (
        {
            "$ref": "#/places/x",
            "places": {"x": {"oneOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#"}}]}},
        },
        [1, [1, []]],
        [2, [2]],
    ),
    "a $ref to what is rewritten": (
        {
            "type": "object",
            "if": {"required": ["a"]},
            "then": {"properties": {"a": {"type": "integer"}}},
            "properties": {"a": {}, "b": {"$ref": "#/then/properties/a"}},
        },
        [{"a": 1, "b": 1}],
        [{"b": "x"}, {"a": "x"}],
    ),
    "a property for which there is a pattern too, in a circle": (
        {
            **SHUT,
            "properties": {"a": {"anyOf": [{"$ref": "#"}]}},
            "patternProperties": {"^[a-z]*": {"anyOf": [{"$ref": "#"}]}},
        },
        [{}, {"a": {}}, {"b": {"a": {}}}],
        [{"a": 1}, {"b": 1}],
    ),
    "base64": (
        {"type": "string", "format": "base64"},
        ["", "YQ==", "YWI=", "YWJj", "+/+/"],
        ["YR==", "YWI", "a", "Y-Jj"],
    ),
    "uri-reference": (
        {"type": "string", "format": "uri-reference"},
        ["https://example.com:80/a?b#c", "//h/p", "mailto:a@b", "../a", "#a", "?a", ""],
        ["a b", "a#b#c", "%zz"],
    ),
    "then without if": ({"type": "integer", "then": {"minimum": 5}}, [1], ["a"]),
    "dependentRequired": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{"a": 1, "b": 1}, {"b": 1}, {}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {**OPEN, "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"a": 1, "b": 1}, {"b": "x"}, {"a": 1}],
        [{"a": 1, "b": "x"}],
    ),
    "oneOf behind references": (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
        [{"t": "a"}, {"t": "b"}],
        [{"t": "c"}, {}],
    ),
    "oneOf of requirements": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "oneOf": [{"required": [n]} for n in "ab"]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {}],
    ),
    "oneOf of bounds": (
        {"type": "integer", "oneOf": [{"maximum": 4}, {"minimum": 3}]},
        [2, 5],
        [3],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["b", "a"], [1, "b", "a"]],
        [[], ["a", "a"], ["c"]],
    ),
    "propertyNames": (
        {**OPEN, "propertyNames": {"pattern": "^[ab]$"}},
        [{"a": 1}, {}],
        [{"c": 1}],
    ),
    "$ref beside others, in a circle": (
        {"$ref": "#/$defs/node", "$defs": {"node": node({"$ref": NODE, "required": ["v"]})}},
        [{}, {"v": 1}, {"next": {"v": 1, "next": {"v": 2}}}],
        [{"next": {}}, {"next": {"v": 1, "next": {}}}, {"next": {"v": "x"}}],
    ),
    "$ref before others, in a circle": (
        {"$ref": "#/$defs/node", "$defs": {"node": node({"required": ["next"], "$ref": NODE})}},
        [{}, {"v": 1}],
        [{"next": {}}, {"next": {"v": 1}}, {"next": {"next": {}}}],
    ),
    "allOf in a circle": (
        {
            "$ref": NODE,
            "$defs": {
                "node": node({"allOf": [{"$ref": NODE}, {"$ref": "#/$defs/more"}]}),
                "more": {"properties": {"w": {"type": "null"}}, "required": ["w"]},
            },
        },
        [{"v": 1}, {"next": {"v": 1, "w": None}}, {"next": {"next": {"w": None}, "w": None}}],
        [{"next": {"v": 1}}, {"next": {"next": {"v": 1}, "w": None}}],
    ),
    "two in a circle": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": node({"$ref": "#/$defs/b", "required": ["v"]}),
                "b": node({"$ref": "#/$defs/a", "required": ["v"]}),
            },
        },
        [{}, {"next": {"v": 1}}, {"next": {"v": 1, "next": {"v": 2}}}],
        [{"next": {}}, {"next": {"v": 1, "next": {}}}],
    ),
    "the whole in a circle": (
        {**OBJECT, "properties": {"next": {"$ref": "#", "type": ["object", "null"]}}},
        [{}, {"next": {"next": {}}}],
        [{"next": None}, {"next": 1}],
    ),
    "propertyNames of what is listed": (
        {
            **OBJECT,
            "additionalProperties": False,
            "properties": {"a": {}, "bc": {}},
            "propertyNames": {"maxLength": 1},
        },
        [{"a": 1}, {}],
        [{"a": 1, "bc": 1}, {"bc": 1}],
    ),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5], [10**19]),
    "beyond 64 bits": ({"type": "number", "maximum": 2.0**64}, [10**18, -3], [3 * 10**19]),
    "beyond the exact": ({"type": "integer", "maximum": 2**53 + 1}, [2**53], [2**53 + 2]),
    "patternProperties of which one is for all names": (
        {
            **SHUT,
            "properties": {"b": {"type": ["string", "null"]}},
            "patternProperties": {
                "^x-": {"type": "integer"},
                "": {"type": ["integer", "string"]},
                ".*": {"not": {"const": 7}},
            },
        },
        [{}, {"b": "q"}, {"x-a": 1, "z": "s"}],
        [{"b": None}, {"x-a": "s"}, {"z": None}, {"z": 7}],
    ),
    "patternProperties that say the same": (
        {**SHUT, "patternProperties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        [{"ab": 1}, {"a": 1, "xb": 2}],
        [{"a": "x"}, {"c": 1}],
    ),
    "counts without end": (
        {"type": "array", "maxItems": 10**18, "items": {"type": "string", "maxLength": 2**64}},
        [[], ["a"]],
        ["a", [1]],
    ),
    "one of three without a twin": (
        {"oneOf": [{**OBJECT, "required": ["a"]}, {**OBJECT, "required": ["a"]}, {"const": 1}]},
        [1],
        [2, {"a": 1}],
    ),
    "a draft by another name": (
        {
            "$schema": "https://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "items": {"$ref": "#/definitions/n", "minimum": 5},
            "type": "array",
        },
        [[1]],
        [["a"]],
    ),
    "no draft": (
        {"$schema": "http://json-schema.org/schema#", "$ref": "#/$defs/n", "$defs": {"n": {}}},
        [1],
        [],
    ),
    "counts as decimals": ({"type": "array", "maxItems": 1.0}, [[1]], [[1, 2]]),
    "leap days": (
        {"format": "date"},
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["7999-02-29", "1900-02-29", "2023-02-30", "0000-01-01"],
    ),
    "seconds": ({"format": "time"}, ["23:58:59Z", "01:02:03.5+02:00"], ["23:58:60Z", "24:00:00Z"]),
    "other formats": (
        {"enum": ["/a~1b", "a", "a~2"], "format": "json-pointer"},
        ["/a~1b"],
        ["a", "a~2"],
    ),
    "relative pointers that are checked": (
        {"enum": ["0", "10", "2/a~1b", "7#", "101"], "format": "relative-json-pointer"},
        ["0", "10", "2/a~1b", "7#"],
        ["101"],
    ),
    "patternProperties with a bracket in a class": (
        {**SHUT, "patternProperties": {"^[[a]+$": {"type": "integer"}}},
        [{"[a": 1}],
        [{"b": 1}, {"[": "x"}],
    ),
    "an old draft's $ref": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "items": {"$ref": "#/definitions/n", "minimum": 5},
            "type": "array",
        },
        [[1]],
        [["a"]],
    ),
}


@pytest.mark.parametrize("keyword", REWRITTEN)
def test_keyword_is_enforced_in_other_words(keyword: str) -> None:
    schema, valid, invalid = REWRITTEN[keyword]
    for strict in (True, False):
        grammar = compiled(**json_schema(schema, strict))
        (check,) = grammar.checks
        assert check is not None
        assert [v for v in valid if not fits(grammar, json.dumps(v)) or check.fault(v)] == []
        assert [v for v in invalid if fits(grammar, json.dumps(v))] == []
        assert not grammar.warnings


# A schema, what is told; values that are written and valid, written and refused, never written.
LEFT_TO_THE_CHECK: dict[str, tuple[Any, str, list[Any], list[Any], list[Any]]] = {
    "oneOf that overlaps": (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]},
        "oneOf",
        ["a", "b"],
        ["ab"],
        ["c"],
    ),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems", [[1]], [[1, 1]], ["a"]),
    "uniqueItems of an enum that repeats itself": (
        {"type": "array", "items": {"enum": ["x", "x"]}, "uniqueItems": True},
        "uniqueItems",
        [["x"]],
        [["x", "x"]],
        [["y"]],
    ),
    "format": ({"type": "string", "format": "telephone"}, "which nothing checks", ["x"], [], [1]),
    "regex": ({"type": "string", "format": "regex"}, "the format 'regex'", ["x"], ["("], [1]),
    "not": ({"type": "string", "not": {"pattern": "a"}}, "'not'", ["b"], ["a"], [1]),
    "lookahead": ({"type": "string", "pattern": "^(?!0)[0-9]+$"}, "ahead", ["10"], ["01"], ["a"]),
    "lookbehind": ({"type": "string", "pattern": "a(?<!b(a))c$"}, "ahead", ["ac"], ["bac"], ["b"]),
    "lookahead in one of several": (
        {"type": "string", "pattern": "^(?=a)(?=[^|]b)..$|^c$"},
        "ahead",
        ["ab", "c"],
        ["bb"],
        ["abc"],
    ),
    "word boundary": ({"type": "string", "pattern": r"\bin\b"}, "ahead", ["in"], ["ink"], ["i"]),
    "not in a branch": (
        {"anyOf": [{"type": "string"}, {"type": "integer", "not": {"multipleOf": 2}}]},
        "'not'",
        ["a", 3],
        [4],
        [2.5],
    ),
    "if": (
        {"type": "string", "if": {"pattern": "a"}, "then": {"maxLength": 2}},
        "'if'",
        ["aa", "bbb"],
        ["aaa"],
        [1],
    ),
    "if and else": (
        {
            "type": "string",
            "if": {"pattern": "a"},
            "then": {"maxLength": 2},
            "else": {"const": "b"},
        },
        "'if'",
        ["aa", "b"],
        [],
        ["aaa", "bb", 1],
    ),
    "contains": (
        {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
        "'contains'",
        [[1, 2], ["a", 1, 2]],
        [[1, "a"]],
        [[1], []],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"format": "ipv4"}},
        "'propertyNames'",
        [{"10.0.0.1": 1}, {}],
        [{"a": 1}],
        [1],
    ),
    "patternProperties in a circle": (
        {
            **SHUT,
            "properties": {"a": {"items": {"type": "object"}}},
            "patternProperties": {"": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        },
        "'patternProperties'",
        [{"a": [{}]}, {"ab": [{"b": []}]}],
        [{"a": [{}, {}]}],
        [{"b": [{}, {}]}, {"a": [1]}],
    ),
    "maxProperties": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "maxProperties": 1},
        "how many properties",
        [{"a": 1}, {}],
        [{"a": 1, "b": 1}],
        [1],
    ),
    "patternProperties that overlap": (
        {
            **SHUT,
            "patternProperties": {
                "^a": {"type": "integer"},
                "b$": {"type": ["integer", "string"]},
                "^c$": {"type": "null"},
            },
        },
        "'patternProperties'",
        [{"ab": 1}, {"a": 1}, {"b": "x"}, {"c": None}],
        [{"ab": "x"}],
        [{"a": None}, {"c": 1}, {"d": 1}],
    ),
    "patternProperties that are too long to compare": (
        {
            **SHUT,
            "patternProperties": {
                r"^(\S+\s+){0,500}x$": {"type": "integer"},
                r"^(\S+\s+){3,400}y$": {"type": "null"},
            },
        },
        "'patternProperties'",
        [{"x": 1}],
        [{"x": None}],
        [{"a": 1}],
    ),
    "many patternProperties that overlap": (
        {**SHUT, "patternProperties": {f"{n}$": {"enum": [n]} for n in range(9)} | {"5": {}}},
        "'patternProperties'",
        [{"a5": 5}, {"5": 5}],
        [{"5": 6}],
        [{"a": 1}],
    ),
    "minProperties of names that may come twice": (
        {"type": "object", "required": ["a"], "minProperties": 3},
        "how many properties",
        [{"a": 1, "b": 1, "c": 1}],
        [],
        [{"a": 1, "b": 1}],
    ),
    "propertyNames of a pattern and a length": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 2}},
        "'propertyNames'",
        [{"ab": 1}, {}],
        [{"abc": 1}],
        [{"A": 1}],
    ),
}


@pytest.mark.parametrize("keyword", LEFT_TO_THE_CHECK)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_left_to_the_check_is_told(keyword: str, strict: bool) -> None:
    schema, told, valid, refused, never = LEFT_TO_THE_CHECK[keyword]
    grammar = compiled(**json_schema(schema, strict))
    (check,) = grammar.checks
    assert check is not None
    assert [v for v in valid if not fits(grammar, json.dumps(v)) or check.fault(v)] == []
    assert [v for v in refused if not fits(grammar, json.dumps(v)) or not check.fault(v)] == []
    assert [v for v in never if fits(grammar, json.dumps(v))] == []
    assert told in " ".join(grammar.warnings)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#"}},
        {"type": "array", "items": {"not": {"not": {"$ref": "#"}}}},
        {"oneOf": [{"$ref": "#/$defs/a"}] * 30, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        {"if": {"if": {"if": {"not": {}}, "then": {"not": {}}}, "else": {"not": {}}}},
        {"not": {"anyOf": [{"properties": {str(n): {"enum": [n]} for n in range(50)}}] * 50}},
    ],
)
def test_rewriting_ends(schema: Any) -> None:
    rewritten, _ = enforceable(schema)
    assert len(json.dumps(rewritten)) < 5 * len(json.dumps(schema)) + 5_000


def row(step: Callable[[Any], Any], length: int = 1_000) -> Any:
    """Schemas of which each refers to the next."""
    steps = {str(n): step({"$ref": f"#/$defs/{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**steps, str(length): {"type": "string"}}}


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda next: {**next, "minLength": 1}, id="beside others"),
        pytest.param(lambda next: {"allOf": [next], "properties": {"a": {}}}, id="merged"),
        pytest.param(lambda next: {"oneOf": [next, {"type": "null"}]}, id="oneOf"),
    ],
)
def test_references_that_are_too_much_to_look_through_are_refused_soon(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_rq.engine.structured.enforceable._MOST_STEPS", 10_000)
    with at_most(15), pytest.raises(RequestError) as refused:
        compiled(**json_schema(row(step, 400)))
    assert str(refused.value) == (
        "Invalid schema for response_format 'X': it refers to its own parts too often; make it "
        "simpler."
    )
    parameters = {"type": "object", **row(step, 400)}
    functions = [{"name": "g"}, {"name": "f", "strict": True, "parameters": parameters}]
    tools = [{"type": "function", "function": function} for function in functions]
    with pytest.raises(RequestError) as refused:
        compiled(tools=tools)
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"$schema": 5}, "5 is not of type 'string' (at $['$schema'])"),
        ({"$schema": ["x"]}, "['x'] is not of type 'string' (at $['$schema'])"),
        ({"propertyNames": {"enum": 5}}, "5 is not of type 'array' (at $.propertyNames.enum)"),
        (
            {"minProperties": 2, "required": [{}], "properties": {"a": {}}},
            "{} is not of type 'string' (at $.required[0])",
        ),
        ({"type": [{}], "uniqueItems": True}, "[{}] is not valid under any of the given schemas"),
    ],
)
def test_what_is_no_schema_is_refused_with_the_reason(schema: Any, fault: str) -> None:
    for strict in (True, False):
        with pytest.raises((RequestError, GrammarFault)) as refused:
            compiled(**json_schema(schema, strict))
        assert fault in str(refused.value)
    function = {"name": "f", "strict": True, "parameters": {"type": "object", **schema}}
    with pytest.raises((RequestError, GrammarFault)) as refused:
        compiled(tools=[{"type": "function", "function": function}])


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#"}},
        {"oneOf": [{"$ref": "#"}, {"type": "string"}]},
        {"if": {"allOf": [{"$ref": "#"}]}, "then": {"type": "string"}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_reference_that_leads_to_itself_whatever_the_value_is_refused(schema: Any) -> None:
    for strict in (True, False):
        with pytest.raises(GrammarFault, match="leads back to itself, whatever the value is"):
            compiled(**json_schema(schema, strict))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"not": {"required": ["a"]}, "properties": {"b": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}] * 2}, "b": {}}},
    ],
)
def test_a_reference_may_lead_back_by_way_of_a_value(schema: Any) -> None:
    assert endless(schema) is None


def test_a_long_row_of_negations_is_rewritten_soon() -> None:
    with at_most(25):
        rewritten, _ = enforceable(row(lambda next: {"not": next}))
    assert "not" not in rewritten["$defs"]["999"]


@pytest.mark.parametrize(
    ("schemas", "circles"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, ""),
        ({"a": ["a"]}, "a"),
        ({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}, "bc"),
        ({"a": ["b", "c"], "b": ["a"], "c": ["d"], "d": ["c"]}, "abcd"),
    ],
)
def test_references_that_lead_back_to_themselves_are_found(schemas: Any, circles: str) -> None:
    root = {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in schemas],
        "$defs": {
            name: {"items": [{"$ref": f"#/$defs/{one}"} for one in leads_to]}
            for name, leads_to in schemas.items()
        },
    }
    assert circular(root) == {f"#/$defs/{name}" for name in circles}


@pytest.mark.parametrize("keyword", REFUSED)
def test_keyword_is_refused_with_the_reason(keyword: str) -> None:
    schema, reason = REFUSED[keyword]

    with pytest.raises(GrammarFault) as fault:
        compiled(**json_schema(schema))

    assert reason in str(fault.value)
    assert "\n" not in str(fault.value)
    assert "%json" not in str(fault.value), "the grammar is the engine's affair"


# Pattern: a text in which the constraint engine finds it, and one in which it does not.
AS_THE_ENGINE_READS: dict[str, tuple[str, str]] = {
    r"^\d$": ("1", "१"),
    r"^\D$": ("१", "1"),
    r"^\w$": ("w", "é"),
    r"^\W+$": ("é-", "w"),
    r"^[\w-]+$": ("a-b", "é"),
    r"^[^\W_]+$": ("ab", "_"),
    r"^\s$": ("\u00a0", "\x1c"),
    r"^\S$": ("\x1c", "\u2028"),
    r"^a$": ("a", "a\n"),
    r"^[$\]]\$$": ("]$", "$"),
    r"^[[a]+$": ("[a", "b"),
    r"^[[a-z]*[-]?]*$": ("a[-]]", "a-a"),
    r"^[\[a&&b]+$": ("&", "c"),
    r"^[~~a]$": ("~", "b"),
}


@pytest.mark.parametrize("pattern", AS_THE_ENGINE_READS)
def test_patterns_are_checked_as_they_are_enforced(pattern: str) -> None:
    found, not_found = AS_THE_ENGINE_READS[pattern]
    grammar = compiled(**json_schema({"type": "string", "pattern": pattern}))
    (check,) = grammar.checks
    assert check is not None
    assert fits(grammar, json.dumps(found, ensure_ascii=False))
    assert check.fault(found) is None
    assert not fits(grammar, json.dumps(not_found, ensure_ascii=False))
    assert check.fault(not_found) is not None


WORDS = r"^(\S+\s+){0,99}\S+$"


@pytest.mark.parametrize(
    "body",
    [
        json_schema({"type": "string", "maxLength": 1000, "pattern": WORDS}),
        json_schema({**OBJECT, "properties": {"a": {"maxLength": 1000, "pattern": WORDS}}}),
        {"guided_grammar": 'start: "a"{1000000}'},
    ],
)
def test_what_the_engine_gives_up_as_it_begins_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(GrammarFault, match="too much for the constraint engine"):
        compiled(**body)


def dependent(schema: Any) -> Any:
    """An object whose properties depend on one another in 2 ** 6 ways, each with a copy within."""
    needs = {f"p{i}": [f"q{i}"] for i in range(6)}
    return {"type": "object", "properties": {"z": schema}, "dependentRequired": needs}


def test_alternatives_that_multiply_are_refused_before_they_are_written_out() -> None:
    schema: Any = {"type": "string"}
    for _ in range(5):
        schema = dependent(schema)
    with at_most(15), pytest.raises(GrammarFault, match="multiply to more than 400,000 schemas"):
        compiled(**json_schema(schema))
    compiled(**json_schema(dependent({"type": "string"})))


@pytest.mark.parametrize(
    ("schema", "schemas"),
    [
        ({}, 6),
        ({"type": "integer"}, 1),
        ({"type": ["string", "null"]}, 2),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"enum": [1, 2]}}}, 6),
        ({"type": "array", "items": {"const": {"a": [1]}}}, 5),
        ({"type": "string", "allOf": [{"anyOf": [{}, {}]}, {"anyOf": [{}, {}, {}]}]}, 30),
        ({"type": "string", "anyOf": [{"type": "null"}, {"type": "string"}]}, 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, 7),
        ({"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {"type": "null"}}}, 3),
        ({"$ref": "#", "minLength": 1}, 12),
        (None, 0),
    ],
)
def test_what_the_engine_makes_of_a_schema_is_foreseen(schema: Any, schemas: int) -> None:
    assert unfolded(schema) == schemas


def test_references_may_follow_one_another_in_a_long_row() -> None:
    """They would overflow the stack of a thread as it comes, which ends the program."""
    body = {"messages": MESSAGES, "guided_json": row(lambda next: {"properties": {"a": next}})}
    grammar = grammar_of(validate("chat", body), MODEL_FORMAT, False)
    assert grammar is not None
    compilers = Compilers(GUIDANCE.compile, threads=1)
    assert compilers.submit(grammar).result().shortest is not None
    compilers.close()


def test_a_grammar_to_which_no_short_end_is_found_is_none_the_worse() -> None:
    with at_most(75):
        grammar = compiled(guided_grammar='start: "a" start | "b"')
    assert fits(grammar, "aab")


@pytest.mark.parametrize(
    "keyword",
    ["unevaluatedItems", "unevaluatedProperties"],
)
def test_what_is_not_strict_is_checked_at_the_end_and_warns(keyword: str) -> None:
    schema, reason = REFUSED[keyword]

    grammar = compiled(**json_schema(schema, strict=False))

    assert reason.strip('"') in grammar.warnings[0]


def test_lenient_check_finds_what_was_passed_over() -> None:
    grammar = compiled(**json_schema({"type": "array", "uniqueItems": True}, strict=False))
    (check,) = grammar.checks
    assert check is not None
    assert check.fault([1, 2]) is None
    assert "non-unique" in (check.fault([1, 1]) or "")


def test_keys_come_in_the_order_of_the_schema() -> None:
    properties = {"z": {"type": "integer"}, "a": {"type": "integer"}}
    grammar = compiled(**json_schema({**OBJECT, "properties": properties, "required": ["z", "a"]}))
    assert fits(grammar, '{"z": 1, "a": 2}')
    assert not fits(grammar, '{"a": 2, "z": 1}')


def test_white_space_is_bounded() -> None:
    grammar = compiled(**json_schema({"type": "array", "items": {"type": "integer"}}))
    assert fits(grammar, "[" + " " * 20 + "1]")
    assert not fits(grammar, "[" + " " * 21 + "1]")


def test_strict_closes_objects_that_do_not_say() -> None:
    schema = {
        **OBJECT,
        "properties": {"in": {**OBJECT, "properties": {}}, "any": OBJECT, "properties": {}},
        "$defs": {"d": {**OBJECT, "properties": {"a": {"const": {"properties": {}}}}}},
    }
    done = closed(schema)
    assert done["additionalProperties"] is False
    assert done["properties"]["in"]["additionalProperties"] is False
    assert done["properties"]["any"] == OBJECT
    assert done["$defs"]["d"]["additionalProperties"] is False
    assert done["$defs"]["d"]["properties"]["a"] == {"const": {"properties": {}}}
    assert "additionalProperties" not in schema

    assert not fits(compiled(**json_schema({**OBJECT, "properties": {"a": {}}})), '{"b": 1}')
    assert fits(compiled(**json_schema({**OBJECT, "properties": {"a": {}}}, False)), '{"b": 1}')


BASES = {
    "$defs": {
        "A": {**OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "B": {**OBJECT, "properties": {"b": {"type": "integer"}}},
    }
}
X, Y = ({"properties": {name: {"type": "integer"}}} for name in "xy")
KIND = {**OBJECT, "properties": {"kind": {"enum": ["a", "b"]}}}
# What strict schemas that are merged let through once they are closed, and what not.
MERGED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "one base": (
        {**OBJECT, "properties": {"n": {}}, "allOf": [{"$ref": "#/$defs/A"}], **BASES},
        [{"n": 1, "a": 1}, {"a": 1}],
        [{"n": 1}, {"n": 1, "a": 1, "z": 1}, {"n": 1, "a": "x"}],
    ),
    "a reference with properties beside it": (
        {"$ref": "#/$defs/A", "properties": {"n": {}}, "required": ["n"], **BASES},
        [{"a": 1, "n": 1}],
        [{"a": 1}, {"a": 1, "n": 1, "z": 1}],
    ),
    "two bases": (
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], **BASES},
        [{"a": 1, "b": 2}, {"a": 1}],
        [{"b": 1}, {"a": 1, "z": 1}],
    ),
    "either of two": (
        {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], **BASES},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"z": 1}],
    ),
    "branches that add": (
        {**KIND, "anyOf": [X, Y]},
        [{"kind": "a"}, {"kind": "a", "x": 1}, {"y": 2}, {}],
        [{"x": 1, "y": 1}, {"kind": "c"}, {"z": 1}],
    ),
    "a branch that says itself": (
        {**KIND, "anyOf": [{**X, "additionalProperties": True}, Y]},
        [{"kind": "a", "z": 1}, {"y": 1}],
        [{"x": "a"}],
    ),
    "closed already": (
        {
            **KIND,
            "additionalProperties": False,
            "anyOf": [{"properties": {"kind": {"const": "a"}}}, {"required": ["kind"]}],
        },
        [{"kind": "a"}, {}, {"kind": "b"}],
        [{"z": 1}],
    ),
    "required but not listed": (
        {**OBJECT, "properties": {"a": {}}, "required": ["a", "b"]},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "patterns of a base": (
        {"properties": {"a": {}}, "allOf": [{"patternProperties": {"^n_": {"type": "integer"}}}]},
        [{"a": 1, "n_x": 1}],
        [{"n_x": "a"}, {"z": 1}],
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_strict_closes_what_is_merged(case: str) -> None:
    schema, valid, invalid = MERGED[case]
    grammar = compiled(**json_schema(schema))
    assert [value for value in valid if not fits(grammar, json.dumps(value))] == []
    assert [value for value in invalid if fits(grammar, json.dumps(value))] == []


def test_negations_and_conditions_are_not_closed() -> None:
    open_part = {"properties": {"a": {"const": 1}}}
    done = closed({**OBJECT, "properties": {"b": {}}, "not": open_part, "if": open_part})
    assert done["not"] == done["if"] == open_part
    assert done["properties"] == {"b": {}, "a": True}


@pytest.mark.parametrize(
    ("body", "yes", "no"),
    [
        ({"guided_regex": r"^\d{3}-\d{4}$"}, ["123-4567"], ["123-456", "a123-4567", "^123-4567$"]),
        ({"guided_regex": r"a/b|c\$"}, ["a/b", "c$"], ["c", "a"]),
        (
            {"guided_choice": ["yes", "no", 'a"b', "zwölf\n", "\\d"]},
            ['a"b', "zwölf\n", "\\d"],
            ["y"],
        ),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, ["12"], ["a"]),
        ({"guided_json": {"enum": ["ä"]}}, ['"ä"'], ["ä"]),
        ({"guided_grammar": 'start: "a" b*\nb: /[0-9]/ ";"'}, ["a", "a1;2;"], ["b", "a1"]),
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1]}'], ["[]", "1"]),
    ],
)
def test_other_shapes(body: dict[str, Any], yes: list[str], no: list[str]) -> None:
    grammar = compiled(**body)
    assert [text for text in yes if not fits(grammar, text)] == []
    assert [text for text in no if fits(grammar, text)] == []


def test_each_part_of_a_request_is_blamed_for_its_own_fault() -> None:
    good = {"type": "function", "function": {"name": "good", "parameters": OBJECT}}
    bad = {
        "type": "function",
        "function": {"name": "bad", "strict": True, "parameters": {**OBJECT, "not": {}}},
    }
    request = validate("chat", {"messages": MESSAGES, "tools": [good, bad]})
    grammar = grammar_of(request, MODEL_FORMAT, False)
    assert grammar is not None

    with pytest.raises(GrammarFault) as fault:
        GUIDANCE.compile(grammar)

    error = grammar.parts[fault.value.part].error(str(fault.value))
    assert str(error).startswith("Invalid schema for function 'bad': ")
    assert error.param == "tools[1].function.parameters"
    assert error.code == "invalid_function_parameters"


def test_reasoning_length_needs_reasoning() -> None:
    request = validate("chat", {"messages": MESSAGES, "reasoning_length": {"min": 5}})
    with pytest.raises(RequestError, match="reasoning_length"):
        grammar_of(request, MODEL_FORMAT, False)
