"""The jobs that a worker holds: from their claim until Redis has their answers, or has them back.

Each is in the engine, as a task, or in the outbox, as an answer.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from mlx_rq.engine.interface import Engine, Outcome
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.worker.leases.cancellation import Cancellations
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.results.outbox import Outbox
from mlx_rq.worker.results.stream import StreamPublisher
from mlx_rq.worker.tasks import no_answer, task_of

logger = logging.getLogger("mlx_rq.worker")


class HeldJobs:
    """Moves jobs between Redis, the engine and the outbox. Only iterating is for any thread."""

    def __init__(
        self, engine: Engine, claims: Claims, outbox: Outbox, stream: StreamPublisher
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._outbox = outbox
        self._stream = stream
        self._cancellations = Cancellations()
        self._jobs: dict[str, ClaimedJob] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[ClaimedJob]:
        with self._lock:
            return iter(list(self._jobs.values()))

    @property
    def ids(self) -> Collection[str]:
        return self._jobs.keys()

    def take_in(self, claimed: Sequence[ClaimedJob]) -> None:
        """Jobs are ours from now on: they are kept alive, and given back if we stop."""
        for job in claimed:
            if job.id in self._jobs:  # its lease ran out and we got it once more: begin afresh
                self._engine.cancel(job.id)
        with self._lock:
            self._jobs.update((job.id, job) for job in claimed)

    def begin(
        self, claimed: Sequence[ClaimedJob], about_to_read: Callable[[Sequence[str]], None]
    ) -> None:
        """Checks jobs and gives the good ones to the engine; the others end at once.

        `about_to_read` is told which are read together, before that. Those of which a worker may
        have died so are read one at a time.
        """
        together = [job for job in claimed if not job.lost_in_reading]
        outcomes: list[Outcome] = []
        for some in [together, *([job] for job in claimed if job.lost_in_reading)]:
            if some:
                about_to_read([job.id for job in some])
                outcomes += self._read(some)
        self.finish(outcomes)

    def _read(self, claimed: Iterable[ClaimedJob]) -> list[Outcome]:
        tasks, outcomes = [], []
        for job in claimed:
            self._cancellations.watch(job)
            if job.stream:
                self._stream.watch(job.id)
            try:
                tasks.append(task_of(job))
            except RequestError as error:
                outcomes.append(Outcome(job.id, {"error": error.error}))
        return outcomes + self._engine.add(tasks)

    def began(self, job_ids: Iterable[str]) -> None:
        """These are generated now: from the first time on, a job's timeout counts."""
        self._cancellations.began(job_ids)

    def finish(self, outcomes: Iterable[Outcome]) -> None:
        """Takes the engine's outcomes; a job that it has forgotten without one ends too."""
        self._outbox.put(
            (self._jobs[outcome.id], outcome) for outcome in outcomes if outcome.id in self._jobs
        )
        if self._engine.running or self._engine.waiting or not self._jobs:
            return
        for job in self:
            if job.id not in self._outbox:
                logger.error("job %s: the engine has forgotten it", job.id)
                self._outbox.put([(job, no_answer(job.id))])

    def cancel(self, name: str) -> None:
        """Somebody cancelled a job, by its id or its execution's. May be called from any thread."""
        for job in self:
            if name in (job.id, job.lease.execution_id):
                self._cancellations.cancel(job.id)

    def end_interrupted(self) -> None:
        """Takes jobs that were cancelled, or are out of time, out of the engine."""
        for job, error in self._cancellations.due():
            if job.id not in self._outbox:  # else it is finished already
                self._engine.cancel(job.id)
                self._outbox.put([(job, Outcome(job.id, {"error": error}))])

    def commit(self) -> None:
        """Writes every finished job; those whose lease was lost are discarded and counted."""
        for job in self._outbox.send():
            if self._jobs.get(job.id) is job:  # not one that was claimed again since
                self._forget(job)

    def give_back(self, job_ids: Iterable[str], *, queues: Collection[str] | None = None) -> int:
        """Leaves jobs that have not ended to other workers; returns how many were still ours.

        With `queues`, only those that came from one of them, and are no suspects.
        """
        jobs = [
            self._jobs[job_id]
            for job_id in job_ids
            if job_id in self._jobs and job_id not in self._outbox
        ]
        if queues is not None:
            jobs = [job for job in jobs if job.queue_name in queues and not job.suspect]
        if not jobs:
            return 0
        returned = self._claims.hand_back(jobs, to_others=True)
        for job in jobs:  # only now: if Redis failed, they are still ours
            self._engine.cancel(job.id)
            self._forget(job)
        return returned

    def _forget(self, job: ClaimedJob) -> None:
        self._cancellations.forget(job.id)
        self._stream.forget(job.id)
        with self._lock:
            del self._jobs[job.id]
