"""Says after each window of work what it came to."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from mlx_rq.engine.interface import Totals

logger = logging.getLogger("mlx_rq.worker")

LONGEST_SECONDS = 60.0
"""A worker that is never idle reports this often."""


class WindowStats:
    """Logs what was computed since the last report: when the worker runs dry, or every minute."""

    def __init__(
        self, totals: Callable[[], Totals], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._totals = totals
        self._clock = clock
        self._last = asdict(totals())
        self._last_at = clock()

    def idle(self) -> None:
        """The worker has nothing to do: a window has ended."""
        self._stats()

    def busy(self) -> None:
        """The worker goes on; now and then it says how."""
        if self._clock() - self._last_at > LONGEST_SECONDS:
            self._stats()

    def _stats(self) -> None:
        now = asdict(self._totals())
        did = {name: value - self._last[name] for name, value in now.items()}
        self._last, self._last_at = now, self._clock()
        if not did["decoded_tokens"]:
            return
        logger.info(
            "%d tasks: %d prompt tokens, %d distinct, %d prefilled (%d positions) in %.1f s; "
            "%d tokens decoded in %d steps, %.1f s; "
            "so far %.2f prefilled for each distinct token, %d saved by sharing",
            did["tasks"],
            did["prompt_tokens"],
            did["distinct_tokens"],
            did["prefilled_tokens"],
            did["positions_computed"],
            did["prefill_seconds"],
            did["decoded_tokens"],
            did["decode_steps"],
            did["decode_seconds"],
            now["prefilled_tokens"] / max(1, now["distinct_tokens"]),
            max(0, now["prompt_tokens"] - now["prefilled_tokens"]),
        )
