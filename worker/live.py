"""What a worker says of itself every second, for `mlx-rq status` and `mlx-rq top`."""

import json
import time
from collections.abc import Callable

from redis import Redis

from mlx_rq.engine.interface import Engine
from mlx_rq.jobs.queue import keys
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
        ended: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._key = keys.live(name)
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
        }
        self._connection.set(self._key, json.dumps(said), ex=_KEPT_SECONDS)

    def forget(self) -> None:
        """Takes away what was said."""
        self._connection.delete(self._key)
