"""The clock by which machines judge each other's deadlines: that of Redis, not their own."""

from typing import Any

from redis import Redis


def redis_time(connection: Redis) -> float:
    """Asks Redis for its Unix time, in seconds."""
    reply: Any = connection.time()
    seconds, microseconds = reply
    return float(seconds + microseconds / 1_000_000)
