"""Layers that keep several caches of tokens: a prefix is held once, and each row fetched whole."""

import json
import re
from pathlib import Path
from typing import Any

import families
import pytest
from driving import Body, finish, greedy_text, run, task, texts
from tiny import random_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.kv.segment import WholeSegment
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import measure_kv

TOPK = 8
"""Tokens that the index of a model leaves: far fewer than its rows have."""


@pytest.fixture(
    params=["deepseek_v32", "glm_moe_dsa", "longcat_flash", "longcat_flash_ngram"], scope="module"
)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    configs = json.loads(Path(families.__file__).with_name("family_configs.json").read_text())
    sizes = {**configs["every model"], **configs[request.param], "index_topk": TOPK}
    return random_model(request.param, sizes)


def bodies(prefix: int = 60) -> list[Body]:
    rows: list[Body] = [
        {"prompt": [*range(prefix), i, *range(5 * i)], "max_tokens": 8, "temperature": 0}
        for i in range(4)
    ]
    alone: Body = {"prompt": [7, 9], "max_tokens": 20, "temperature": 0}
    nested: list[Body] = [
        {"prompt": [*range(prefix), *range(90, 130), i], "max_tokens": 6, "temperature": 0}
        for i in range(3)
    ]
    return [*rows, alone, *nested]


def test_rows_on_a_prefix_answer_as_alone(model: LoadedModel) -> None:
    _, engine = run(model, [], batch_size=8)
    prefixes = engine._running.prefix_cache
    prefixes._share_from = 1  # it would not by itself
    asked = bodies()
    engine.add([task(str(i), body) for i, body in enumerate(asked)])
    sharing, results = 0, dict[str, Any]()
    while len(results) < len(asked):
        results.update((one.id, one.result) for one in engine.step())
        sharing = max(sharing, sum(one.shared is not None for one in engine._running))
        engine.check()

    for i, body in enumerate(asked):
        assert texts(results[str(i)]) == [greedy_text(model, body)]
    assert sharing > 1


def test_what_is_told_is_that_they_are_copied(model: LoadedModel) -> None:
    engine = MLXEngine(model, EngineOptions(kv_bits=8))

    assert re.fullmatch(
        r"copied into each sequence, which is quicker; held once where there is no memory for that "
        r"\(\d of \d layers\); not in 8 bits \(no layer can be\)",
        engine.prefix_sharing,
    )


def test_copies_are_quicker_and_taken_where_there_is_memory(model: LoadedModel) -> None:
    asked = bodies(200)[:4]
    cost = measure_kv(model.model)
    assert cost.shareable == cost.per_token
    token = cost.per_token

    def sharing(kv_tokens: int) -> int:
        _, engine = run(model, [], kv_bytes=kv_tokens * token, reserve=16, batch_size=4)
        engine.add([task(str(i), body) for i, body in enumerate(asked)])
        results = finish(engine, len(asked))
        for i, body in enumerate(asked):
            assert texts(results[str(i)]) == [greedy_text(model, body)]
        (prefix,) = engine._running.prefix_cache
        parts = [part for layer in prefix.caches for part in getattr(layer, "chain", ())]
        in_lists = [one for layer in prefix.caches for one in getattr(layer, "caches", ())]
        parts += [part for cache in in_lists for part in cache.chain]
        assert parts
        assert all(isinstance(part, WholeSegment) for part in parts)
        return engine.totals.sequences_sharing

    assert sharing(10_000) == 0
    assert sharing(1000) > 0
