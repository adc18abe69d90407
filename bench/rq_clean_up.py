"""RQ's own clean-up of leases that ran out, as `rq info` runs it, in a loop over a slow link."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from redis import Connection, ConnectionPool, Redis
from redis.exceptions import RedisError
from rq.registry import StartedJobRegistry

from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.payload import SERIALIZER, InertJob

LATENCY, AHEAD = 0.1, 300.0
"""Seconds that it is away, and that its clock is ahead."""


class Late(Connection):
    """A slow link: everything is sent late."""

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        time.sleep(LATENCY)
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]


@contextmanager
def rq_cleaning_up(url: str, done: Counter[str]) -> Iterator[None]:
    """Cleans up while the block runs; counts in `done` how often."""
    enough = threading.Event()
    names = [keys.queue_name("default", priority) for priority in PRIORITIES]

    def clean_up() -> None:
        pool = ConnectionPool.from_url(url, connection_class=Late, socket_timeout=5)
        with Redis.from_pool(pool) as connection:
            registries = [
                StartedJobRegistry(
                    name, connection=connection, serializer=SERIALIZER, job_class=InertJob
                )
                for name in names
            ]
            while not enough.wait(LATENCY):
                for registry in registries:
                    with suppress(RedisError):
                        registry.cleanup(time.time() + AHEAD)
                        done["(clean-up by RQ)"] += 1

    thread = threading.Thread(target=clean_up)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
