"""The plan of sequences that come and go is that of sequences that are all there at once."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from windows import windows

from mlx_rq.engine.scheduling import prefix_tree, rolling_plan
from mlx_rq.engine.scheduling.prefix_tree import PlannedSequence
from mlx_rq.engine.scheduling.rolling_plan import PlannedBatch, RollingPlan


def rolling(batch_size: int = 3, min_prefix_tokens: int = 4) -> RollingPlan:
    return RollingPlan(batch_size=batch_size, min_prefix_tokens=min_prefix_tokens)


def planned(plan: RollingPlan, batches: list[PlannedBatch]) -> Counter[int]:
    """How often each sequence is in the plan, itself or as a duplicate."""
    generated = [number for batch in batches for number in batch.sequences]
    return Counter([*generated, *(one for each in generated for one in plan.duplicates_of(each))])


@given(
    sequences=windows(),
    least=st.integers(1, 20),
    chance=st.randoms(use_true_random=False),
    late=st.sets(st.integers(0, 15)),
)
def test_a_plan_does_not_depend_on_what_came_and_went_before(
    sequences: list[PlannedSequence], least: int, chance: random.Random, late: set[int]
) -> None:
    # Given sequences that come in any order, some of which leave or begin, planned now and then
    plan, at_once = rolling(min_prefix_tokens=least), rolling(min_prefix_tokens=least)
    came: list[int] = []
    for number in chance.sample(range(len(sequences)), len(sequences)):
        plan.add(number, sequences[number])
        came.append(number)
        if number in late:
            plan.is_overdue(number)
        if chance.random() < 0.2:
            plan.remove(came.pop(chance.randrange(len(came))))
        if chance.random() < 0.3 and (batches := plan.order()):
            begun = chance.choice(batches[0].sequences)
            out = {begun, *plan.take(begun)}
            came = [number for number in came if number not in out]
        if chance.random() < 0.3:
            plan.order()

    # When those that are left are planned at once
    for number in sorted(came):
        at_once.add(number, replace(sequences[number], overdue=number in late))

    assert plan.order() == at_once.order()
    assert plan.duplicates == at_once.duplicates
    assert plan.distinct_tokens == at_once.distinct_tokens


@given(sequences=windows(), least=st.integers(1, 8), chance=st.randoms(use_true_random=False))
def test_while_sequences_are_begun_all_others_stay_planned_once(
    sequences: list[PlannedSequence], least: int, chance: random.Random
) -> None:
    plan = rolling(min_prefix_tokens=least)
    for number, sequence in enumerate(sequences):
        plan.add(number, sequence)
    waiting = set(range(len(sequences)))

    while waiting:
        batches = plan.order()
        assert planned(plan, batches) == Counter(waiting)
        begun = chance.choice(batches[0].sequences)
        waiting -= {begun, *plan.take(begun)}

    assert plan.order() == []


def test_a_prefix_that_is_given_up_leaves_its_place_to_the_one_below_and_takes_it_back() -> None:
    plan = rolling()
    for number in range(3):
        plan.add(number, PlannedSequence([1] * 4 + [2] * 3 + [3 + number, 0], 8))
    plan.add(3, PlannedSequence([1] * 4 + [3, 0], 8))
    assert [node.depth for node in plan.prefixes()] == [7]

    # When one more branch makes the shorter prefix worth more than the longer one
    plan.add(4, PlannedSequence([1] * 4 + [4, 0], 8))
    assert [node.depth for node in plan.prefixes()] == [4]

    plan.remove(4)
    assert [node.depth for node in plan.prefixes()] == [7]


def asking(about: int, number: int) -> PlannedSequence:
    """A question about one of many documents."""
    own = [10_000 + about, number // 100, number % 100]
    return PlannedSequence([1] * 10 + [100 + about] * 30 + own, 8)


def test_a_duplicate_takes_the_place_of_the_one_that_leaves() -> None:
    plan = rolling()
    for number in range(3):
        plan.add(number, PlannedSequence([1, 2, 3], 8, duplicate_key="greedy"))
    plan.add(3, PlannedSequence([1, 2, 3], 8, priority=-1, duplicate_key="greedy"))
    assert plan.duplicates == {0: 3, 1: 3, 2: 3}

    plan.remove(3)
    assert plan.duplicates == {1: 0, 2: 0}
    assert [batch.sequences for batch in plan.order()] == [(0,)]

    plan.is_overdue(2)
    assert plan.duplicates == {0: 2, 1: 2}
    assert plan.take(2) == [0, 1]
    assert plan.order() == []


def test_what_a_sequence_costs_does_not_depend_on_how_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a window of 4,096 questions about 512 documents, planned
    plan = rolling(batch_size=16)
    for number in range(4096):
        plan.add(number, asking(number % 512, number))
    plan.order()

    # When 16 more come, about documents that are known and about others
    work: Counter[str] = Counter()
    compare, choose, cut = (
        prefix_tree._common,
        prefix_tree.PrefixTree._prefix_of,
        rolling_plan.batches_of,
    )

    def counted_compare(a: bytes, b: bytes, known: int, most: int) -> int:
        work["tokens compared"] += most - known
        return compare(a, b, known, most)

    def counted_choose(tree: prefix_tree.PrefixTree, node: prefix_tree.Node) -> prefix_tree.Node:
        work["nodes looked at"] += 1
        return choose(tree, node)

    def counted_cut(
        prefix: prefix_tree.Node, leaves: list[prefix_tree.Leaf], **options: Any
    ) -> Any:
        work["sequences cut anew"] += len(leaves)
        return cut(prefix, leaves, **options)

    monkeypatch.setattr(prefix_tree, "_common", counted_compare)
    monkeypatch.setattr(prefix_tree.PrefixTree, "_prefix_of", counted_choose)
    monkeypatch.setattr(rolling_plan, "batches_of", counted_cut)
    more = [asking(505 + number, number) for number in range(16)]
    for number, sequence in enumerate(more):
        plan.add(5000 + number, sequence)
    plan.order()

    assert work["sequences cut anew"] >= 16
    assert work.total() <= sum(len(sequence.tokens) for sequence in more), work


def test_what_a_duplicate_costs_does_not_depend_on_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, same = rolling(), PlannedSequence([1, 2, 3], 8, duplicate_key="greedy")
    for number in range(1000):
        plan.add(number, same)

    looked: Counter[str] = Counter()
    for name in ("heappush", "heappop"):
        call = getattr(rolling_plan, name)
        monkeypatch.setattr(
            rolling_plan,
            name,
            lambda *args, name=name, call=call: (looked.update([name]), call(*args))[1],
        )
    plan.add(1000, same)
    plan.is_overdue(500)
    assert plan.duplicates_of(500) == [*range(500), *range(501, 1001)]
    assert looked == {"heappush": 2}

    plan.remove(500)
    for number in range(999):
        if number != 500:
            plan.remove(number)
    assert plan.duplicates == {1000: 999}
    assert looked == {"heappush": 2, "heappop": 1000}
