"""How much of many texts is distinct, counted with little memory."""

import random

import pytest

from mlx_rq.worker.cli.distinct_text import DistinctText


def text(number: int, length: int) -> str:
    return "".join(random.Random(number).choices("abcdefgh ", k=length))


def share(texts: list[str], kept: int = 2**16) -> float:
    counted = DistinctText(kept)
    for one in texts:
        counted.add(one)
    return counted.share


def test_shared_beginnings_count_once_in_any_order() -> None:
    document = text(1, 640)
    texts = [document + text(number, 64) for number in range(2, 12)]
    assert share(texts) == share(texts[::-1]) == 20 / 110


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    assert share([text(1, 64) + text(3, 64), text(2, 64) + text(3, 64)]) == 1.0
    assert share([]) == share([""]) == 1.0


def test_of_more_than_is_kept_it_is_an_estimate() -> None:
    texts = [text(number % 500, 640) + text(1000 + number, 64) for number in range(2000)]
    assert share(texts, kept=2**10) == pytest.approx((5000 + 2000) / 22_000, rel=0.1)
