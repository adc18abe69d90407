"""The planner: a window of rows becomes trunks and cohorts that compute each shared token once."""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_rq.engine.scheduling.prefix_plan import (
    PADDING_SLACK,
    Plan,
    PlanRow,
    Tokens,
    computed_positions,
    plan,
    prefilled_tokens,
)

# Random windows: rows that branch off the rows before them, so that the tree has many levels.


@st.composite
def windows(draw: st.DrawFn) -> list[PlanRow]:
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(0, 16))):
        base = draw(st.sampled_from(prompts)) if prompts else []
        kept = draw(st.sampled_from((len(base), len(base) - 1, len(base) // 2, 3, 0)))
        end = draw(st.lists(st.integers(0, 3), max_size=12)) * draw(st.sampled_from((1, 1, 2, 4)))
        prompts.append(base[: max(kept, 0)] + end or [0])
    return [
        PlanRow(
            tokens=prompt,
            max_tokens=draw(st.sampled_from((1, 8, 64, 500))),
            priority=draw(st.sampled_from((0, 0, 0, 1, -2))),
            duplicate_key=draw(st.sampled_from((None, None, "greedy", "seed 1"))),
        )
        for prompt in prompts
    ]


window = given(rows=windows(), least=st.integers(1, 20))


def trie_size(rows: Sequence[PlanRow]) -> int:
    """Count the nodes of the prefix tree the slow, plain way."""
    root: dict[int, Any] = {}
    size = 0
    for row in rows:
        node = root
        for token in row.tokens:
            size += token not in node
            node = node.setdefault(token, {})
    return size


def chain(planned: Plan, trunk: int | None) -> Iterator[int]:
    """List a trunk and those above it, the deepest first."""
    while trunk is not None:
        yield trunk
        trunk = planned.trunks[trunk].parent


def depth(planned: Plan, trunk: int | None) -> int:
    return 0 if trunk is None else planned.trunks[trunk].depth


def trunk_by_row(planned: Plan) -> dict[int, int | None]:
    return {row: cohort.trunk for cohort in planned.cohorts for row in cohort.rows}


def admitted(planned: Plan) -> list[int]:
    return [row for cohort in planned.cohorts for row in cohort.rows]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(length)]


# What every plan keeps to.


@window
def test_each_row_is_admitted_once_or_answered_by_its_duplicate(
    rows: list[PlanRow], least: int
) -> None:
    planned = plan(rows, min_trunk_tokens=least)
    assert sorted([*admitted(planned), *planned.duplicates]) == list(range(len(rows)))
    for row, other in planned.duplicates.items():
        assert other not in planned.duplicates
        assert rows[row].duplicate_key == rows[other].duplicate_key is not None
        assert rows[row].tokens == rows[other].tokens
        assert rows[row].priority >= rows[other].priority
    same = Counter((tuple(rows[row].tokens), rows[row].duplicate_key) for row in admitted(planned))
    assert all(times == 1 for (_, key), times in same.items() if key is not None)


@window
def test_tokens_are_counted_as_in_a_plain_trie(rows: list[PlanRow], least: int) -> None:
    planned = plan(rows, min_trunk_tokens=least)
    assert planned.prompt_tokens == sum(len(row.tokens) for row in rows)
    assert planned.distinct_tokens == trie_size(rows)


@window
def test_a_trunk_is_a_prefix_of_all_rows_below_and_leaves_each_a_token(
    rows: list[PlanRow], least: int
) -> None:
    planned = plan(rows, min_trunk_tokens=least)
    below = Counter(
        trunk for start in trunk_by_row(planned).values() for trunk in chain(planned, start)
    )
    for place, trunk in enumerate(planned.trunks):
        assert trunk.index == place
        assert trunk.parent is None or trunk.parent < place
        assert trunk.depth - depth(planned, trunk.parent) >= least
        assert trunk.rows_below == below[place] >= 2
    for row, start in trunk_by_row(planned).items():
        assert depth(planned, start) <= len(rows[row].tokens) - 1
        for trunk_index in chain(planned, start):
            trunk = planned.trunks[trunk_index]
            assert rows[row].tokens[: trunk.depth] == rows[trunk.row].tokens[: trunk.depth]


@window
def test_prefilled_tokens_stay_near_the_distinct_ones(rows: list[PlanRow], least: int) -> None:
    planned = plan(rows, min_trunk_tokens=least)
    generated = [rows[row] for row in admitted(planned)]
    prefilled = prefilled_tokens(planned, rows)
    assert planned.distinct_tokens <= prefilled <= sum(len(row.tokens) for row in generated)
    # Each branch may compute again the `least` - 1 tokens for which no trunk is kept, and again as
    # many where one trunk gives way to others; and each row its last token.
    assert prefilled - planned.distinct_tokens <= (2 * least - 1) * len(generated)


@given(rows=windows())
def test_with_trunks_at_every_branch_only_prefixes_of_other_rows_cost_a_token(
    rows: list[PlanRow],
) -> None:
    planned = plan(rows, min_trunk_tokens=1)
    prompts = sorted(tuple(rows[row].tokens) for row in admitted(planned))
    prefixes = sum(after[: len(row)] == row for row, after in pairwise(prompts))
    assert prefilled_tokens(planned, rows) == planned.distinct_tokens + prefixes


@given(rows=windows(), most=st.integers(1, 5), max_padding=st.sampled_from((0.0, 0.15, 0.5)))
def test_a_cohort_is_small_and_pads_little(
    rows: list[PlanRow], most: int, max_padding: float
) -> None:
    planned = plan(rows, cohort_rows=most, max_padding=max_padding, min_trunk_tokens=4)
    padding = 0
    for cohort in planned.cohorts:
        assert 1 <= len(cohort.rows) <= most
        suffixes = [len(rows[row].tokens) - depth(planned, cohort.trunk) for row in cohort.rows]
        computed = max(suffixes) * len(suffixes)
        wasted = computed - sum(suffixes)
        padding += wasted
        assert (
            wasted <= max_padding * computed + 1e-9
            or max(suffixes) - min(suffixes) <= PADDING_SLACK
        )
    assert computed_positions(planned, rows) == prefilled_tokens(planned, rows) + padding


@window
def test_urgent_rows_come_first_and_subtrees_stay_together(rows: list[PlanRow], least: int) -> None:
    planned = plan(rows, min_trunk_tokens=least, cohort_rows=3)
    levels = [{rows[row].priority for row in cohort.rows} for cohort in planned.cohorts]
    assert all(len(level) == 1 for level in levels)
    order = [level.pop() for level in levels]
    assert order == sorted(order)
    for priority in set(order):
        starts = [
            c.trunk for c, level in zip(planned.cohorts, order, strict=True) if level == priority
        ]
        subtrees = [set(chain(planned, start)) for start in starts]
        for trunk in planned.trunks:
            assert contiguous([trunk.index in subtree for subtree in subtrees])
            assert contiguous([trunk.index == start for start in starts])


def contiguous(marks: list[bool]) -> bool:
    places = [place for place, mark in enumerate(marks) if mark]
    return not places or places[-1] - places[0] == len(places) - 1


@given(rows=windows(), seed=st.randoms(use_true_random=False))
def test_the_cost_does_not_depend_on_the_order_of_the_window(
    rows: list[PlanRow], seed: random.Random
) -> None:
    planned = plan(rows)
    shuffled = seed.sample(rows, len(rows))
    assert prefilled_tokens(plan(shuffled), shuffled) == prefilled_tokens(planned, rows)


# Trunks: which ones pay.


def test_work_of_three_levels_prefills_each_shared_token_once() -> None:
    # Given a system prompt, three few-shot blocks, five documents each, six questions each
    rng = random.Random(3)
    system = prompt(rng, 200)
    rows = []
    for _ in range(3):
        block = system + prompt(rng, 400)
        for _ in range(5):
            document = block + prompt(rng, rng.randint(300, 900))
            rows += [PlanRow(document + prompt(rng, rng.randint(8, 25)), 64) for _ in range(6)]
    rng.shuffle(rows)
    planned = plan(rows)
    levels = Counter(len(list(chain(planned, trunk.index))) for trunk in planned.trunks)
    assert levels == {1: 1, 2: 3, 3: 15}
    assert prefilled_tokens(planned, rows) <= 1.02 * planned.distinct_tokens
    assert computed_positions(planned, rows) <= 1.15 * planned.distinct_tokens


def test_turns_of_a_conversation_start_from_the_turns_before() -> None:
    rng = random.Random(4)
    turns = [prompt(rng, 100)]
    for _ in range(9):
        turns.append(turns[-1] + prompt(rng, rng.randint(40, 200)))
    rows = [PlanRow(turn, 64) for turn in turns]
    planned = plan(rows)
    # A turn leaves its own last token out of the trunk, and so the turn after it computes it again.
    assert prefilled_tokens(planned, rows) == len(turns[-1]) + 9


@pytest.mark.parametrize(("others", "depths"), [(3, [99]), (80, [40, 100])])
def test_a_row_that_is_the_trunk_does_not_spoil_it_for_the_others(
    others: int, depths: list[int]
) -> None:
    # Given 40 tokens, 60 more that are a row of their own, and rows that go on from there
    rng = random.Random(5)
    head, body = prompt(rng, 40), prompt(rng, 60)
    ends = [prompt(rng, 10) for _ in range(others)]
    rows = [PlanRow(head + body, 8), *(PlanRow(head + body + end, 8) for end in ends)]
    if others == 80:
        rows += [PlanRow(head + prompt(rng, 10), 8)] * 2
    # When few go on, the trunk is one token shorter; when many do, the row starts further up
    planned = plan(rows)
    assert [trunk.depth for trunk in planned.trunks] == depths


def test_a_short_shared_header_gives_way_to_the_prompts_below_it() -> None:
    # Given a header of 20 tokens and four system prompts that add only 10: both cannot be trunks
    rng = random.Random(6)
    header = prompt(rng, 20)
    systems = [header + prompt(rng, 10) for _ in range(4)]
    rows = [PlanRow(system + prompt(rng, 30), 8) for system in systems for _ in range(20)]
    planned = plan(rows)
    assert [trunk.depth for trunk in planned.trunks] == [30] * 4
    # and the header stays when only few rows share a system prompt
    few = [PlanRow(system + prompt(rng, 30), 8) for system in systems for _ in range(2)]
    assert [trunk.depth for trunk in plan(few).trunks] == [20]


def test_a_node_that_adds_too_little_is_merged_into_its_parent() -> None:
    rng = random.Random(7)
    system = prompt(rng, 100)
    near = system + prompt(rng, 15)
    rows = [PlanRow(system + prompt(rng, 9), 8) for _ in range(20)]
    rows += [PlanRow(near + prompt(rng, 9), 8) for _ in range(2)]
    assert [trunk.depth for trunk in plan(rows).trunks] == [100]
    assert [trunk.depth for trunk in plan(rows, min_trunk_tokens=15).trunks] == [100, 115]


# Order and cohorts.


def test_the_longest_decode_goes_first_then_the_heavier_subtree() -> None:
    # Given trunks whose longest decodes are alike but whose rows are few or many, one with many
    # short decodes, and a lone row
    rng = random.Random(8)
    rows: list[PlanRow] = []
    for times, decode in ((9, 100), (2, 300), (5, 300), (3, 300), (4, 300)):
        trunk = prompt(rng, 50)
        rows += [PlanRow(trunk + prompt(rng, 10), decode) for _ in range(times)]
    rows.append(PlanRow(prompt(rng, 30), 200))
    order = [(rows[c.rows[0]].max_tokens, len(c.rows)) for c in plan(rows).cohorts]
    assert order == [(300, 5), (300, 4), (300, 3), (300, 2), (200, 1), (100, 9)]


def test_within_a_trunk_long_decodes_go_first_among_like_suffixes() -> None:
    rng = random.Random(9)
    trunk = prompt(rng, 50)
    decodes = [10, 500, 20, 400, 30, 300]
    rows = [PlanRow(trunk + prompt(rng, 100 + place), d) for place, d in enumerate(decodes)]
    rows.append(PlanRow(trunk + prompt(rng, 900), 350))
    planned = plan(rows, cohort_rows=2)
    assert [cohort.rows for cohort in planned.cohorts] == [(1, 3), (6,), (5, 4), (2, 0)]


def test_padding_is_a_share_of_what_follows_the_trunk() -> None:
    rng = random.Random(12)
    trunk = prompt(rng, 500)
    lengths = (84, 100, 20, 86, 85)
    rows = [PlanRow(trunk + prompt(rng, length), 8) for length in lengths]
    cohorts = plan(rows, max_padding=0.15).cohorts
    assert [[lengths[row] for row in cohort.rows] for cohort in cohorts] == [
        [100, 86, 85],
        [84],
        [20],
    ]


def test_one_long_row_pads_no_short_ones() -> None:
    rng = random.Random(10)
    rows = [PlanRow(prompt(rng, length), 8) for length in (55, 1800, 54, 56, 50, 55, 58, 51)]
    planned = plan(rows)
    assert sorted(len(cohort.rows) for cohort in planned.cohorts) == [1, 7]
    assert computed_positions(planned, rows) <= 1.02 * planned.distinct_tokens


def test_suffixes_that_differ_by_a_few_tokens_share_a_cohort() -> None:
    rows = [PlanRow([row] * (1 + row), 8) for row in range(PADDING_SLACK + 1)]
    assert len(plan(rows).cohorts) == 1
    assert len(plan([*rows, PlanRow([99] * (PADDING_SLACK + 2), 8)]).cohorts) == 2


def test_an_urgent_row_goes_before_a_trunk_is_done_and_still_starts_from_it() -> None:
    rng = random.Random(11)
    trunk = prompt(rng, 50)
    rows = [PlanRow(trunk + prompt(rng, 10), 500) for _ in range(4)]
    rows += [PlanRow(prompt(rng, 10), 900, priority=-1)]
    rows += [PlanRow(trunk + prompt(rng, 10), 4, priority=-1)]
    planned = plan(rows)
    order = [(cohort.trunk, cohort.rows) for cohort in planned.cohorts]
    assert order == [(None, (4,)), (0, (5,)), (0, (0, 1, 2, 3))]
    assert planned.trunks[0].rows_below == 5


# Duplicates.


def test_duplicates_are_generated_once_by_the_most_urgent() -> None:
    tokens = list(range(40))
    rows = [
        PlanRow(tokens, 8, priority=1, duplicate_key="greedy"),
        PlanRow(tokens, 8, priority=0, duplicate_key="greedy"),
        PlanRow(tokens, 8, priority=0, duplicate_key=("seed", 7)),
        PlanRow(tokens, 8),
        PlanRow(tokens, 8),
        PlanRow(tokens[:39], 8, duplicate_key="greedy"),
    ]
    planned = plan(rows)
    assert planned.duplicates == {0: 1}
    assert sorted(admitted(planned)) == [1, 2, 3, 4, 5]


def test_a_trunk_needs_two_rows_that_are_generated() -> None:
    rows = [PlanRow(list(range(40)), 8, duplicate_key="greedy")] * 3
    planned = plan(rows)
    assert planned.trunks == ()
    assert planned.duplicates == {1: 0, 2: 0}
    assert prefilled_tokens(planned, rows) == planned.distinct_tokens == 40


# Shapes at the edge.


def test_no_rows_make_an_empty_plan() -> None:
    planned = plan([])
    assert planned == Plan((), (), {}, 0, 0)
    assert prefilled_tokens(planned, []) == computed_positions(planned, []) == 0


@example(tokens=[7])
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_a_single_row_is_one_cohort(tokens: list[int]) -> None:
    rows = [PlanRow(tokens, 8)]
    planned = plan(rows)
    assert admitted(planned) == [0]
    assert prefilled_tokens(planned, rows) == planned.distinct_tokens == len(tokens)


def test_many_identical_rows_share_all_but_their_last_token() -> None:
    rows = [PlanRow(list(range(100)), 8)] * 10_000
    planned = plan(rows)
    assert [trunk.depth for trunk in planned.trunks] == [99]
    assert prefilled_tokens(planned, rows) == 99 + 10_000
    assert len(planned.cohorts) == 10_000 / 16


def test_rows_each_the_prefix_of_the_next_make_a_deep_chain() -> None:
    tokens = array("I", range(3000))
    rows = [PlanRow(tokens[: row + 1], 8) for row in range(3000)]
    planned = plan(rows)
    assert planned.distinct_tokens == 3000
    assert len(list(chain(planned, planned.trunks[-1].index))) > 150
    assert prefilled_tokens(planned, rows) <= 10 * 3000
    finest = plan(rows, min_trunk_tokens=1)
    assert len(list(chain(finest, finest.trunks[-1].index))) == 2998


def test_rows_that_share_nothing_have_no_trunks_and_no_overhead() -> None:
    rows = [PlanRow([row] * 50, 8) for row in range(200)]
    planned = plan(rows)
    assert planned.trunks == ()
    assert computed_positions(planned, rows) == planned.distinct_tokens == 200 * 50
    assert [len(cohort.rows) for cohort in planned.cohorts] == [16] * 12 + [8]


@given(rows=windows())
def test_tokens_may_be_lists_or_arrays(rows: list[PlanRow]) -> None:
    packs: list[Callable[[Tokens], Tokens]] = [tuple, lambda t: array("I", t), np.array]
    for pack in packs:
        packed = [replace(row, tokens=pack(row.tokens)) for row in rows]
        assert plan(packed) == plan(rows)


# What is refused.


def test_a_row_without_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        plan([PlanRow([1], 8), PlanRow([], 8)])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_beyond_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        plan([PlanRow([token], 8)])


@pytest.mark.parametrize(
    "options", [{"cohort_rows": 0}, {"min_trunk_tokens": 0}, {"max_padding": 1.0}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cohort_rows"):
        plan([], **options)
