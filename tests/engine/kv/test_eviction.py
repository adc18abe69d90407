"""Which prefix is evicted: the one whose next use is the furthest, and no more than must be."""

from functools import cache
from itertools import count
from typing import Any

import mlx.core as mx
from effort import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.prefix_cache import PrefixCache
from mlx_rq.engine.kv.prefix_key import key_of

LENGTH = 4
SIZE = LENGTH * 2 * 4  # keys and values of one float each


class OneFloat:
    """A model of one layer, whose keys and values are a zero each."""

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        zeros = mx.zeros((1, 1, tokens.shape[1], 1))
        cache[0].update_and_fetch(zeros, zeros)


def prefixes() -> PrefixCache:
    clock = count()
    model: Any = OneFloat()
    return PrefixCache(model, chunk=LENGTH, clock=lambda: next(clock))


def key(name: int) -> bytes:
    return key_of([name + 1] * LENGTH)


def fewest_built(order: tuple[int, ...], room: int) -> int:
    """How many prefixes have to be built at least, whatever is evicted: all ways are tried."""

    @cache
    def least(at: int, held: frozenset[int]) -> int:
        if at == len(order):
            return 0
        if order[at] in held:
            return least(at + 1, held)
        kept = [held] if len(held) < room else [held - {out} for out in held]
        return 1 + min(least(at + 1, rest | {order[at]}) for rest in kept)

    return least(0, frozenset())


@settings(max_examples=150)
@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple), room=st.integers(1, 4)
)
def test_no_order_of_evictions_builds_fewer_again(order: tuple[int, ...], room: int) -> None:
    held = prefixes()
    built = 0
    for at, name in enumerate(order):
        rest = [key(later) for later in order[at:]]
        if not held.holds(key(name)):
            needed = {later: float(rest.index(later)) for later in rest}
            assert held.evict((room - 1) * SIZE, next_use=lambda needed=needed: needed)
            built += 1
        prefix = held.build(key(name))
        assert prefix is not None
        held.use(prefix, 1)

    assert built == fewest_built(order, room)


def test_what_is_needed_next_stays_however_little_it_was_used() -> None:
    held = prefixes()
    often, never = held.build(key(0)), held.build(key(1))
    assert often is not None
    assert never is not None
    held.use(often, 100)

    assert held.evict(SIZE, next_use=lambda: {key(1): 0.0})
    assert not held.holds(key(0))
    assert held.holds(key(1))


def test_what_is_needed_goes_only_where_it_may() -> None:
    held = prefixes()
    held.build(key(0))

    assert not held.evict(0, next_use=lambda: {key(0): 0.0}, keep_needed=True)
    assert held.holds(key(0))
    assert held.evict(0, next_use=lambda: {key(0): 0.0})
    assert not held.holds(key(0))


def test_prefixes_may_be_nested_deeper_than_functions() -> None:
    chain = [CachedPrefix(key_of([0]), [], 0, 0.0)]
    for depth in range(2, 2000):
        chain.append(CachedPrefix(key_of([0] * depth), [], 0, 0.0, below=chain[-1]))

    assert chain[-1].chain == tuple(chain)


def test_what_is_needed_of_deep_nests_is_found_soon() -> None:
    held, below = prefixes(), None
    for depth in range(1, 2001):
        below = CachedPrefix(key_of([0] * depth), [], 1, 0.0, below=below)
        held._held[below.key] = below
    needed = dict.fromkeys(held._held, 0.0)

    with at_most(20):
        for _ in range(20):
            assert not held.evict(0, next_use=lambda: needed, keep_needed=True)
