"""Says after each window of work what it came to."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from mlx_rq.engine.interface import Totals
from mlx_rq.jobs.openai.words import counted

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
            "%s: %s, %d distinct, %d prefilled (%s) in %.1f s; %s decoded in %s, %.1f s; "
            "so far %.2f prefilled for each distinct token, %d saved by sharing",
            counted(did["tasks"], "task"),
            counted(did["prompt_tokens"], "prompt token"),
            did["distinct_tokens"],
            did["prefilled_tokens"],
            counted(did["positions_computed"], "position"),
            did["prefill_seconds"],
            counted(did["decoded_tokens"], "token"),
            counted(did["decode_steps"], "step"),
            did["decode_seconds"],
            now["prefilled_tokens"] / max(1, now["distinct_tokens"]),
            max(0, now["prompt_tokens"] - now["prefilled_tokens"]),
        )
