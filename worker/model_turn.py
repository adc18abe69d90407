"""Whose turn it is, of the models that a worker serves: looks at what waits, and has one loaded."""

import logging
from collections.abc import Callable

from mlx_rq.engine.interface import Outcome
from mlx_rq.worker.held import HeldJobs
from mlx_rq.worker.intake import Intake
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.models.changes import Interrupted, ModelChanges
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel
from mlx_rq.worker.process.power import KeepAwake

logger = logging.getLogger("mlx_rq.worker")

_REFUSED_AT_ONCE = 256


class ModelTurn:
    """Changes the model of a worker between two steps. `say` has it said that something changed."""

    def __init__(
        self,
        engine: EngineSwitch,
        claims: Claims,
        held: HeldJobs,
        intake: Intake,
        changes: ModelChanges,
        awake: KeepAwake,
        say: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._held = held
        self._intake = intake
        self._changes = changes
        self._awake = awake
        self._say = say

    def look(self) -> None:
        """Loads another model where that is due, once what has begun is at its end.

        One that had nothing to do for long is unloaded. Raises RedisError.
        """
        if self._changes.never:
            return
        if not self._held and self._changes.unload_idle():
            self._awake.release()
            self._say()
        self._look_for_others()
        if self._changes.due and self._intake.open:
            self._make_way()
            if not self._held:
                self._load_next()

    def _look_for_others(self) -> None:
        """Looks what waits for the other models; ends jobs of those that cannot be loaded."""
        if self._changes.is_look_due(bool(self._held)) and self._intake.open:
            self._changes.look(job.rank for job in self._held)
            for model in self._changes.unloadable:
                self._refuse(model)

    def _refuse(self, model: ServedModel) -> None:
        refused = self._claims.take(_REFUSED_AT_ONCE, models=model.names)
        self._held.take_in(refused)
        error = self._changes.error(model)
        self._held.finish(Outcome(job.id, {"error": error}) for job in refused)

    def _make_way(self) -> None:
        """Gives back what has not begun."""
        in_flight = self._engine.in_flight
        self._held.give_back(job_id for job_id in self._held.ids if job_id not in in_flight)

    def _load_next(self) -> None:
        self._awake.turn(True)
        self._say()
        try:
            self._changes.load_next()
        except Interrupted:
            logger.info("loading was broken off")
        self._say()
