"""What a worker says of a window of work."""

import logging

import pytest

from mlx_rq.engine.interface import Totals
from mlx_rq.worker.stats import LONGEST_SECONDS, WindowStats


def test_a_window_is_reported_once_and_only_what_it_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    totals = Totals(tasks=5, decoded_tokens=10, prompt_tokens=100)
    now = 0.0
    report = WindowStats(lambda: totals, clock=lambda: now)
    totals = Totals(
        tasks=7, decoded_tokens=42, prompt_tokens=900, distinct_tokens=90, prefilled_tokens=91
    )

    with caplog.at_level(logging.INFO, logger="mlx_rq.worker"):
        report.busy()
        assert caplog.messages == []
        now = LONGEST_SECONDS + 1
        report.busy()
        report.idle()

    (message,) = caplog.messages
    assert message.startswith("2 tasks: 800 prompt tokens, 90 distinct, 91 prefilled")
    assert "32 tokens decoded" in message
    assert message.endswith("so far 1.01 prefilled for each distinct token, 809 saved by sharing")
