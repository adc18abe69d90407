"""Rows that refer to a prefix attend as rows that hold it all: layer by layer, step by step.

The oracle is mlx-lm's own attention over an ordinary cache of each row alone. Random keys and
values make every slip of a mask, a place or a weight visible.
"""

import copy
import gc
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from attending import WIDTH, Layer, random
from mlx_lm.models.cache import BatchKVCache

from mlx_rq.engine.kv import arrangement, joint_softmax, shared_cache
from mlx_rq.engine.kv import shared_attention as attention
from mlx_rq.engine.kv.segment import KVSegment, QuantizedSegment
from mlx_rq.engine.kv.shared_cache import BLOCK, BatchSharedKVCache, SharedKVCache


def tree(layer: Layer) -> tuple[KVSegment, KVSegment, KVSegment, KVSegment]:
    """Parts of two systems, and two documents."""
    return layer.part(13), layer.part(5), layer.part(40), layer.part(1)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("short", [0, arrangement.SHORT], ids=["one by one", "side by side"])
def test_every_row_attends_as_alone(
    heads: int,
    kv_heads: int,
    sinks: bool,
    queries: int,
    short: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrangement, "SHORT", short)
    layer = Layer(heads, kv_heads, sinks)
    a, b, c, d = tree(layer)
    # Two prefixes, nested ones, rows on none, in no order; suffixes of all lengths, one empty.
    layer.rows([(a, c), (b,), (), (a, d), (a, c), (a,), (b, d), ()], [3, 1, 7, 2, 0, 5, 4, 1])

    assert any(level.stacked for level in layer.together.levels) == bool(short)
    for _ in range(3):
        layer.step(queries)


@pytest.mark.parametrize(
    "chains",
    ["aaaa", "aabb", "abab", "a a ", "    "],
    ids=["one", "two in order", "two in turn", "some on none", "all on none"],
)
def test_rows_are_found_wherever_they_stand(chains: str) -> None:
    layer = Layer()
    a, b, *_ = tree(layer)
    layer.rows([{"a": (a,), "b": (b,), " ": ()}[name] for name in chains], [0, 2, 1, 3])

    layer.step()
    layer.step(3)


def test_rows_without_a_token_of_their_own_start_from_the_prefix() -> None:
    layer = Layer()
    a, _, c, _ = tree(layer)
    layer.rows([(a, c), (a,), (a,)], [0, 0, 0])
    assert layer.together.keys is None
    assert layer.together.offset.tolist() == [53, 13, 13]

    layer.step(2)
    layer.step()


def test_prompts_of_several_lengths_are_padded_on_the_right_and_rolled() -> None:
    layer = Layer()
    a, b, *_ = tree(layer)
    layer.rows([(a,), (b,), ()], [0, 2, 1])
    lengths, shape = [5, 2, 3], (3, layer.kv_heads, 5, WIDTH)
    keys, values = random(*shape), random(*shape)
    for row, (cache, length) in enumerate(zip(layer.alone, lengths, strict=True)):
        own = (slice(row, row + 1), slice(None), slice(0, length))
        cache.update_and_fetch(keys[own], values[own])

    layer.together.prepare(lengths=lengths, right_padding=[5 - length for length in lengths])
    layer.together.update_and_fetch(keys, values)
    layer.together.finalize()

    assert layer.together.offset.tolist() == [18, 9, 4]
    layer.step()


def test_long_prefills_go_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    a, _, c, _ = tree(layer)
    layer.rows([(a, c), (a,), (a, c)], [1, 0, 2])
    monkeypatch.setattr(joint_softmax, "SCORES", 7 * layer.kv_heads * len(c))

    layer.step(9)


