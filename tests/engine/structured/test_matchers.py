"""What one answer's pattern uses up of the engine's limits harms no other's, and not its own."""

import json
from typing import Any

import numpy as np
import speaking

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.structured.constraint import Constraint
from mlx_rq.engine.structured.grammar import grammar_of
from mlx_rq.engine.structured.llguidance_backend import CompiledGrammar, Guidance
from mlx_rq.jobs.openai.validation import validate

MODEL = speaking.model()
GUIDANCE = Guidance(MODEL)
WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}
TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps, and dreams of the sea."
TOKENS = MODEL.tokenizer.encode(json.dumps(TEXT), add_special_tokens=False)


def compiled() -> CompiledGrammar:
    wanted = {"name": "X", "schema": WORDS, "strict": True}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    form = {"type": "json_schema", "json_schema": wanted}
    request = validate("chat", {**body, "response_format": form})
    grammar = grammar_of(request, model_format_of(MODEL.tokenizer), False)
    assert grammar is not None
    return GUIDANCE.compile(grammar)


def started(grammar: CompiledGrammar) -> Constraint:
    constraint = grammar.start(1_000, close=False)
    assert constraint is not None
    return constraint


def allowed(constraint: Constraint) -> list[int]:
    """Has a mask made, as before each token that a model chooses."""
    masks = np.zeros((1, (constraint.vocabulary + 31) // 32), np.int32)
    constraint.fill([(constraint, 0)], masks)
    assert constraint.fault is None
    return [int(n) for n in np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))]


def write(constraint: Constraint, tokens: list[int]) -> None:
    for token in tokens:
        assert token in allowed(constraint)
        constraint.accept(token)


def test_many_tokens_at_once_are_taken_as_one_by_one() -> None:
    """Each step has its own limits; what is taken in without masks would go by those of one."""
    grammar = compiled()
    one, cut = started(grammar), started(grammar)
    for token in TOKENS:
        one.accept(token)
    assert (one.complete, one.done, one.fault) == (True, True, None)
    cut.cut_to(TOKENS[:-3], ' sea."')
    assert (cut.complete, cut.fault) == (True, None)


def test_others_go_on_where_one_went_beyond_a_limit() -> None:
    """The engine's copies share what they learn: what breaks one broke all, and those to come."""
    grammar, undisturbed = compiled(), started(compiled())
    before, breaking = started(grammar), started(grammar)
    write(before, TOKENS[:8])
    for token in TOKENS:
        breaking.accept(token)

    write(undisturbed, TOKENS[:8])
    assert allowed(before) == allowed(undisturbed)
    write(before, TOKENS[8:])
    assert before.complete
    after = started(grammar)
    write(after, TOKENS)
    assert after.complete
