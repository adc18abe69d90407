"""Which models are not to be loaded now, and why: those that failed, and those that killed workers.

What is told of a model holds for its adapters, too: without their base they cannot be loaded.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.switch import ServedModel

logger = logging.getLogger("mlx_rq.worker")

AGAIN_SECONDS = 60.0
"""A model that could not be loaded is tried again after so long, if there are jobs for it.

One that took the worker with it is tried after so long, too, then after twice as long.
"""

MOST_DEATHS = 3
"""After so many workers that died while they loaded a model its jobs are refused."""

GIVEN_UP_SECONDS = 3600.0
"""So long after the last of them; then it is tried once more."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model could not be loaded, and until when that is taken for granted."""

    reason: str
    until: float


class Setbacks:
    """What this worker, and by their notes those before it, met when they loaded models."""

    def __init__(self, notes: LoadingNotes, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, _Failure] = {}
        self._rests_until: dict[str, float] = {}
        for model, deaths in notes.deaths().items():
            ago = max(0.0, time.time() - deaths.last)  # the clock may have been set back
            died = counted(deaths.count, "worker died while it", "workers died while they")
            logger.error("%s loaded %s", died, model)
            if deaths.count < MOST_DEATHS:
                rest = AGAIN_SECONDS * 2 ** (deaths.count - 1) - ago
                self._rests_until[model] = clock() + rest
            else:
                reason = (
                    f"{died} loaded it, most likely for want of "
                    "memory; choose a smaller one, or one of fewer bits"
                )
                self._failures[model] = _Failure(reason, clock() + GIVEN_UP_SECONDS - ago)

    def failed(self, model_id: str, reason: str) -> None:
        """Takes note that a model could not be loaded."""
        self._failures[model_id] = _Failure(reason, self._clock() + AGAIN_SECONDS)

    def loaded(self, model: ServedModel) -> None:
        """Takes note that a model is there after all."""
        for one in (model.id, model.base_id):
            self._failures.pop(one, None)
            self._rests_until.pop(one, None)

    def reason(self, model: ServedModel) -> str:
        """Says why a model could not be loaded when it was tried last; empty where it could."""
        failure = self._failure_of(model)
        return model.too_large or ("" if failure is None else failure.reason)

    def is_given_up(self, model: ServedModel) -> bool:
        """Whether a model's jobs are to be refused for now."""
        failure = self._failure_of(model)
        return failure is not None and failure.until > self._clock()

    def rests(self, model: ServedModel) -> bool:
        """Whether a model's jobs are to wait, since loading it killed a worker not long ago."""
        now = self._clock()
        return any(self._rests_until.get(one, now) > now for one in (model.id, model.base_id))

    def _failure_of(self, model: ServedModel) -> _Failure | None:
        return self._failures.get(model.base_id) or self._failures.get(model.id)
