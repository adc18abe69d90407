"""What is accepted strictly generates, ends and validates: random texts of random schemas."""

import json
import random
from typing import Any

import numpy as np
import speaking
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.structured.constraint import GrammarFault
from mlx_rq.engine.structured.grammar import grammar_of
from mlx_rq.engine.structured.llguidance_backend import Guidance
from mlx_rq.jobs.openai.validation import validate

MODEL = speaking.model()
MODEL_FORMAT = model_format_of(MODEL.tokenizer)
GUIDANCE = Guidance(MODEL)
MESSAGES = [{"role": "user", "content": "x"}]
BUDGET = 400

names = st.sampled_from(["a", "b", "ü d", "n"])
values = st.sampled_from(["x", "y z", "é", 1, -2, 0.5, True, None, [1], {"a": "x"}])
types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=keywords)


strings = st.builds(
    lambda bounds, more: {"type": "string", **bounds, **more},
    some(minLength=st.integers(0, 2), maxLength=st.integers(2, 6)),
    some(
        pattern=st.sampled_from(["^[a-c]+$", "x", r"^\d{2}$", r"^(a|bb)*$"]),
        format=st.sampled_from(["date", "time", "uuid", "email", "ipv4", "duration", "uri"]),
    ).filter(lambda keys: len(keys) < 2),
)
numbers = st.builds(
    lambda kind, keys: {"type": kind, **keys},
    st.sampled_from(["integer", "number"]),
    some(
        minimum=st.integers(-5, 3),
        maximum=st.integers(3, 9),
        exclusiveMaximum=st.integers(5, 9),
        multipleOf=st.sampled_from([1, 2, 0.5]),
    ),
)
leaves = st.one_of(
    strings,
    numbers,
    st.builds(lambda kind: {"type": kind}, types),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda several: {"enum": several}, st.lists(values, min_size=1, max_size=3)),
    st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/d"}]),
)


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    objects = some(
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=st.booleans() | inner,
        minProperties=st.integers(0, 1),
        dependentRequired=st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
        propertyNames=st.just({"maxLength": 2}),
    )
    arrays = some(
        items=inner,
        prefixItems=several,
        minItems=st.integers(0, 2),
        maxItems=st.integers(2, 3),
        uniqueItems=st.booleans(),
    )
    around = some(anyOf=several, oneOf=several, allOf=several, **{"not": inner, "if": inner})
    return st.one_of(
        st.builds(lambda keys: {"type": "object", **keys}, objects),
        st.builds(lambda keys: {"type": "array", **keys}, arrays),
        st.builds(lambda keys, beside: {**keys, **beside}, around, inner),
    )


schemas = st.builds(
    lambda schema, definition: {**schema, "$defs": {"d": definition}},
    st.recursive(leaves, wider, max_leaves=6),
    st.recursive(leaves, wider, max_leaves=3),
)


def random_text(compiled: Any, dice: random.Random) -> str | None:
    """Writes a text as a model could that knows nothing; None where its budget ends first."""
    constraint = compiled.start(BUDGET, close=True)
    tokens: list[int] = []
    while not constraint.done and len(tokens) < BUDGET:
        masks = np.zeros((1, (constraint.vocabulary + 31) // 32), np.int32)
        constraint.fill([(constraint, 0)], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        assert allowed.size, "nothing may come next, though the text has not ended"
        token = int(dice.choice(allowed))
        if token in MODEL.eos_token_ids:
            break
        tokens.append(token)
        constraint.accept(token)
        assert constraint.fault is None
    return MODEL.tokenizer.decode(tokens) if constraint.complete else None


@settings(max_examples=60)
@given(schema=schemas, seed=st.integers(0, 1_000))
def test_what_is_accepted_strictly_generates_ends_and_validates(schema: Any, seed: int) -> None:
    wanted = {"name": "X", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": wanted}
    request = validate("chat", {"messages": MESSAGES, "response_format": form})
    grammar = grammar_of(request, MODEL_FORMAT, False)
    assert grammar is not None
    try:
        compiled = GUIDANCE.compile(grammar)
    except GrammarFault:
        return
    stock = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    (check,) = compiled.checks
    assert check is not None
    shortest = None if compiled.shortest is None else MODEL.tokenizer.decode(compiled.shortest)
    for text in (shortest, random_text(compiled, random.Random(seed))):
        if text is not None:
            value = json.loads(text)
            assert (check.fault(value) is None) == stock.is_valid(value)
            assert stock.is_valid(value) or compiled.warnings, (value, schema)
