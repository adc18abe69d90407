"""Drafts are used where they are measured to be faster, and only there."""

from collections.abc import Callable

import pytest

from mlx_rq.engine.scheduling.draft_rate import DraftRate

STRETCH = 16 + 1
"""Steps of a stretch: the first does not count."""

Costs = Callable[[bool], tuple[float, int]]


def went(rate: DraftRate, steps: int, costs: Costs) -> str:
    """Goes so many steps; tells the way of each stretch: d with drafts, p without."""
    ways = ""
    for _ in range(steps):
        ways += "d" if rate.drafts else "p"
        rate.took(*costs(rate.drafts))
    return ways[::STRETCH]


def drafts_take(seconds: float, tokens: int) -> Costs:
    """A plain step takes a second for one token, a drafted one takes this."""
    return lambda drafts: (seconds, tokens) if drafts else (1.0, 1)


@pytest.mark.parametrize(
    ("seconds", "tokens", "gain", "kept"),
    [(1.5, 3, 2.0, "d"), (1.5, 1, 0.67, "p"), (3.0, 3, 1.0, "p")],
    ids=["faster", "slower", "no faster"],
)
def test_after_two_stretches_of_each_the_faster_way_is_kept(
    seconds: float, tokens: int, gain: float, kept: str
) -> None:
    rate = DraftRate()
    assert (rate.gain, rate.chosen) == (None, None)

    assert went(rate, 14 * STRETCH, drafts_take(seconds, tokens)) == "pdpd" + 10 * kept
    assert rate.gain == pytest.approx(gain, abs=0.01)
    assert rate.chosen == (kept == "d")


def test_the_slower_way_is_tried_again_rarely_and_taken_where_it_is_faster_now() -> None:
    rate = DraftRate()
    ways = went(rate, 4 * STRETCH + 200 * 17, drafts_take(2.0, 1))
    assert ways.count("d") - 2 == 200 // (64 + 1)
    assert "dd" not in ways

    ways = went(rate, 200 * 17, drafts_take(0.5, 1))  # another text
    assert ways.lstrip("p").count("p") == ways.lstrip("p").count("d") // 64


def test_the_first_step_of_a_stretch_and_after_an_interruption_does_not_count() -> None:
    rate, steps = DraftRate(), 0

    def costs(drafts: bool) -> tuple[float, int]:
        nonlocal steps
        steps += 1
        return (1000.0 if steps % STRETCH == 1 else 1.0), 1

    went(rate, 4 * STRETCH, costs)
    assert rate.gain == 1.0

    rate = DraftRate()
    for drafts in (False, True):
        assert rate.drafts is drafts
        for _ in range(4):  # four steps count of each run of five
            rate.interrupt()
            rate.took(1000.0, 1)
            for _ in range(4):
                rate.took(1.0, 1)
    assert rate.gain == 1.0


def test_what_is_hardly_faster_does_not_change_the_way() -> None:
    rate = DraftRate()
    went(rate, 4 * STRETCH, drafts_take(0.9, 1))
    assert "pp" not in went(rate, 300 * STRETCH, drafts_take(1.03, 1))
    assert rate.chosen is True
    went(rate, 300 * STRETCH, drafts_take(1.2, 1))
    assert "dd" not in went(rate, 300 * STRETCH, drafts_take(0.97, 1))
    assert rate.chosen is False
