"""The planner: prefixes and prefill batches that compute each shared token of a window once."""

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
from windows import windows

from mlx_rq.engine.scheduling.prefill_batches import PADDING_SLACK
from mlx_rq.engine.scheduling.prefix_plan import Plan, plan
from mlx_rq.engine.scheduling.prefix_tree import PlannedSequence, Tokens

window = given(sequences=windows(), least=st.integers(1, 20))


def trie_size(sequences: Sequence[PlannedSequence]) -> int:
    """Count the nodes of the prefix tree the slow, plain way."""
    root: dict[int, Any] = {}
    size = 0
    for sequence in sequences:
        node = root
        for token in sequence.tokens:
            size += token not in node
            node = node.setdefault(token, {})
    return size


def chain(planned: Plan, prefix: int | None) -> Iterator[int]:
    """List a prefix and those above it, the deepest first."""
    while prefix is not None:
        yield prefix
        prefix = planned.prefixes[prefix].parent


def depth(planned: Plan, prefix: int | None) -> int:
    return 0 if prefix is None else planned.prefixes[prefix].depth


def prefix_by_sequence(planned: Plan) -> dict[int, int | None]:
    return {sequence: batch.prefix for batch in planned.batches for sequence in batch.sequences}


def admitted(planned: Plan) -> list[int]:
    return [sequence for batch in planned.batches for sequence in batch.sequences]


def prefilled_tokens(planned: Plan, sequences: Sequence[PlannedSequence]) -> int:
    """Counts the tokens prefilled: prefixes beyond their parents, sequences beyond prefixes."""
    return _prefix_tokens(planned) + sum(sum(batch) for batch in _suffixes(planned, sequences))


def computed_positions(planned: Plan, sequences: Sequence[PlannedSequence]) -> int:
    """Counts the positions computed: the tokens prefilled, and the padding of prefill batches."""
    return _prefix_tokens(planned) + sum(
        max(batch) * len(batch) for batch in _suffixes(planned, sequences)
    )


def _prefix_tokens(planned: Plan) -> int:
    return sum(prefix.depth - depth(planned, prefix.parent) for prefix in planned.prefixes)


def _suffixes(planned: Plan, sequences: Sequence[PlannedSequence]) -> list[list[int]]:
    """Lists the suffix lengths of each prefill batch."""
    return [
        [
            len(sequences[sequence].tokens) - depth(planned, batch.prefix)
            for sequence in batch.sequences
        ]
        for batch in planned.batches
    ]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(length)]


# What every plan keeps to.


@window
def test_each_sequence_is_admitted_once_or_answered_by_its_duplicate(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least)
    assert sorted([*admitted(planned), *planned.duplicates]) == list(range(len(sequences)))
    for sequence, other in planned.duplicates.items():
        assert other not in planned.duplicates
        assert sequences[sequence].duplicate_key == sequences[other].duplicate_key is not None
        assert sequences[sequence].tokens == sequences[other].tokens
        assert sequences[sequence].priority >= sequences[other].priority
    same = Counter(
        (tuple(sequences[sequence].tokens), sequences[sequence].duplicate_key)
        for sequence in admitted(planned)
    )
    assert all(times == 1 for (_, key), times in same.items() if key is not None)


@window
def test_tokens_are_counted_as_in_a_plain_trie(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least)
    assert planned.prompt_tokens == sum(len(sequence.tokens) for sequence in sequences)
    assert planned.distinct_tokens == trie_size(sequences)


@window
def test_a_prefix_is_a_prefix_of_all_sequences_below_and_leaves_each_a_token(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least)
    below = Counter(
        prefix for start in prefix_by_sequence(planned).values() for prefix in chain(planned, start)
    )
    for place, prefix in enumerate(planned.prefixes):
        assert prefix.index == place
        assert prefix.parent is None or prefix.parent < place
        assert prefix.depth - depth(planned, prefix.parent) >= least
        assert prefix.sequences_below == below[place] >= 2
    for sequence, start in prefix_by_sequence(planned).items():
        assert depth(planned, start) <= len(sequences[sequence].tokens) - 1
        for prefix_index in chain(planned, start):
            prefix = planned.prefixes[prefix_index]
            assert (
                sequences[sequence].tokens[: prefix.depth]
                == sequences[prefix.sequence].tokens[: prefix.depth]
            )


