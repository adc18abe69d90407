"""What a trial of a model sees of what goes wrong in batches."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache
from mlx_lm.models.cache import BatchKVCache
from tiny import tiny_model

from mlx_rq.engine.kv.trial import Batching, verdict_on


def no_roll(x: mx.array, shifts: mx.array, axis: int) -> mx.array:
    return x


def keep_the_first(self: BatchKVCache, batch_indices: list[int]) -> None:
    self.keys, self.values = self.keys[: len(batch_indices)], self.values[: len(batch_indices)]
    self.offset = self.offset[batch_indices]
    self.left_padding = self.left_padding[batch_indices]


def put_before(self: Any, other: BatchKVCache) -> None:
    extend(other, self)
    self.state = other.state


extend = BatchKVCache.extend


@pytest.mark.parametrize(
    ("where", "name", "fault", "batching"),
    [
        (cache, "dynamic_roll", no_roll, Batching.EQUAL),
        (BatchKVCache, "filter", keep_the_first, Batching.ALONE),
        (BatchKVCache, "extend", put_before, Batching.ALONE),
    ],
    ids=["unequal prompts", "one leaves", "others join"],
)
def test_what_goes_wrong_in_a_batch_is_seen(
    where: Any, name: str, fault: Any, batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").model
    assert verdict_on(model).batching is Batching.ANY

    monkeypatch.setattr(where, name, fault)
    found, why, _ = verdict_on(model)

    assert found is batching
    assert "it would change the logits, " in why
