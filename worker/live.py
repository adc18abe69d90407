"""What a worker says of itself every second, for `mlx-rq status` and `mlx-rq top`."""

import json
import time
from collections.abc import Callable

from redis import Redis

from mlx_rq.engine.interface import Engine
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.rates import Rates

_SAY_SECONDS = 1.0

_ROWS_SECONDS = 120
"""How long the rows of a worker that says no more are kept: a step may take long."""


class LiveReport:
    """Says how fast a worker is, and which jobs run in it, once a second. Called by its loop."""

    def __init__(
        self,
        engine: Engine,
        connection: Redis,
        name: str,
        *,
        ended: Callable[[], int],
        say: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._key = keys.rows(name)
        self._say = say
        self._clock = clock
        self._due = clock()
        self._rates = Rates(lambda: engine.totals, ended, clock)
        self._had_rows = True
        self.rates = self._rates.said()
        """Tokens and jobs a second, as of the last turn. Other threads may read it."""

    def turn(self) -> None:
        """Says what there is to say, where a second has passed."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _SAY_SECONDS
        rows = self._engine.generated()
        self._rates.look(busy=bool(rows) or self._engine.waiting > 0)
        self.rates = self._rates.said()
        self._say()
        if rows:
            self._connection.set(self._key, json.dumps(rows), ex=_ROWS_SECONDS)
        elif self._had_rows:
            self.forget()
        self._had_rows = bool(rows)

    def forget(self) -> None:
        """Takes the list of what runs away."""
        self._connection.delete(self._key)
