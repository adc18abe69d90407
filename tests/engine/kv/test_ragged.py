"""Rows that take in unequal numbers of tokens in one step are what they are alone.

The oracle is mlx-lm's own attention over an ordinary cache of each row. Random keys and values make
every slip of a slot, a position or a mask visible.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from attending import WIDTH, Layer, random
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import base

from mlx_rq.engine.kv import ragged
from mlx_rq.engine.kv import shared_attention as attention
from mlx_rq.engine.kv.ragged import RaggedStep, longest_run, ragged_step


def take_in(layer: Layer, counts: Sequence[int]) -> None:
    """Feeds each row so many tokens at once; asserts that each gives what the row gives alone."""
    cache, total = layer.together, sum(counts)
    asked = random(total, layer.heads, 1, WIDTH)
    keys, values = random(total, layer.kv_heads, 1, WIDTH), random(total, layer.kv_heads, 1, WIDTH)
    positions = [alone.offset for alone in layer.alone]
    with ragged_step([cache], counts) as step:
        rows, places = step.rows.tolist(), step.places.tolist()
        at = [positions[row] + place for row, place in zip(rows, places, strict=True)]
        assert cache.offset.tolist() == at
        mask = cache.make_mask(1, return_array=True)
        fetched = cache.update_and_fetch(keys, values)
        got = attention.shared_attention(asked, *fetched, cache=cache, scale=0.4, mask=mask)
    for token in sorted(range(total), key=places.__getitem__):
        one, alone = slice(token, token + 1), layer.alone[rows[token]]
        expected = base.scaled_dot_product_attention(
            asked[one],
            *alone.update_and_fetch(keys[one], values[one]),
            cache=alone,
            scale=0.4,
            mask=None,
        )
        assert mx.abs(got[one] - expected).max().item() < 2e-6, token
    last = [max(places[token] for token in range(total) if rows[token] == row) for row in set(rows)]
    assert [places[token] for token in step.last.tolist()] == last
    assert cache.offset.tolist() == [alone.offset for alone in layer.alone]


def layer_of(suffixes: Sequence[int], *, share: bool) -> Layer:
    layer = Layer()
    chain = (layer.part(5),)
    chains = [chain if share and row % 2 == 0 else () for row in range(len(suffixes))]
    return layer.rows(chains, suffixes)


def keep(layer: Layer, rows: Sequence[int]) -> None:
    layer.together.filter(rows)
    layer.alone = [layer.alone[row] for row in rows]


def join(layer: Layer, suffixes: Sequence[int]) -> None:
    others = layer_of(suffixes, share=True)
    layer.together.extend(others.together)
    layer.alone += others.alone


ACTS = st.one_of(
    st.lists(st.integers(1, 40), min_size=8, max_size=8),
    st.sampled_from(["step", "leave", "join", "trim", "extract"]),
)


@settings(max_examples=40)
@given(
    suffixes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    share=st.booleans(),
    acts=st.lists(ACTS, min_size=1, max_size=8),
)
def test_whatever_rows_take_in_and_whoever_comes_and_goes(
    suffixes: list[int], share: bool, acts: list[list[int] | str]
) -> None:
    layer = layer_of(suffixes, share=share)
    for act in acts:
        rows = len(layer.alone)
        if isinstance(act, list):
            take_in(layer, (act * rows)[:rows])
        elif act == "leave" and rows > 1:
            keep(layer, list(range(rows))[1:])
        elif act == "join" and rows < 6:
            join(layer, [1, 6])
        elif act == "trim":
            forgotten = layer.together.trim(1)
            for alone in layer.alone:
                alone.trim(forgotten)
        elif act == "extract":
            row = layer.together.extract(rows - 1)
            assert row.offset == layer.alone[-1].offset
            own = layer.alone[-1].keys_and_values()[0][:, :, row.offset - row.suffix.offset :]
            assert mx.array_equal(row.suffix.keys_and_values()[0], own)
        layer.step()
        assert max(layer.together.lag, default=0) <= ragged._MOST_LAG


def test_a_row_that_is_far_ahead_is_caught_up_with() -> None:
    layer = layer_of([3, 3], share=False)
    for count in (30, 2):
        take_in(layer, [count + 1, 1])
    assert layer.together.lag == (0, 32)

    take_in(layer, [2, 1])

    assert layer.together.lag == (0, 0)
    assert layer.together.padding == (0, 33)
    layer.step()


def test_rows_that_overtake_each_other_leave_no_slots_that_nobody_uses() -> None:
    layer = layer_of([3, 3], share=False)
    for counts in ([34, 1], [1, 34]) * 3:
        take_in(layer, counts)

    assert layer.together.padding == (0, 0)
    assert layer.together.size() == 3 + 3 * 35
    layer.step()


@pytest.mark.parametrize("counts", [[1, 3, 2], [4], [1, 1]])
def test_packed_tokens_are_found_again(counts: list[int]) -> None:
    step = RaggedStep(counts)
    packed = mx.arange(sum(counts)).reshape(-1, 1, 1, 1)

    side_by_side = step.apart(packed)

    assert side_by_side.shape == (len(counts), 1, max(counts), 1)
    assert mx.array_equal(step.packed(side_by_side), packed)
    assert side_by_side[:, 0, 0, 0].tolist() == list(range(len(counts)))


def test_runs_are_taken_in_as_far_as_they_pad_little() -> None:
    assert longest_run([0, 0]) == 0
    assert longest_run([63]) == 63
    assert longest_run([3] + [0] * 4) == 3
    assert longest_run([3] + [0] * 15) == 0
    assert longest_run([3] * 4 + [0] * 12) == 3
    assert longest_run([20] + [2] * 7) == 2
