"""What is measured: where more sequences stop to pay, and from where on prefixes are shared."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import base, llama
from tiny import tiny_model

from mlx_rq.engine.models import calibrate


def test_a_machine_is_measured_once_for_each_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials = []
    caplog.set_level("INFO", "mlx_rq.engine")

    class Trial:
        def __init__(self, model: Module, *, room: int | None, context: int) -> None:
            trials.append((room, context))

        def seconds(self, sequences: int) -> float:
            return 1.0 if sequences <= 16 else sequences / 16

    monkeypatch.setattr(calibrate, "DecodeTrial", Trial)

    def best(model: str = "llama") -> int:
        return calibrate.best_batch_size(tiny_model(model), tmp_path, room=10**6)

    assert (best(), best()) == (16, 16)
    assert trials == [(10**6, 1024)]
    first, second = caplog.messages
    assert "--batch auto: 16 sequences decode together" in first
    assert "measured now" in first
    assert "8: 8, 12: 12, 16: 16, 24: 16" in first
    assert "measured before" in second
    (tmp_path / calibrate.FILE).write_text("{broken")
    assert best() == 16
    assert best("qwen3") == 16
    assert len(trials) == 3
    for speeds in ({"8": None}, {"all": 1}, [80.0]):
        calibrate._keep(tiny_model("llama"), tmp_path, decode_speeds={"1024": speeds})
        assert best() == 16
    assert len(trials) == 6
    monkeypatch.setattr(calibrate, "_chip", lambda: "another")
    assert best() == 16
    assert len(trials) == 7


def test_sequences_are_tried_as_long_as_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A chip on which 1,000 tokens of KV are read in as long as a third of the weights."""
    trials = []
    caplog.set_level("INFO", "mlx_rq.engine")

    class Trial:
        def __init__(self, model: Module, *, room: int | None, context: int) -> None:
            trials.append(context)
            self.context = context

        def seconds(self, sequences: int) -> float:
            return 3.0 + sequences * self.context / 1000

    monkeypatch.setattr(calibrate, "DecodeTrial", Trial)
    monkeypatch.setattr("mlx_rq.engine.models.decode_speed.LONGEST_STEP_SECONDS", 10**6)
    model = replace(tiny_model("llama"), context_length=10_000)

    def best(tokens: int | None) -> int:
        return calibrate.best_batch_size(model, tmp_path, tokens=tokens)

    assert [best(tokens) for tokens in (None, 300, 5000, 90_000)] == [24, 96, 8, 4]
    assert trials == [1024, 256, 4096, 9999]
    assert [best(tokens) for tokens in (2000, 513, 511, None)] == [24, 24, 96, 96]
    assert len(trials) == 4
    assert "measured now, with 1024 tokens each, by seq" in caplog.messages[0]
    assert "with 256 tokens each, as jobs that wait have about 300, by seq" in caplog.messages[1]
    assert (
        "measured before, with 256 tokens each, as jobs that waited have about 511" in caplog.text
    )


@pytest.mark.parametrize(
    ("overhead", "share_from"),
    [
        (0.0, 3 * 64),  # sharing always wins: one is read instead of four
        (300.0, 3 * 512),  # a part costs as much as to read 300 tokens of copies
        (9999.0, 3 * 9999),  # it wins nowhere, and would where copies take as long
        (10.0**9, 3 * 16 * 1024),
    ],
)
def test_prefixes_are_shared_from_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch, overhead: float, share_from: int
) -> None:
    monkeypatch.setattr(calibrate, "_seconds_on_prefix", lambda model, n: (overhead, float(n)))

    assert calibrate.measure_share_from(tiny_model("llama").model) == share_from


@pytest.mark.parametrize(
    ("wins", "share_from"),
    [
        ({64, 512, 1024}, 3 * 512),  # the first by chance
        ({64, 256, 1024}, 3 * 1024),
        ({128, 512}, 3 * 2048),
    ],
)
def test_sharing_wins_where_it_does_so_twice(
    monkeypatch: pytest.MonkeyPatch, wins: set[int], share_from: int
) -> None:
    monkeypatch.setattr(
        calibrate, "_seconds_on_prefix", lambda model, n: (0.9 if n in wins else 1.1, 1.0)
    )

    assert calibrate.measure_share_from(tiny_model("llama").model) == share_from


def test_times_that_do_not_grow_with_a_prefix_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "_seconds_on_prefix", lambda model, n: (2.0, 1.0))

    assert calibrate.measure_share_from(tiny_model("llama").model) == 3 * 2048


def test_both_ways_are_timed_over_the_same_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], int]] = []

    def seconds(model: object, tokens: object, caches: list[Any]) -> float:
        held = caches[0].keys
        seen.append((caches[0].offset.tolist(), 0 if held is None else held.shape[2]))
        return float(len(seen))

    monkeypatch.setattr(calibrate, "_seconds", seconds)

    times = calibrate._seconds_on_prefix(tiny_model("llama").model, 100)

    assert seen == 6 * [([100] * 4, 0), ([100] * 4, 100)]
    assert times == (3.0, 4.0)  # the first of each is not counted


def test_a_model_that_cannot_share_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_seconds_on_prefix", lambda model, n: pytest.fail("timed"))

    assert calibrate.measure_share_from(tiny_model("gemma2").model) == 3 * 2048


def test_both_measures_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "measured", lambda seconds: {8: 80.0, 16: 81.0})
    monkeypatch.setattr(calibrate, "measure_share_from", lambda model: 512)
    assert calibrate.known_share_from(tiny_model("llama"), tmp_path) is None

    for _ in range(2):
        assert calibrate.best_batch_size(tiny_model("llama"), tmp_path) == 8
        assert calibrate.share_from(tiny_model("llama"), tmp_path) == 512
        assert calibrate.known_share_from(tiny_model("llama"), tmp_path) == 512
        monkeypatch.setattr(calibrate, "measured", lambda seconds: pytest.fail("measured"))
        monkeypatch.setattr(calibrate, "measure_share_from", lambda m: pytest.fail("measured"))


def test_a_trial_leaves_nothing_installed() -> None:
    gc.collect()  # engines of other tests, which nobody uses any more
    before = llama.scaled_dot_product_attention

    calibrate.measure_share_from(tiny_model("llama").model)

    assert llama.scaled_dot_product_attention is before is base.scaled_dot_product_attention
