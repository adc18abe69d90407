"""Finished answers on their way to Redis: kept, also on disk, until it has them."""

import logging
from collections.abc import Callable, Iterable

from redis import Redis
from redis.exceptions import RedisError

from mlx_rq.engine.interface import Outcome
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.results.commit import Finished, commit
from mlx_rq.worker.results.spool import Spool

logger = logging.getLogger("mlx_rq.worker")


class Outbox:
    """Sends answers until Redis has taken each, or somebody else has answered its job.

    `was_lost` tells of a job that Redis does not know whether its data was lost, or it was deleted.
    """

    def __init__(
        self, connection: Redis, spool: Spool, was_lost: Callable[[ClaimedJob], bool]
    ) -> None:
        self._connection = connection
        self._spool = spool
        self._was_lost = was_lost
        self._waiting: list[Finished] = spool.load()
        self.ended = 0
        """Jobs that ended with an answer from here."""
        self.discarded = 0
        """Answers that came too late, or to a job that is no more."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job_id: str) -> bool:
        return any(job.id == job_id for job, _ in self._waiting)

    def put(self, finished: Iterable[Finished]) -> None:
        """Takes answers in; nothing is sent yet."""
        self._waiting += finished

    def keep(self) -> None:
        """Writes what is here to the disk: Redis is away, and nothing is sent for a while."""
        self._spool.keep(self._waiting)

    def send(self) -> list[ClaimedJob]:
        """Commits what is here and returns the jobs that are done with; the others stay.

        Raises RedisError where Redis is away; then all stay.
        """
        if not self._waiting:
            return []
        finished = self._waiting
        try:
            committed = commit(self._connection, finished)
        except RedisError:
            self._spool.keep(finished)
            raise
        self._waiting = committed.refused
        self._spool.keep(committed.refused)
        for job, outcome in committed.unknown:
            if self._was_lost(job):
                self._set_aside(job, outcome)
            else:
                logger.info("job %s: answer discarded (the job was deleted)", job.id)
        for job, outcome in committed.evicted:
            self._set_aside(job, outcome)
        self.ended += committed.ended
        self.discarded += sum(map(len, (committed.discarded, committed.unknown, committed.evicted)))
        refused = {id(job) for job, _ in committed.refused}
        done = [job for job, _ in finished if id(job) not in refused]
        self._spool.drop(job.id for job in done)
        return done

    def _set_aside(self, job: ClaimedJob, outcome: Outcome) -> None:
        if (path := self._spool.set_aside(job, outcome)) is not None:
            logger.error("job %s: Redis has lost it; its answer is in %s", job.id, path)
        else:
            logger.error("job %s: Redis has lost it, and its answer with it", job.id)