@window
def test_prefilled_tokens_stay_near_the_distinct_ones(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least)
    generated = [sequences[sequence] for sequence in admitted(planned)]
    prefilled = prefilled_tokens(planned, sequences)
    assert planned.prefilled_tokens == prefilled
    assert (
        planned.distinct_tokens <= prefilled <= sum(len(sequence.tokens) for sequence in generated)
    )
    # Each branch may compute again the `least` - 1 tokens for which no prefix is kept, and again as
    # many where one prefix gives way to others; and each sequence its last token.
    assert prefilled - planned.distinct_tokens <= (2 * least - 1) * len(generated)


@given(sequences=windows())
def test_with_prefixes_at_every_branch_only_prefixes_of_other_sequences_cost_a_token(
    sequences: list[PlannedSequence],
) -> None:
    planned = plan(sequences, min_prefix_tokens=1)
    prompts = sorted(tuple(sequences[sequence].tokens) for sequence in admitted(planned))
    prefixes = sum(after[: len(sequence)] == sequence for sequence, after in pairwise(prompts))
    assert prefilled_tokens(planned, sequences) == planned.distinct_tokens + prefixes


@given(sequences=windows(), most=st.integers(1, 5), max_padding=st.sampled_from((0.0, 0.15, 0.5)))
def test_a_batch_is_small_and_pads_little(
    sequences: list[PlannedSequence], most: int, max_padding: float
) -> None:
    planned = plan(sequences, batch_size=most, max_padding=max_padding, min_prefix_tokens=4)
    padding = 0
    for batch in planned.batches:
        assert 1 <= len(batch.sequences) <= most
        suffixes = [
            len(sequences[sequence].tokens) - depth(planned, batch.prefix)
            for sequence in batch.sequences
        ]
        computed = max(suffixes) * len(suffixes)
        wasted = computed - sum(suffixes)
        padding += wasted
        assert (
            wasted <= max_padding * computed + 1e-9
            or max(suffixes) - min(suffixes) <= PADDING_SLACK
        )
    assert computed_positions(planned, sequences) == prefilled_tokens(planned, sequences) + padding


@window
def test_urgent_sequences_come_first_and_subtrees_stay_together(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least, batch_size=3)
    levels = [
        {sequences[sequence].priority for sequence in batch.sequences} for batch in planned.batches
    ]
    assert all(len(level) == 1 for level in levels)
    order = [level.pop() for level in levels]
    assert order == sorted(order)
    for priority in set(order):
        starts = [
            c.prefix for c, level in zip(planned.batches, order, strict=True) if level == priority
        ]
        subtrees = [set(chain(planned, start)) for start in starts]
        for prefix in planned.prefixes:
            assert contiguous([prefix.index in subtree for subtree in subtrees])
            assert contiguous([prefix.index == start for start in starts])


def contiguous(marks: list[bool]) -> bool:
    places = [place for place, mark in enumerate(marks) if mark]
    return not places or places[-1] - places[0] == len(places) - 1


@given(sequences=windows(), seed=st.randoms(use_true_random=False))
def test_the_cost_does_not_depend_on_the_order_of_the_window(
    sequences: list[PlannedSequence], seed: random.Random
) -> None:
    planned = plan(sequences)
    shuffled = seed.sample(sequences, len(sequences))
    assert prefilled_tokens(plan(shuffled), shuffled) == prefilled_tokens(planned, sequences)


# Prefixes: which ones pay.


