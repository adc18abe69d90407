"""The way to Redis: one client for each URL, and one clear line when nobody answers."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import (
    AuthenticationError,
    ClusterError,
    ConnectionError,
    MovedError,
    ResponseError,
    TimeoutError,
)
from redis.sentinel import SentinelConnectionPool

from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.words import in_a_sentence
from mlx_rq.jobs.queue import sentinel
from mlx_rq.jobs.queue.discovery import embedded_url
from mlx_rq.jobs.queue.local_network import permission_hint
from mlx_rq.jobs.queue.sentinel import (
    async_sentinel_client,
    sentinel_address,
    sentinel_client,
)

DEFAULT_URL = "redis://localhost:6379/0"
URL_VARIABLE = "MLX_RQ_REDIS_URL"
SOCKET_TIMEOUT = 30.0
"""Seconds until an answer counts as lost: well above the longest blocking read."""
_MAX_CONNECTIONS = 10_000
"""Every thread that waits for a result holds a connection; redis-py stops at a hundred."""

_OPTIONS = frozenset(
    {
        *("client_name", "db", "health_check_interval", "max_connections", "password"),
        *("retry_on_timeout", "socket_connect_timeout", "socket_keepalive", "socket_timeout"),
        "username",
    }
)
"""What may stand after the ? of a URL.

redis-py takes more, but all of it as it stands, and says so at the first connection; some
(decode_responses) change the answers that this code reads.
"""

_TLS_OPTIONS = frozenset(
    {
        *("ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"),
        *("ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password"),
    }
)
"""And with rediss:// only."""

CLUSTER = (
    "it is a Redis Cluster, which RQ cannot use: a job and its queue lie on different nodes there. "
    "Take a single primary, with replicas and Sentinels where it has to be safe "
    "(redis+sentinel://host:port,host:port/name/0)."
)

_SIGNS = "a password's / # ? @ are %2F %23 %3F %40"


def resolve_url(redis_url: str | None = None) -> str:
    """Chooses the URL: the argument, else the environment's, else the embedded server's.

    The environment's is `MLX_RQ_REDIS_URL`. Where no embedded server runs either, localhost.
    """
    if not isinstance(redis_url, str | None):
        raise RequestError(
            f"Invalid 'redis_url': expected a text such as {DEFAULT_URL}, but got {redis_url!r} "
            "instead.",
            code="invalid_value",
            param="redis_url",
        )
    return redis_url or os.environ.get(URL_VARIABLE) or embedded_url() or DEFAULT_URL


def new_connection(redis_url: str | None = None, *, patient: bool = False) -> Redis:
    """Makes a client of its own for a URL (a worker's threads do not share one).

    A `patient` one waits for the end of a failover, where Sentinels are named. Raises RequestError
    where the URL is not one that redis-py reads.
    """
    url = resolve_url(redis_url)
    shown = without_password(url)
    try:
        reason = _wrong_option(url)
        settings: dict[str, Any] = {
            "socket_timeout": SOCKET_TIMEOUT,
            "health_check_interval": 30,
            "max_connections": _MAX_CONNECTIONS,
        }
        if reason is None and has_sentinels(url):
            return sentinel_client(url, patient=patient, **settings)
        if reason is None:
            (urlsplit(url).hostname or "").encode("idna")  # as it is when a connection is made
            return Redis.from_url(url, **settings)
    except ValueError as error:
        # The parser's own words may repeat what it took for the port: a part of the password.
        reason = str(error) if shown == url else f"check the port; {_SIGNS}"
    raise RequestError(
        f"Invalid Redis URL {shown!r}: {reason}", code="invalid_value", param="redis_url"
    )


def new_async_connection(redis_url: str) -> AsyncRedis:
    """Makes a client for an event loop; for reads only, as with Sentinels they are sent again."""
    if has_sentinels(redis_url):
        return async_sentinel_client(redis_url, socket_timeout=SOCKET_TIMEOUT)
    return AsyncRedis.from_url(redis_url, socket_timeout=SOCKET_TIMEOUT)


def has_sentinels(url: str) -> bool:
    """Tells a URL that names Sentinels instead of a server."""
    return url.startswith((f"{sentinel.SCHEME}://", f"{sentinel.TLS_SCHEME}://"))


def _wrong_option(url: str) -> str | None:
    """Says which option of a URL is not to stand there; None where all may."""
    parts = urlsplit(url)
    known = _OPTIONS | _TLS_OPTIONS if parts.scheme.startswith("rediss") else _OPTIONS
    known = known | sentinel.OPTIONS if has_sentinels(url) else known
    wrong = next((name for name, _ in parse_qsl(parts.query) if name not in known), None)
    if wrong is None:
        return None
    if "@" in parts.query:  # then it is the end of a password with a ? in it, which nobody may see
        return f"check what follows the ?; {_SIGNS}"
    if wrong in _TLS_OPTIONS:
        return f"the option {wrong!r} goes with rediss:// only"
    return f"the option {wrong!r} cannot be set; those that can are {', '.join(sorted(known))}"


@lru_cache(maxsize=16)
def _shared(url: str, pid: int) -> Redis:
    return new_connection(url, patient=True)


def connect(redis_url: str | None = None) -> Redis:
    """Gives the client that this process shares for a URL. Connects when first used."""
    return _shared(resolve_url(redis_url), os.getpid())


def without_password(url: str) -> str:
    """Hides the password of a URL, so that it can be shown and logged.

    Up to the last @, because passwords are pasted in with signs that a URL would not have there.
    """
    url = re.sub(r"(?<=://)([^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&](?:ssl_|sentinel_)?password=)[^&]*", r"\1***", url)


def address(connection: Redis) -> str:
    """Says where a client connects to, without secrets."""
    if isinstance(connection.connection_pool, SentinelConnectionPool):
        return sentinel_address(connection.connection_pool)
    options = connection.connection_pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    scheme = "rediss" if "SSL" in connection.connection_pool.connection_class.__name__ else "redis"
    return f"{scheme}://{options.get('host')}:{options.get('port')}/{options.get('db', 0)}"


@contextmanager
def reachable(connection: Redis) -> Iterator[None]:
    """Turns a failed connection into RedisUnavailable, which says what was tried and what to do."""
    try:
        yield
    except AuthenticationError as error:
        raise RedisUnavailable(
            f"Redis at {address(connection)} refused the login: {in_a_sentence(error)}. "
            f"Put the user and password into {URL_VARIABLE} (redis://user:password@host:port/0)."
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise RedisUnavailable(
            f"No Redis at {address(connection)}: {in_a_sentence(error)}{permission_hint(error)}. "
            f"Start one with `mlx-rq up`, or point {URL_VARIABLE} to yours."
        ) from error
    except ResponseError as error:  # out of memory, read-only replica, not permitted
        reason = f"{in_a_sentence(error)}."
        if isinstance(error, ClusterError | MovedError) or "CROSSSLOT" in reason:
            reason = CLUSTER
        raise RedisUnavailable(f"Redis at {address(connection)} refused: {reason}") from error
