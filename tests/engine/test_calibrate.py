"""The batch size that is measured: where more rows stop to pay."""

from pathlib import Path

import pytest
from tiny import tiny_model

from mlx_rq.engine import calibrate


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        (lambda rows: 1.0, calibrate.LARGEST),  # more rows cost nothing
        (lambda rows: float(rows), calibrate.SMALLEST),  # each costs the same
        (lambda rows: 1.0 if rows <= 16 else rows / 16, 16),  # free up to sixteen
    ],
)
def test_rows_are_added_as_long_as_they_pay(
    monkeypatch: pytest.MonkeyPatch, seconds: object, rows: int
) -> None:
    monkeypatch.setattr(calibrate, "_step_seconds", lambda model, count: seconds(count))  # type: ignore[operator]

    assert calibrate.measure_rows(tiny_model("llama").model) == rows


def test_a_machine_is_measured_once_for_each_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []
    monkeypatch.setattr(calibrate, "measure_rows", lambda model: measured.append(model) or 8)

    assert calibrate.batch_rows(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert calibrate.batch_rows(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert len(measured) == 1
    (tmp_path / "batch.json").write_text("{broken")
    assert calibrate.batch_rows(tiny_model("llama"), cache_dir=tmp_path) == 8
    assert len(measured) == 2