def test_work_of_three_levels_prefills_each_shared_token_once() -> None:
    # Given a system prompt, three few-shot blocks, five documents each, six questions each
    rng = random.Random(3)
    system = prompt(rng, 200)
    sequences = []
    for _ in range(3):
        block = system + prompt(rng, 400)
        for _ in range(5):
            document = block + prompt(rng, rng.randint(300, 900))
            sequences += [
                PlannedSequence(document + prompt(rng, rng.randint(8, 25)), 64) for _ in range(6)
            ]
    rng.shuffle(sequences)
    planned = plan(sequences)
    levels = Counter(len(list(chain(planned, prefix.index))) for prefix in planned.prefixes)
    assert levels == {1: 1, 2: 3, 3: 15}
    assert prefilled_tokens(planned, sequences) <= 1.02 * planned.distinct_tokens
    assert computed_positions(planned, sequences) <= 1.15 * planned.distinct_tokens


def test_turns_of_a_conversation_start_from_the_turns_before() -> None:
    rng = random.Random(4)
    turns = [prompt(rng, 100)]
    for _ in range(9):
        turns.append(turns[-1] + prompt(rng, rng.randint(40, 200)))
    sequences = [PlannedSequence(turn, 64) for turn in turns]
    planned = plan(sequences)
    # A turn leaves its own last token out of the prefix, and so the turn after it computes it
    # again.
    assert prefilled_tokens(planned, sequences) == len(turns[-1]) + 9


@pytest.mark.parametrize(("others", "depths"), [(3, [99]), (80, [40, 100])])
def test_a_sequence_that_is_the_prefix_does_not_spoil_it_for_the_others(
    others: int, depths: list[int]
) -> None:
    # Given 40 tokens, 60 more that are a sequence of their own, and sequences that go on from there
    rng = random.Random(5)
    head, body = prompt(rng, 40), prompt(rng, 60)
    ends = [prompt(rng, 10) for _ in range(others)]
    sequences = [
        PlannedSequence(head + body, 8),
        *(PlannedSequence(head + body + end, 8) for end in ends),
    ]
    if others == 80:
        sequences += [PlannedSequence(head + prompt(rng, 10), 8)] * 2
    # When few go on, the prefix is one token shorter; when many do, the sequence starts further up
    planned = plan(sequences)
    assert [prefix.depth for prefix in planned.prefixes] == depths


def test_a_short_shared_header_gives_way_to_the_prompts_below_it() -> None:
    # Given a header of 20 tokens and four system prompts that add only 10: both cannot be prefixes
    rng = random.Random(6)
    header = prompt(rng, 20)
    systems = [header + prompt(rng, 10) for _ in range(4)]
    sequences = [
        PlannedSequence(system + prompt(rng, 30), 8) for system in systems for _ in range(20)
    ]
    planned = plan(sequences)
    assert [prefix.depth for prefix in planned.prefixes] == [30] * 4
    # and the header stays when only few sequences share a system prompt
    few = [PlannedSequence(system + prompt(rng, 30), 8) for system in systems for _ in range(2)]
    assert [prefix.depth for prefix in plan(few).prefixes] == [20]


def test_a_node_that_adds_too_little_is_merged_into_its_parent() -> None:
    rng = random.Random(7)
    system = prompt(rng, 100)
    near = system + prompt(rng, 15)
    sequences = [PlannedSequence(system + prompt(rng, 9), 8) for _ in range(20)]
    sequences += [PlannedSequence(near + prompt(rng, 9), 8) for _ in range(2)]
    assert [prefix.depth for prefix in plan(sequences).prefixes] == [100]
    assert [prefix.depth for prefix in plan(sequences, min_prefix_tokens=15).prefixes] == [100, 115]


# Order and prefill batches.


def test_the_longest_decode_goes_first_then_the_heavier_subtree() -> None:
    # Given prefixes whose longest decodes are alike but whose sequences are few or many, one with
    # many short decodes, and a lone sequence
    rng = random.Random(8)
    sequences: list[PlannedSequence] = []
    for times, decode in ((9, 100), (2, 300), (5, 300), (3, 300), (4, 300)):
        prefix = prompt(rng, 50)
        sequences += [PlannedSequence(prefix + prompt(rng, 10), decode) for _ in range(times)]
    sequences.append(PlannedSequence(prompt(rng, 30), 200))
    order = [
        (sequences[c.sequences[0]].max_tokens, len(c.sequences)) for c in plan(sequences).batches
    ]
    assert order == [(300, 5), (300, 4), (300, 3), (300, 2), (200, 1), (100, 9)]


