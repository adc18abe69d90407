"""How many sequences decode together: by curves that were measured on Macs, and by a clock."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny import tiny_model

from mlx_rq.engine.models.decode_speed import (
    LONGEST_STEP_SECONDS,
    SMALLEST,
    DecodeTrial,
    fewest,
    measured,
)

Curve = dict[int, float]
"""Milliseconds by rows."""

CHIPS: dict[str, Curve] = {
    # ml-explore/mlx#3863: 4 bits, 5120 x 17408
    "M3 Max": {1: 0.129, 2: 0.129, 4: 0.165, 6: 0.263, 8: 0.323, 9: 0.405, 10: 0.508, 12: 0.508,
               14: 0.507, 16: 0.509, 17: 0.513, 24: 0.514, 32: 0.513, 33: 1.002, 64: 1.002},
    # ml-explore/mlx#4265: 4 bits, 5120 x 17408
    "M3 Ultra": {1: 0.041, 2: 0.076, 4: 0.134, 7: 0.218, 8: 0.252, 16: 0.260},
    # ml-explore/mlx#3839: 4 bits, 4096 x 24576, in parts of one row's time
    "M4 Pro": {1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69},
    # trymirai/uzu#394: 4 bits, 2560 x 6912
    "M4": {1: 0.4, 5: 0.4755, 8: 0.8203, 16: 1.5123, 32: 1.6051, 48: 1.8350, 64: 1.2140,
           128: 2.0861},
}  # fmt: skip
"""Figures of public reports; for the M3 Max up to 64 by its tiles of 32, for the M4's one row by
what five take."""


def seconds(curve: Curve, rows: int) -> float | None:
    """What was reported, or lies between two reports; None beyond them all."""
    if rows in curve:
        return curve[rows] / 1000
    for below, above in pairwise(sorted(curve)):
        if below < rows < above:
            part = (rows - below) / (above - below)
            return (curve[below] + part * (curve[above] - curve[below])) / 1000
    return None


@pytest.mark.parametrize("chip", list(CHIPS))
def test_the_curves_of_macs_give_nearly_the_most_tokens_a_second(chip: str) -> None:
    curve = CHIPS[chip]

    rows = fewest(measured(lambda rows: seconds(curve, rows)))

    best = max(1000 * reported / taken for reported, taken in curve.items())
    taken = seconds(curve, rows)
    assert taken is not None
    assert rows / taken >= 0.9 * best
    assert {"M3 Max": 32, "M3 Ultra": 16, "M4 Pro": 4, "M4": 96}[chip] == rows


@pytest.mark.parametrize(
    ("seconds", "most", "best"),
    [
        (lambda rows: 0.01, 256, 256),  # more sequences cost nothing
        (lambda rows: 0.001 * rows, 64, SMALLEST),  # each costs the same
        (lambda rows: 0.01 if rows <= 16 else 0.01 * rows / 16, 64, 16),  # free up to sixteen
        (lambda rows: 0.01 if rows <= 16 else None, 16, 16),  # no memory for more
        (lambda rows: 0.1 * rows, 12, SMALLEST),  # steps of more than a second
        (lambda rows: 2 * LONGEST_STEP_SECONDS, 4, 4),
    ],
)
def test_sequences_are_added_as_long_as_they_pay(seconds: Any, most: int, best: int) -> None:
    speeds = measured(seconds)

    assert max(speeds) == most
    assert fewest(speeds) == best


class Device:
    """A model that takes so many seconds a step, by its own clock."""

    def __init__(self, step: float) -> None:
        self.now, self.steps = 0.0, list[tuple[int, int]]()
        real = tiny_model("llama").model

        class Model:
            layers = real.layers

            def __call__(_, tokens: mx.array, cache: list[KVCache]) -> Any:
                self.now += step
                self.steps.append((tokens.shape[0], cache[0].offset))
                return real(tokens, cache=cache)

        self.model: Any = Model()

    def clock(self) -> float:
        return self.now


def test_a_trial_warms_up_and_times_sequences_that_hold_a_context() -> None:
    device = Device(step=0.0625)
    trial = DecodeTrial(device.model, context=100, clock=device.clock)
    device.steps.clear()

    assert trial.seconds(2) == pytest.approx(0.0625)
    # One token to make the caches; four steps are more than 200 ms, then come three that count.
    assert device.steps == [(2, 0), *((2, 100 + n) for n in range(4 + 3))]
    device.steps.clear()
    assert trial.seconds(4) == pytest.approx(0.0625)
    assert [held for _, held in device.steps] == [0, 100, 101, 102, 103]  # warm already


def test_no_more_sequences_are_tried_than_there_is_memory_for() -> None:
    kv = 100 * 768  # of a sequence in the tiny llama

    trial = DecodeTrial(tiny_model("llama").model, context=100, room=8 * kv)

    assert trial.seconds(12) is None
    assert trial.seconds(8) is not None
    assert DecodeTrial(tiny_model("llama").model, context=100, room=1).seconds(SMALLEST)
