"""What a worker says of itself every second, for `mlx-rq status` and `mlx-rq top`."""

import json
import time
from collections.abc import Callable, Collection, Iterable

from redis import Redis

from mlx_rq.engine.interface import Engine
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.rates import Rates

_SAY_SECONDS = 1.0

_KEPT_SECONDS = 120
"""How long it is kept where no more is said: a step may take long."""


class LiveReport:
    """Says how fast a worker is, and which jobs decode in it, once a second. Called by its loop."""

    def __init__(
        self,
        engine: Engine,
        connection: Redis,
        name: str,
        *,
        held: Iterable[ClaimedJob],
        ended: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._key = keys.live(name)
        self._held = held
        self._ended = ended
        self._clock = clock
        self._due = clock()
        self._rates = Rates(lambda: engine.totals, ended, clock)

    def turn(self) -> None:
        """Says what there is to say, where a second has passed."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _SAY_SECONDS
        rows = self._engine.generated()
        self._rates.look(busy=bool(rows) or self._engine.waiting > 0)
        said = {
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "ended": self._ended(),
            "rates": self._rates.said(),
            "rows": rows,
            "waiting_since": self._waiting_since(rows.keys()),
        }
        self._connection.set(self._key, json.dumps(said), ex=_KEPT_SECONDS)

    def _waiting_since(self, running: Collection[str]) -> dict[str, float]:
        """Tells when the oldest job that has not begun was submitted, of each queue."""
        unfinished, since = self._engine.task_ids, dict[str, float]()
        for job in self._held:
            waits = job.id in unfinished and job.id not in running
            if waits and job.submitted_at is not None:
                known = since.get(job.queue_name, job.submitted_at)
                since[job.queue_name] = min(known, job.submitted_at)
        return since

    def forget(self) -> None:
        """Takes away what was said."""
        self._connection.delete(self._key)