def test_within_a_prefix_long_decodes_go_first_among_like_suffixes() -> None:
    rng = random.Random(9)
    prefix = prompt(rng, 50)
    decodes = [10, 500, 20, 400, 30, 300]
    sequences = [
        PlannedSequence(prefix + prompt(rng, 100 + place), d) for place, d in enumerate(decodes)
    ]
    sequences.append(PlannedSequence(prefix + prompt(rng, 900), 350))
    planned = plan(sequences, batch_size=2)
    assert [batch.sequences for batch in planned.batches] == [(1, 3), (6,), (5, 4), (2, 0)]


def test_padding_is_a_share_of_what_follows_the_prefix() -> None:
    rng = random.Random(12)
    prefix = prompt(rng, 500)
    lengths = (84, 100, 20, 86, 85)
    sequences = [PlannedSequence(prefix + prompt(rng, length), 8) for length in lengths]
    batches = plan(sequences, max_padding=0.15).batches
    assert [[lengths[sequence] for sequence in batch.sequences] for batch in batches] == [
        [100, 86, 85],
        [84],
        [20],
    ]


def test_one_long_sequence_pads_no_short_ones() -> None:
    rng = random.Random(10)
    sequences = [
        PlannedSequence(prompt(rng, length), 8) for length in (55, 1800, 54, 56, 50, 55, 58, 51)
    ]
    planned = plan(sequences)
    assert sorted(len(batch.sequences) for batch in planned.batches) == [1, 7]
    assert computed_positions(planned, sequences) <= 1.02 * planned.distinct_tokens


def test_suffixes_that_differ_by_a_few_tokens_share_a_batch() -> None:
    sequences = [
        PlannedSequence([sequence] * (1 + sequence), 8) for sequence in range(PADDING_SLACK + 1)
    ]
    assert len(plan(sequences).batches) == 1
    assert len(plan([*sequences, PlannedSequence([99] * (PADDING_SLACK + 2), 8)]).batches) == 2


@window
def test_without_padding_suffixes_of_a_batch_are_of_one_length(
    sequences: list[PlannedSequence], least: int
) -> None:
    planned = plan(sequences, min_prefix_tokens=least, pads=False)

    for batch in planned.batches:
        depth = 0 if batch.prefix is None else planned.prefixes[batch.prefix].depth
        assert len({len(sequences[one].tokens) - depth for one in batch.sequences}) == 1
    admitted = [one for batch in planned.batches for one in batch.sequences]
    assert sorted([*admitted, *planned.duplicates]) == list(range(len(sequences)))


def test_an_urgent_sequence_goes_before_a_prefix_is_done_and_still_starts_from_it() -> None:
    rng = random.Random(11)
    prefix = prompt(rng, 50)
    sequences = [PlannedSequence(prefix + prompt(rng, 10), 500) for _ in range(4)]
    sequences += [PlannedSequence(prompt(rng, 10), 900, priority=-1)]
    sequences += [PlannedSequence(prefix + prompt(rng, 10), 4, priority=-1)]
    planned = plan(sequences)
    order = [(batch.prefix, batch.sequences) for batch in planned.batches]
    assert order == [(None, (4,)), (0, (5,)), (0, (0, 1, 2, 3))]
    assert planned.prefixes[0].sequences_below == 5


# Duplicates.


def test_duplicates_are_generated_once_by_the_most_urgent() -> None:
    tokens = list(range(40))
    sequences = [
        PlannedSequence(tokens, 8, priority=1, duplicate_key="greedy"),
        PlannedSequence(tokens, 8, priority=0, duplicate_key="greedy"),
        PlannedSequence(tokens, 8, priority=0, duplicate_key=("seed", 7)),
        PlannedSequence(tokens, 8),
        PlannedSequence(tokens, 8),
        PlannedSequence(tokens[:39], 8, duplicate_key="greedy"),
    ]
    planned = plan(sequences)
    assert planned.duplicates == {0: 1}
    assert sorted(admitted(planned)) == [1, 2, 3, 4, 5]


