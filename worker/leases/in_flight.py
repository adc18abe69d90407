"""Says before each piece of work whose attempt it is, should the worker die of it."""

from collections.abc import Collection, Sequence

from redis import Redis

from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.retry import RedisRetry


def kept_seconds(lease_seconds: int) -> int:
    """As long as what tells of the leases (`lease.lua`): it is read when they go back."""
    return 3 * lease_seconds + 60


class InFlightRecord:
    """What a worker says of the jobs that it generates, and of those that it reads.

    While Redis is away, as `redis_retry` knows, it is not said; later it is.
    """

    def __init__(
        self, connection: Redis, worker_name: str, lease_seconds: int, redis_retry: RedisRetry
    ) -> None:
        self._connection = connection
        self._key = keys.in_flight(worker_name)
        self._kept_seconds = kept_seconds(lease_seconds)
        self._redis_retry = redis_retry
        self._said: tuple[set[str], set[str]] | None = None

    def say(self, job_ids: Collection[str], reading: Collection[str] = ()) -> None:
        """Says which jobs are being generated, and which read together, of which one may be bad.

        Costs nothing where that has been said.
        """
        now = set(job_ids), set(reading)
        if self._said != now and self._redis_retry.attempt(lambda: self._write(job_ids, reading)):
            self._said = now  # else it is said again when Redis is back

    def about_to_read(self, job_ids: Sequence[str]) -> None:
        """Says what is read now, while nothing is generated: a job may kill the worker by that."""
        if len(job_ids) == 1:
            self.say(job_ids)
        else:
            self.say((), reading=job_ids)

    def _write(self, job_ids: Collection[str], reading: Collection[str]) -> None:
        # Ids are words: workers of an earlier version look for those, and know of no bar.
        words = " ".join([*job_ids, "|", *reading])
        self._connection.set(self._key, words, ex=self._kept_seconds)
