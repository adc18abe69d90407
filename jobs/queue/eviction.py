"""Says where Redis may throw away jobs and results to make room, which mlx-rq cannot notice."""

import logging
from contextlib import suppress
from functools import lru_cache

from redis import Redis
from redis.exceptions import RedisError

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.connection import CLUSTER, address, connect

logger = logging.getLogger("mlx_rq")

_KEEPS_ALL = "noeviction"


def eviction_warning(connection: Redis) -> str | None:
    """Says how jobs may be lost by the way in which Redis is set up; None where they may not.

    INFO tells it, which hosted servers allow where they forbid CONFIG. Raises RedisUnavailable
    where it is a cluster, which RQ cannot use.
    """
    told = connection.info()
    if told.get("cluster_enabled"):
        raise RedisUnavailable(f"Redis at {address(connection)} refused: {CLUSTER}")
    policy, most = told.get("maxmemory_policy", _KEEPS_ALL), told.get("maxmemory", 0)
    if policy == _KEEPS_ALL or not most:
        return None
    what = "jobs and results" if policy.startswith("allkeys") else "results and leases"
    evicted = told.get("evicted_keys", 0)
    so_far = f", as it did with {evicted:,} keys so far" if evicted else ""
    return (
        f"Redis may evict {what} when its memory is full{so_far}: its maxmemory-policy is "
        f"{policy!r}. Set it to {_KEEPS_ALL!r}."
    )


def warn_of_eviction(connection: Redis) -> None:
    """Logs that jobs may be evicted, where it is so. A Redis that does not tell is left alone."""
    with suppress(RedisError):
        if (warning := eviction_warning(connection)) is not None:
            logger.warning("%s", warning)


@lru_cache(maxsize=16)
def warn_once_of_eviction(redis_url: str) -> None:
    """Does the same, once in a process for each URL."""
    warn_of_eviction(connect(redis_url))