def test_a_prefix_needs_two_sequences_that_are_generated() -> None:
    sequences = [PlannedSequence(list(range(40)), 8, duplicate_key="greedy")] * 3
    planned = plan(sequences)
    assert planned.prefixes == ()
    assert planned.duplicates == {1: 0, 2: 0}
    assert prefilled_tokens(planned, sequences) == planned.distinct_tokens == 40


# Shapes at the edge.


def test_no_sequences_make_an_empty_plan() -> None:
    planned = plan([])
    assert planned == Plan((), (), {}, 0, 0, 0)
    assert prefilled_tokens(planned, []) == computed_positions(planned, []) == 0


@example(tokens=[7])
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_a_single_sequence_is_one_batch(tokens: list[int]) -> None:
    sequences = [PlannedSequence(tokens, 8)]
    planned = plan(sequences)
    assert admitted(planned) == [0]
    assert prefilled_tokens(planned, sequences) == planned.distinct_tokens == len(tokens)


def test_many_identical_sequences_share_all_but_their_last_token() -> None:
    sequences = [PlannedSequence(list(range(100)), 8)] * 10_000
    planned = plan(sequences)
    assert [prefix.depth for prefix in planned.prefixes] == [99]
    assert prefilled_tokens(planned, sequences) == 99 + 10_000
    assert len(planned.batches) == 10_000 / 16


def test_sequences_each_the_prefix_of_the_next_make_a_deep_chain() -> None:
    tokens = array("I", range(3000))
    sequences = [PlannedSequence(tokens[: sequence + 1], 8) for sequence in range(3000)]
    planned = plan(sequences)
    assert planned.distinct_tokens == 3000
    assert len(list(chain(planned, planned.prefixes[-1].index))) > 150
    assert prefilled_tokens(planned, sequences) <= 10 * 3000
    finest = plan(sequences, min_prefix_tokens=1)
    assert len(list(chain(finest, finest.prefixes[-1].index))) == 2998


def test_sequences_that_share_nothing_have_no_prefixes_and_no_overhead() -> None:
    sequences = [PlannedSequence([sequence] * 50, 8) for sequence in range(200)]
    planned = plan(sequences)
    assert planned.prefixes == ()
    assert computed_positions(planned, sequences) == planned.distinct_tokens == 200 * 50
    assert [len(batch.sequences) for batch in planned.batches] == [16] * 12 + [8]


@given(sequences=windows())
def test_tokens_may_be_lists_or_arrays(sequences: list[PlannedSequence]) -> None:
    packs: list[Callable[[Tokens], Tokens]] = [tuple, lambda t: array("I", t), np.array]
    for pack in packs:
        packed = [replace(sequence, tokens=pack(sequence.tokens)) for sequence in sequences]
        assert plan(packed) == plan(sequences)


# What is refused.


def test_a_sequence_without_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no tokens"):
        plan([PlannedSequence([1], 8), PlannedSequence([], 8)])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_beyond_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        plan([PlannedSequence([token], 8)])


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"min_prefix_tokens": 0}, {"max_padding": 1.0}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        plan([], **options)


@pytest.mark.parametrize(("size", "together"), [(4, True), (5, False)])
def test_an_overdue_sequence_takes_the_rest_of_its_prefix_along_where_that_is_a_batch(
    size: int, together: bool
) -> None:
    rng = random.Random(11)
    first, second = prompt(rng, 40), prompt(rng, 40)
    sequences = [PlannedSequence(first + prompt(rng, 9), 500) for _ in range(4)]
    sequences += [PlannedSequence(second + prompt(rng, 9), 8) for _ in range(size - 1)]
    sequences += [PlannedSequence(second + prompt(rng, 9), 8, overdue=True)]

    planned = plan(sequences, batch_size=4)

    overdue = len(sequences) - 1
    assert admitted(planned)[0] == overdue or together
    ahead = {*range(4, 4 + size)} if together else {overdue}
    assert set(admitted(planned)[: len(ahead)]) == ahead
    assert all(
        sequence in ahead for b in planned.batches if not b.urgency[1] for sequence in b.sequences
    )
