"""Runs tasks through an engine, and knows by itself what a model says."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Task
from mlx_rq.engine.kv.shared_cache import BLOCK
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.validation import kind_of, validate

Body = dict[str, Any]

AHEAD = BatchKVCache.step - 1
"""Slots for tokens to come that a sequence of a batch is counted with."""
AHEAD_SHARING = BLOCK - 1
"""The same beside sequences that share a prefix."""


def task(task_id: str, body: Body, rank: int = 1) -> Task:
    """A task as the worker would make it."""
    return Task(task_id, validate(kind_of(body), body), rank=rank, model=body.get("model", ""))


def finish(engine: MLXEngine, wanted: int, limit: int = 20_000) -> dict[str, Any]:
    """Steps until so many tasks have ended; gives their results by id. Checks the engine then."""
    results: dict[str, Any] = {}
    for _ in range(limit):
        if len(results) >= wanted:
            engine.check()
            return results
        results.update((outcome.id, outcome.result) for outcome in engine.step())
    raise AssertionError(f"only {len(results)} of {wanted} tasks ended")


def run(model: LoadedModel, bodies: Sequence[Body], **options: Any) -> tuple[list[Any], MLXEngine]:
    """Generates all bodies with one engine; gives the results in their order, and the engine.

    Three sequences share a prefix however short it is; longer ones are for benchmarks.
    """
    engine = MLXEngine(
        model, EngineOptions(**{"batch_size": 4, "chunk": 32, "share_from": 1, **options})
    )
    results = {
        outcome.id: outcome.result
        for outcome in engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    }
    results.update(finish(engine, len(bodies) - len(results)))
    return [results[str(i)] for i in range(len(bodies))], engine


def texts(result: Any) -> list[str]:
    """The texts of a result's choices."""
    assert "error" not in result, result
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in result["choices"]
    ]


def greedy(model: LoadedModel, prompt: Sequence[int], budget: int) -> list[int]:
    """What the model says when it is asked alone, by the plainest loop there is."""
    caches = make_prompt_cache(model.model)
    tokens: list[int] = []
    inputs = list(prompt)
    while len(tokens) < budget:
        logits = model.model(mx.array([inputs]), cache=caches)[0, -1]
        token = int(mx.argmax(logits).item())
        if token in model.eos_token_ids:
            break
        tokens.append(token)
        inputs = [token]
    return tokens


def greedy_text(model: LoadedModel, body: Body) -> str:
    """The text of `greedy` for a completion whose prompt is token ids."""
    tokens = greedy(model, body["prompt"], body["max_tokens"])
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True))
