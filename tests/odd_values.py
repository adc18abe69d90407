"""What may lie in a key or a field of Redis, where something else is expected."""

from collections.abc import Callable
from typing import Any

from redis import Redis

BYTES = {
    "no text": b"\xff\xfe\x80",
    "notjson": b"notjson",
    "null": b"null",
    "array": b"[]",
    "object": b"{}",
    "number": b"-1",
    "large number": b"9" * 40,
    "not a number": b"nan",
    "huge": b"x" * 1_000_000,
}
TYPES: dict[str, Callable[[Redis, str], Any]] = {
    "list": lambda redis, key: redis.rpush(key, "x"),
    "hash": lambda redis, key: redis.hset(key, "x", "y"),
    "set": lambda redis, key: redis.sadd(key, b"\xff"),
    "zset": lambda redis, key: redis.zadd(key, {b"\xff": 1}),
    "stream": lambda redis, key: redis.xadd(key, {"x": "y"}),
}
