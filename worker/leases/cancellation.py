"""Jobs that end before they are answered: those that somebody cancelled, those out of time."""

import queue
import time
from collections.abc import Callable, Iterable

from mlx_rq.jobs.openai.errors import ErrorObject, error_object
from mlx_rq.worker.leases.claim import ClaimedJob


class Cancellations:
    """Collects what interrupts the jobs of a worker. `cancel` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[str, ClaimedJob] = {}
        self._waiting: dict[str, float] = {}  # the timeouts of jobs that have not begun
        self._deadlines: dict[str, float] = {}
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch(self, job: ClaimedJob) -> None:
        """A job is here, perhaps once more; from now on it can be cancelled."""
        self.forget(job.id)
        self._jobs[job.id] = job
        if job.timeout is not None:
            self._waiting[job.id] = job.timeout

    def began(self, job_ids: Iterable[str]) -> None:
        """These are generated now: the time of a job counts from the first time that it is."""
        if not self._waiting:
            return
        now = self._clock()
        for job_id in job_ids:
            if (timeout := self._waiting.pop(job_id, None)) is not None:
                self._deadlines[job_id] = now + timeout

    def forget(self, job_id: str) -> None:
        """A job has its end."""
        self._jobs.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self._deadlines.pop(job_id, None)

    def cancel(self, job_id: str) -> None:
        """Somebody cancelled a job that is running here."""
        self._cancelled.put(job_id)

    def due(self) -> list[tuple[ClaimedJob, ErrorObject]]:
        """Gives the jobs that are to end now, each once, with the reason."""
        ending = []
        while not self._cancelled.empty():
            if job := self._jobs.get(self._cancelled.get()):
                # Usually the producer has ended it already; RQ's own stop command has not.
                error = error_object("The job was cancelled.", code="cancelled", type="cancelled")
                ending.append((job, error))
                self.forget(job.id)
        now = self._clock()
        for job_id in [job_id for job_id, end in self._deadlines.items() if end < now]:
            job = self._jobs[job_id]
            ending.append((job, _out_of_time(job)))
            self.forget(job_id)
        return ending


def _out_of_time(job: ClaimedJob) -> ErrorObject:
    return error_object(
        f"The job did not finish within its timeout of {job.timeout} seconds.",
        code="request_timeout",
        param="timeout",
        type="server_error",
    )
