"""One attention layer over rows of a shared cache, and beside it each row by itself."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_rq.engine.kv import shared_attention as attention
from mlx_rq.engine.kv.segment import KVSegment
from mlx_rq.engine.kv.shared_cache import BatchSharedKVCache, SharedKVCache

WIDTH = 8


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


class Layer:
    """One attention layer over rows that refer to prefixes, and beside it each row by itself."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, sinks: bool = False) -> None:
        mx.random.seed(3)
        self.heads, self.kv_heads = heads, kv_heads
        self.sinks = random(heads) if sinks else None
        self.alone: list[KVCache] = []
        self.together = BatchSharedKVCache([], [])

    def part(self, tokens: int) -> KVSegment:
        shape = (1, self.kv_heads, tokens, WIDTH)
        return KVSegment(random(*shape), random(*shape))

    def rows(self, chains: Sequence[tuple[KVSegment, ...]], suffixes: Sequence[int]) -> "Layer":
        """Rows on chains of parts, each with so many tokens of its own."""
        caches = []
        for chain, tokens in zip(chains, suffixes, strict=True):
            alone, suffix = KVCache(), KVCache()
            for part in chain:
                alone.update_and_fetch(part.keys, part.values)
            if tokens:
                own = self.part(tokens)
                alone.update_and_fetch(own.keys, own.values)
                suffix.update_and_fetch(own.keys, own.values)
            caches.append(SharedKVCache(chain, suffix))
            self.alone.append(alone)
        self.together = SharedKVCache.merge(caches)
        return self

    def step(self, queries: int = 1) -> mx.array:
        """Feeds every row so many tokens; asserts that it gives what the rows give alone."""
        shape = (len(self.alone), self.kv_heads, queries, WIDTH)
        asked, keys, values = (
            random(shape[0], self.heads, queries, WIDTH),
            random(*shape),
            random(*shape),
        )
        mask = self.together.make_mask(queries, return_array=True)
        fetched = self.together.update_and_fetch(keys, values)
        got = attention.shared_attention(
            asked, *fetched, cache=self.together, scale=0.4, mask=mask, sinks=self.sinks
        )
        for row, cache in enumerate(self.alone):
            one = slice(row, row + 1)
            expected = base.scaled_dot_product_attention(
                asked[one],
                *cache.update_and_fetch(keys[one], values[one]),
                cache=cache,
                scale=0.4,
                mask=None if queries == 1 else "causal",
                sinks=self.sinks,
            )
            assert mx.abs(got[one] - expected).max().item() < 2e-6, row
        assert self.together.offset.tolist() == [cache.offset for cache in self.alone]
        assert self.together.left_padding.tolist() == self.together._padding
        return got
