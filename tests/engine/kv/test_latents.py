"""Rows of a layer that keeps latents attend on prefixes held once as they do alone.

The oracle is mlx-lm's layer of DeepSeek V3 over an ordinary cache of each row, with mlx-lm's own
attention.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, deepseek_v3
from mlx_lm.models.cache import KVCache
from tiny import tiny_model

from mlx_rq.engine.kv.segment import LatentSegment, QuantizedLatentSegment
from mlx_rq.engine.kv.shared_attention import shared_attention
from mlx_rq.engine.kv.shared_cache import BatchSharedKVCache, SharedKVCache
from mlx_rq.engine.kv.sharing import built_on, frozen

WIDTH = 64
TOKEN = (32 + 8) * 4
"""Bytes of a token in the layer: a latent and a rotated key, in float32."""


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek_v3, "scaled_dot_product_attention", shared_attention)
    mx.random.seed(3)


def layer(inputs: mx.array, cache: Any) -> mx.array:
    attention = tiny_model("deepseek_v3").model.layers[0].self_attn
    mask = base.create_attention_mask(inputs, cache, return_array=True)
    found: mx.array = attention(inputs, mask, cache)
    return found


def some(rows: int, tokens: int) -> mx.array:
    return mx.random.normal((rows, tokens, WIDTH))


class Rows:
    """Rows on chains of parts, each with so many tokens of its own; beside it each row alone."""

    def __init__(self, prefixes: Sequence[Sequence[mx.array]], suffixes: Sequence[int]) -> None:
        self.alone, rows = [], []
        parts: dict[int, LatentSegment] = {}
        for prefix, tokens in zip(prefixes, suffixes, strict=True):
            whole, caches = KVCache(), [KVCache()]
            chain: tuple[LatentSegment, ...] = ()
            for inputs in prefix:
                layer(inputs, whole)
                layer(inputs, caches[0])
                held, _ = frozen(caches, [SharedKVCache(chain)])
                part = parts.setdefault(id(inputs), held[0].chain[-1])
                chain = (*chain, part)
                caches = built_on([SharedKVCache(chain)])
            suffix = KVCache()
            if tokens:
                below = whole.offset
                layer(some(1, tokens), whole)
                suffix.update_and_fetch(*(array[:, :, below:] for array in whole.keys_and_values()))
            self.alone.append(whole)
            rows.append(SharedKVCache(chain, suffix))
        self.together = SharedKVCache.merge(rows)

    def step(self, tokens: int = 1) -> None:
        inputs = some(len(self.alone), tokens)
        got = layer(inputs, self.together)
        for row, cache in enumerate(self.alone):
            expected = layer(inputs[row : row + 1], cache)
            assert mx.abs(got[row] - expected[0]).max().item() < 2e-4, row
        assert self.together.offset.tolist() == [cache.offset for cache in self.alone]

    def keep(self, rows: list[int]) -> None:
        self.together.filter(rows)
        self.alone = [self.alone[row] for row in rows]


def prefixes() -> tuple[mx.array, mx.array, mx.array]:
    return some(1, 13), some(1, 5), some(1, 40)


def test_rows_attend_as_alone_and_come_and_go() -> None:
    a, b, c = prefixes()
    rows = Rows([(a, c), (b,), (), (a,), (a, c)], [3, 1, 7, 0, 2])
    assert {type(part) for chain in rows.together.chains for part in chain} == {LatentSegment}
    assert len({part for chain in rows.together.chains for part in chain}) == 3
    for tokens in (1, 4, 1, 1):
        rows.step(tokens)

    rows.keep([0, 2, 4])
    rows.step()
    more = Rows([(b,), ()], [6, 0])
    rows.together.extend(more.together)
    rows.alone += more.alone
    for tokens in (1, 3, 1):
        rows.step(tokens)
    rows.keep([1, 4])  # nobody stands on a prefix any more
    rows.step()


def test_prompts_of_unequal_lengths_are_padded_and_rolled() -> None:
    a, b, _ = prefixes()
    rows, lengths = Rows([(a,), (b,), ()], [0, 2, 1]), [5, 2, 3]
    inputs = some(3, 5)
    for row, (cache, length) in enumerate(zip(rows.alone, lengths, strict=True)):
        layer(inputs[row : row + 1, :length], cache)

    rows.together.prepare(lengths=lengths, right_padding=[5 - length for length in lengths])
    layer(inputs, rows.together)
    rows.together.finalize()

    rows.step()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_taken_out_goes_on_alone(tokens: int) -> None:
    a, _, c = prefixes()
    rows = Rows([(a, c), (a,)], [3, 1])
    row, inputs = rows.together.extract(0), some(1, tokens)

    alone = row.merge([row])

    got = layer(inputs, alone)

    assert mx.abs(got - layer(inputs, rows.alone[0])).max().item() < 2e-4
    assert alone.offset.tolist() == [rows.alone[0].offset] == [56 + tokens]


def test_a_prefix_is_held_once() -> None:
    a, *_ = prefixes()
    rows = Rows([(a,)] * 3, [2, 2, 2])

    assert rows.together.chains[0][0].nbytes == 13 * TOKEN
    assert rows.together.nbytes == 3 * 2 * TOKEN


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_short_floats_lose_no_more_than_mlx_lm_does(dtype: mx.Dtype) -> None:
    latents, rotated = mx.random.normal((1, 1, 600, 32)), mx.random.normal((1, 1, 600, 8))
    queries, own = 3 * mx.random.normal((4, 4, 1, 32)), mx.random.normal((4, 1, 9, 40))
    asked = mx.random.normal((4, 4, 1, 8))

    def attended(dtype: mx.Dtype, *, share: bool) -> mx.array:
        part = LatentSegment(latents.astype(dtype), rotated.astype(dtype))
        row = SharedKVCache((part,))
        if not share:
            (row,) = built_on([row])
        batch = row.merge([row] * 4)
        mine = own.astype(dtype)
        keys, positions = batch.update_and_fetch(mine[:, :, :1, :32], mine[:, :, :1, 32:])
        scores = (asked.astype(dtype) * 0.2) @ positions.swapaxes(-1, -2)
        return shared_attention(queries.astype(dtype), keys, keys, batch, 0.2, scores)

    exact = attended(mx.float32, share=False)

    def error(share: bool) -> float:
        found = attended(dtype, share=share)
        assert found.dtype == dtype
        return float(mx.sqrt(mx.square(found.astype(mx.float32) - exact).mean()).item())

    assert mx.abs(attended(mx.float32, share=True) - exact).max().item() < 1e-5
    assert error(share=True) <= error(share=False)


@pytest.mark.parametrize(("bits", "slack"), [(8, 0.035), (4, 0.4)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_latents_in_few_bits_are_attended_to_as_what_they_stand_for(
    dtype: mx.Dtype, bits: int, slack: float
) -> None:
    def random(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    latents, rotated = random(1, 1, 90, 64), random(1, 1, 90, 8)
    own, queries, asked = random(3, 1, 5, 72), random(3, 4, 1, 64), random(3, 4, 1, 8)
    part = QuantizedLatentSegment(latents, rotated, bits)
    assert 0 < mx.abs(part.keys - latents).max().item() <= slack
    assert part.values.tolist() == rotated.tolist()
    # A bit each for the scales and biases of latents.
    assert part.nbytes == 90 * 64 * (bits + 1) // 8 + rotated.nbytes

    def attended(part: Any) -> mx.array:
        rows = BatchSharedKVCache([(part,), (), (part,)], [0, 0, 0])
        rows.update_and_fetch(own[:, :, :4, :64], own[:, :, :4, 64:])
        keys, positions = rows.update_and_fetch(own[:, :, 4:, :64], own[:, :, 4:, 64:])
        scores = (asked * 0.1) @ positions.swapaxes(-1, -2)
        return shared_attention(queries, keys, keys, rows, 0.1, scores).astype(mx.float32)

    got, meant = attended(part), attended(LatentSegment(part.keys, part.values))
    assert mx.abs(got - meant).max().item() < (1e-5 if dtype == mx.float32 else 0.02)
    whole = attended(LatentSegment(latents, rotated))
    assert 0 < mx.abs(got - whole).mean().item() < slack