@pytest.mark.parametrize("scores", [1, 60, 300])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_long_suffixes_go_by_pieces(
    monkeypatch: pytest.MonkeyPatch, scores: int, sinks: bool
) -> None:
    layer = Layer(sinks=sinks)
    a, *_ = tree(layer)
    layer.rows([(a,), (), (a,)], [5, 0, 2])
    monkeypatch.setattr(joint_softmax, "SCORES", scores)
    attend, most = joint_softmax.Rows._attend, 0

    def watched(self: joint_softmax.Rows, queries: mx.array, *rest: Any) -> mx.array:
        nonlocal most
        most = max(most, queries.size // WIDTH * (self.keys.shape[2] + len(a)))
        return attend(self, queries, *rest)

    monkeypatch.setattr(joint_softmax.Rows, "_attend", watched)

    layer.step(11)

    one_position = len(layer.alone) * layer.heads * (layer.together._idx + len(a))
    assert 0 < most <= max(scores, one_position // layer.kv_heads)


def test_a_lone_row_goes_by_pieces_under_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    a, *_ = tree(layer)
    row = SharedKVCache.merge([SharedKVCache((a,))])
    whole = [mx.concatenate([part, random(1, 2, 9, WIDTH)], 2) for part in (a.keys, a.values)]
    own = [array[:, :, 13:] for array in whole]
    asked = random(1, 4, 9, WIDTH)
    monkeypatch.setattr(joint_softmax, "SCORES", 100)

    got = attention.shared_attention(asked, *row.update_and_fetch(*own), row, 0.4, "causal")

    expected = mx.fast.scaled_dot_product_attention(asked, *whole, scale=0.4, mask="causal")
    assert mx.abs(got - expected).max().item() < 2e-6


def test_rows_come_and_go() -> None:
    layer, more = Layer(), Layer()
    a, b, c, _ = tree(layer)
    layer.rows([(a, c), (b,), (a,), (), (a, c)], [3, 9, 2, 5, 0])
    layer.step()

    keep = [0, 2, 4]
    layer.together.filter(keep)
    layer.alone = [layer.alone[row] for row in keep]
    layer.step()

    more.rows([(b,), (a,), ()], [0, 4, 1])
    layer.together.extend(more.together)
    layer.alone += more.alone
    assert layer.together.chains == [(a, c), (a,), (a, c), (b,), (a,), ()]
    for _ in range(2):
        layer.step()

    layer.together.filter([5])
    layer.alone = [layer.alone[5]]
    assert layer.together.levels == ()
    layer.step()


def test_empty_batches_take_rows_in_and_are_taken_in() -> None:
    for first, second in ([0, 0], [3, 1]), ([2, 4], [0, 0]), ([0, 0], [0, 0]):
        layer, more = Layer(), Layer()
        a, b, *_ = tree(layer)
        layer.rows([(a,), (a,)], first)
        more.rows([(b,), (a,)], second)

        layer.together.extend(more.together)
        layer.alone += more.alone

        layer.step()
        layer.step(2)


def test_a_batch_of_another_kind_is_not_taken_in() -> None:
    layer = Layer()
    a, *_ = tree(layer)
    layer.rows([(a,)], [1])
    with pytest.raises(TypeError, match="shares prefixes by a BatchKVCache"):
        layer.together.extend(BatchKVCache([0]))


@pytest.mark.parametrize("suffixes", [[3, 1, 0], [0, 0, 0]])
def test_a_row_taken_out_goes_on_alone(suffixes: list[int]) -> None:
    layer = Layer()
    a, _, c, _ = tree(layer)
    layer.rows([(a,), (a, c), ()], suffixes)
    if any(suffixes):
        layer.step()

    rows = [layer.together.extract(row) for row in range(3)]

    assert [row.chain for row in rows] == [(a,), (a, c), ()]
    assert [row.offset for row in rows] == [cache.offset for cache in layer.alone]
    for row, cache in zip(rows, layer.alone, strict=True):
        keys, values = random(1, layer.kv_heads, 3, WIDTH), random(1, layer.kv_heads, 3, WIDTH)
        asked = random(1, layer.heads, 3, WIDTH)
        alone = row.merge([row])
        mask = alone.make_mask(3, return_array=True)
        fetched = alone.update_and_fetch(keys, values)
        got = attention.shared_attention(asked, *fetched, cache=alone, scale=0.4, mask=mask)
        fetched = cache.update_and_fetch(keys, values)
        expected = mx.fast.scaled_dot_product_attention(asked, *fetched, scale=0.4, mask="causal")
        assert mx.abs(got - expected).max().item() < 2e-6
        assert alone.offset.tolist() == [cache.offset]


def test_suffixes_are_trimmed_and_prefixes_are_not() -> None:
    layer = Layer()
    a, *_ = tree(layer)
    layer.rows([(a,), (a,), ()], [4, 3, 6])
    layer.step()

    assert layer.together.trim(2) == 2
    for cache in layer.alone:
        cache.trim(2)
    layer.step()

    assert layer.together.trim(100) == 3  # what the shortest suffix has
    for cache in layer.alone:
        cache.trim(3)
    layer.step()


def test_a_copy_leaves_the_original_alone_and_copies_no_prefix() -> None:
    layer = Layer()
    a, b, *_ = tree(layer)
    layer.rows([(a,), (b,)], [2, 1])
    mx.eval(layer.together.state)
    before = layer.together.keys.tolist()

    other = copy.deepcopy(layer.together)
    assert other.arrangement is layer.together.arrangement  # nobody writes to it
    other.filter([1])
    other.update_and_fetch(random(1, 2, 1, WIDTH), random(1, 2, 1, WIDTH))
    mx.eval(other.state)

    assert other.chains[0][0] is b
    assert layer.together.keys.tolist() == before
    layer.step()


def test_a_prefix_is_in_no_rows_bytes() -> None:
    layer = Layer()
    a, _, c, _ = tree(layer)
    layer.rows([(a, c)] * 3, [2, 1, 0])
    token = 2 * layer.kv_heads * WIDTH * 4  # keys and values, float32

    assert (a.nbytes, c.nbytes) == (13 * token, 40 * token)
    assert layer.together.nbytes == 3 * 2 * token
    row = layer.together.extract(0)
    assert row.nbytes == 2 * token
    assert not row.empty()


def test_suffixes_grow_by_blocks_and_keep_nothing_of_rows_that_went() -> None:
    layer = Layer()
    a, *_ = tree(layer)
    layer.rows([(a,)] * 4, [3 * BLOCK, 10, 2, 0])
    sizes = []
    for _ in range(BLOCK + 2):
        layer.step()
        sizes.append(layer.together.keys.shape[2])
    assert sum(before != after for before, after in pairwise(sizes)) == 1

    layer.together.filter([1, 3])  # the longest goes
    layer.alone = [layer.alone[1], layer.alone[3]]

    used = 10 + BLOCK + 2
    assert used <= layer.together.keys.shape[2] < used + BLOCK
    layer.step()


def test_part_of_a_longer_array_holds_only_its_own() -> None:
    whole = random(1, 2, 4096, WIDTH)
    mx.eval(whole)
    part = KVSegment(whole[:, :, 8:24], whole[:, :, 8:24])
    mx.eval(part.keys, part.values)
    del whole
    gc.collect()  # else it may come when only the part is to be freed
    mx.clear_cache()
    held = mx.get_active_memory()

    del part

    assert held - mx.get_active_memory() <= 2 * 2 * 16 * WIDTH * 4 + 2 * 16384


def test_windows_are_refused() -> None:
    layer = Layer()
    a, *_ = tree(layer)
    layer.rows([(a,)], [1])
    with pytest.raises(ValueError, match="sliding window"):
        layer.together.make_mask(1, window_size=16)


@pytest.mark.parametrize("scores", [1, 6], ids=["", "high scores"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("parts", [1, 4])
def test_short_floats_lose_what_is_lost_by_writing_the_answer(
    parts: int, dtype: mx.Dtype, scores: float
) -> None:
    mx.random.seed(5)
    arrays = random(parts, 2, 600, 32), random(4, 2, 9, 32), scores * random(4, 4, 1, 32)
    prefix, own, asked = (array.astype(dtype) for array in arrays)
    copied = mx.concatenate([mx.repeat(prefix, 4 // parts, axis=0), own], axis=2)
    exact = mx.fast.scaled_dot_product_attention(
        asked.astype(mx.float32), *[copied.astype(mx.float32)] * 2, scale=0.2
    )
    held = [KVSegment(part, part) for part in mx.split(prefix, parts)]
    batch = BatchSharedKVCache([(part,) for part in held for _ in range(4 // parts)], [0] * 4)
    assert batch.levels[0].stacked == (parts == 4)
    shared = attention.shared_attention(asked, *batch.update_and_fetch(own, own), batch, 0.2, None)

    def error(found: mx.array) -> float:
        return float(mx.sqrt(mx.square(found.astype(mx.float32) - exact).mean()).item())

    assert shared.dtype == dtype
    # 16-bit scores would make it 2.7 times at least, high ones 4.6 times.
    assert error(shared) <= 1.6 * error(exact.astype(dtype))


BENCH = Path(__file__).parents[3] / "bench" / "shared_prefix.py"


def test_attention_over_prefixes_launches_few_operations() -> None:
    count = runpy.run_path(str(BENCH))["operations_a_layer"]

    assert count([64], mx.float32) <= 6
    # Parts side by side: two copies, in the place of two products for each.
    for lengths in [64] * 3, [64] * 8, range(64, 72):
        assert count(lengths, mx.float32) <= 8
        assert count(lengths, mx.float32, mixed=True) <= 12
        # In 16 bits, what is multiplied for scores is made longer first, weights shorter again.
        assert count(lengths, mx.bfloat16) <= 12
    assert count([64], mx.bfloat16) <= 10


@pytest.mark.parametrize(
    ("chains", "stacked"),
    [
        ("abc", True),
        ("aabbcc", True),
        ("abcabc", True),
        ("aabbc", True),  # one row is computed twice
        ("ab c", True),  # one stands on nothing
        ("aaabc", False),  # four would be
        ("aabb", False),  # two parts are quicker one by one
        ("abL", False),  # one is long
        ("abQ", False),  # one is in few bits
    ],
)
def test_short_parts_are_multiplied_side_by_side(chains: str, stacked: bool) -> None:
    layer = Layer()
    a, b, c, _ = tree(layer)
    long = layer.part(arrangement.SHORT // (layer.kv_heads * WIDTH * 4) + 1)
    few = QuantizedSegment(random(1, 2, 9, 32), random(1, 2, 9, 32), 8)
    names = {"a": (a,), "b": (b,), "c": (c,), "L": (long,), "Q": (few,), " ": ()}
    rows = [names[name] for name in chains]

    (level,) = BatchSharedKVCache(rows, [0] * len(rows)).levels

    assert level.stacked == stacked
    if not {*chains} & {*"LQ"}:
        layer.rows(rows, [*range(len(rows))]).step()


def test_nested_parts_are_stacked_level_by_level() -> None:
    layer = Layer()
    a, b, c, d = tree(layer)
    layer.rows([(a, b), (a, c), (a, d), (a, c)], [1, 0, 2, 3])

    assert [level.stacked for level in layer.together.levels] == [False, True]
    assert [len(level.groups) for level in layer.together.levels] == [1, 3]
    layer.step()
    layer.step(2)


def test_the_layers_of_a_step_make_its_mask_once() -> None:
    mask = mx.array([True, False])

    assert joint_softmax.additive(mask) is joint_softmax.additive(mask)
    assert joint_softmax.additive(mx.array([False, True]))[0].item() < -1e38
    assert joint_softmax.additive(mask)[0].item() == 0


def test_masks_of_the_models_own_are_kept() -> None:
    layer = Layer()
    a, *_ = tree(layer)
    layer.rows([(a,), (a,)], [3, 3])
    keys, values = layer.together.keys_and_values()
    asked, bias = random(2, 4, 1, WIDTH), random(2, 4, 1, 3)

    got = attention.shared_attention(asked, keys, values, layer.together, 0.4, bias)

    for row, cache in enumerate(layer.alone):
        one = slice(row, row + 1)
        whole = mx.concatenate([mx.zeros((1, 4, 1, 13)), bias[one]], axis=-1)
        expected = mx.fast.scaled_dot_product_attention(
            asked[one], *cache.keys_and_values(), scale=0.4, mask=whole
        )
        assert mx.abs(got[one] - expected).max().item() < 2e-6


def test_keys_tell_whose_they_are_as_long_as_they_live() -> None:
    cache = SharedKVCache.merge([SharedKVCache()])
    keys, _ = cache.update_and_fetch(mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
    name = id(keys)

    assert shared_cache.cache_behind(keys) is cache
    assert shared_cache.cache_behind(mx.zeros((1, 2, 3, 4))) is None
    del keys
    assert name not in shared_cache._behind


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(("bits", "slack"), [(8, 0.025), (4, 0.4)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_parts_in_few_bits_are_attended_to_as_what_they_stand_for(
    dtype: mx.Dtype, bits: int, slack: float, queries: int
) -> None:
    mx.random.seed(3)

    def some(*shape: int) -> mx.array:
        return random(*shape).astype(dtype)

    keys, values, own, asked = some(1, 2, 90, 64), some(1, 2, 90, 64), some(3, 2, 5, 64), some(
        3, 4, queries, 64
    )  # fmt: skip
    part = QuantizedSegment(keys, values, bits)
    assert mx.abs(part.keys - keys).max().item() <= slack
    assert part.nbytes == 2 * 2 * 90 * 64 * (bits + 1) // 8  # a bit each for scales and biases

    def attended(part: KVSegment) -> mx.array:
        rows = BatchSharedKVCache([(part,), (), (part,)], [0, 0, 0])
        mask = mx.zeros((3, 1, queries, 5))
        return attention.shared_attention(
            asked, *rows.update_and_fetch(own, own), rows, 0.1, mask
        ).astype(mx.float32)

    got, meant = attended(part), attended(KVSegment(part.keys, part.values))
    assert mx.abs(got - meant).max().item() < (1e-5 if dtype == mx.float32 else 0.02)
    whole = attended(KVSegment(keys, values))
    assert 0 < mx.abs(got - whole).mean().item() < slack
