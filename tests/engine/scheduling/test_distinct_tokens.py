"""Counting distinct tokens: exact while they are few, near the truth when they are many."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_rq.engine.scheduling.distinct_tokens import DistinctTokens

PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=20)


def nodes(prompts: list[list[int]]) -> int:
    """The nodes of the prompts' prefix tree, counted one by one."""
    return len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))})


@given(PROMPTS)
def test_few_are_counted_exactly(prompts: list[list[int]]) -> None:
    distinct = DistinctTokens()
    for added, prompt in enumerate(prompts, 1):
        distinct.add(prompt)
        assert distinct.count == nodes(prompts[:added])


def test_what_comes_again_in_a_later_window_counts_once() -> None:
    distinct = DistinctTokens()
    for _ in range(5):
        distinct.add(range(1000))
        distinct.add([*range(900), 7, 7])
        assert distinct.count == 1002


def test_the_largest_token_ids_are_told_apart() -> None:
    distinct = DistinctTokens()
    distinct.add([2**32 - 1, 2**32 - 2])
    distinct.add([2**32 - 2, 2**32 - 1])
    assert distinct.count == 4


@pytest.mark.parametrize(("exact", "count"), [(0, 1200), (10_000, 1200), (100_000, 100)])
def test_many_are_estimated_in_memory_that_stays_as_it_is(exact: int, count: int) -> None:
    """Documents of 500 tokens under one system message of 1,000, each asked about three times."""
    choice = random.Random(7)
    system = [choice.randrange(50_000) for _ in range(1000)]
    documents = [[n, *(choice.randrange(50_000) for _ in range(499))] for n in range(count)]
    distinct = DistinctTokens(exact)
    for document in [*documents, *documents, *documents]:
        distinct.add([*system, *document])

    truth = 1000 + 500 * len(documents)
    assert distinct.count == (truth if exact > truth else pytest.approx(truth, rel=0.015))
    assert len(distinct._known) <= exact
