"""What is measured: where more sequences stop to pay, and from where on prefixes are shared."""

import gc
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import base, llama
from tiny import tiny_model

from mlx_rq.engine.models import calibrate


@pytest.mark.parametrize(
    ("seconds", "sequences"),
    [
        (lambda sequences: 1.0, calibrate.LARGEST),  # more sequences cost nothing
        (lambda sequences: float(sequences), calibrate.SMALLEST),  # each costs the same
        (lambda sequences: 1.0 if sequences <= 16 else sequences / 16, 16),  # free up to sixteen
    ],
)
def test_sequences_are_added_as_long_as_they_pay(
    monkeypatch: pytest.MonkeyPatch, seconds: object, sequences: int
) -> None:
    monkeypatch.setattr(calibrate, "_step_seconds", lambda model, count: seconds(count))  # type: ignore[operator]

    assert calibrate.measure_sequences(tiny_model("llama").model) == sequences


def test_a_machine_is_measured_once_for_each_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []
    monkeypatch.setattr(calibrate, "measure_sequences", lambda model: measured.append(model) or 8)

    assert calibrate.best_batch_size(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert calibrate.best_batch_size(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert len(measured) == 1
    (tmp_path / "batch.json").write_text("{broken")
    assert calibrate.best_batch_size(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("overhead", "share_from"),
    [
        (0.0, 4 * 64),  # sharing always wins
        (300.0, 4 * 512),  # a part costs as much as to read 300 tokens of copies
        (9999.0, 4 * 2048),  # it wins nowhere: only what is longer than all tried is shared
    ],
)
def test_prefixes_are_shared_from_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch, overhead: float, share_from: int
) -> None:
    monkeypatch.setattr(calibrate, "_seconds_on_prefix", lambda model, n: (overhead, float(n)))

    assert calibrate.measure_share_from(tiny_model("llama").model) == share_from


def test_both_ways_are_timed_over_the_same_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], int]] = []

    def seconds(model: object, tokens: object, caches: list[Any]) -> float:
        held = caches[0].keys
        seen.append((caches[0].offset.tolist(), 0 if held is None else held.shape[2]))
        return float(len(seen))

    monkeypatch.setattr(calibrate, "_seconds", seconds)

    times = calibrate._seconds_on_prefix(tiny_model("llama").model, 100)

    assert seen == 4 * [([100] * 4, 0), ([100] * 4, 100)]
    assert times == (3.0, 4.0)  # the first of each is not counted


def test_a_model_that_cannot_share_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_seconds_on_prefix", lambda model, n: pytest.fail("timed"))

    assert calibrate.measure_share_from(tiny_model("deepseek_v3").model) == 4 * 2048


def test_both_measures_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "measure_sequences", lambda model: 8)
    monkeypatch.setattr(calibrate, "measure_share_from", lambda model: 512)

    for _ in range(2):
        assert calibrate.best_batch_size(tiny_model("llama"), cache_dir=tmp_path) == 8
        assert calibrate.share_from(tiny_model("llama"), cache_dir=tmp_path) == 512
        monkeypatch.undo()


def test_a_trial_leaves_nothing_installed() -> None:
    gc.collect()  # engines of other tests, which nobody uses any more
    before = llama.scaled_dot_product_attention

    calibrate.measure_share_from(tiny_model("llama").model)

    assert llama.scaled_dot_product_attention is before is base.scaled_dot_product_attention
