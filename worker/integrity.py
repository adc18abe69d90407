"""What must hold between the jobs of a worker and the tasks of its engine: checked now and then."""

import logging
from collections.abc import Callable, Collection

from mlx_rq.engine.interface import Engine, IntegrityError
from mlx_rq.worker.results.outbox import Outbox

logger = logging.getLogger("mlx_rq.worker")

CHECK_TURNS = 100
"""A worker that is never idle is checked every so many turns."""


class IntegrityChecks:
    """Checks a worker when it is idle, and every so many turns.

    `blame` is told which jobs were in flight, should it end: of those, an attempt is counted.
    """

    def __init__(
        self, engine: Engine, outbox: Outbox, blame: Callable[[Collection[str]], None]
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._blame = blame
        self._turns = 0

    def turn(self, job_ids: Collection[str]) -> None:
        """Called after each turn with the claimed jobs; raises IntegrityError, and logs it."""
        self._turns += 1
        if job_ids and self._turns % CHECK_TURNS:
            return
        try:
            self.check(job_ids)
        except IntegrityError as error:
            logger.error("integrity: %s; the worker ends", error)
            raise

    def check(self, job_ids: Collection[str]) -> None:
        """Raises IntegrityError where a job is on nobody's hands, or the engine contradicts itself.

        Every claimed job has a task in the engine, or an answer on its way, and every task its job.
        """
        self._engine.check()
        tasks = set(self._engine.task_ids)
        lost = [job_id for job_id in job_ids if job_id not in tasks and job_id not in self._outbox]
        if lost:  # else one that the engine always loses would end one worker after the other
            self._blame({*self._engine.in_flight, *lost})
        faults = [f"job {job_id} is claimed, but has neither task nor answer" for job_id in lost]
        faults += [f"task {task_id} is of no claimed job" for task_id in tasks.difference(job_ids)]
        if faults:
            raise IntegrityError("; ".join(faults))
