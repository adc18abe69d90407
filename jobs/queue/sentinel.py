"""A Redis with replicas, which Sentinels watch: who is asked for its primary, and asked again.

    redis+sentinel://[user:password@]host:port,host:port/name/db

The name is the one under which the Sentinels know the primary. User and password are those of
Redis; `?sentinel_username=…&sentinel_password=…` those of the Sentinels. `rediss+sentinel://` is
the same through TLS, to Sentinels and Redis alike.

What was sent when a primary died may have been done or not, so only reads are sent again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import SSLConnection, parse_url
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)

SCHEME, TLS_SCHEME = "redis+sentinel", "rediss+sentinel"

OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
"""What may stand after the ? beside the options of Redis."""

_DEFAULT_PORT = 26379
_SENTINEL_SECONDS = 2.0
"""Until a Sentinel that does not answer is passed by."""

_PATIENCE = 60.0
"""Seconds that a failover may take for those who wait for it."""

_PAUSE = 0.2

_READS = frozenset(
    {
        *("EXISTS", "GET", "HGET", "HGETALL", "HMGET", "INFO", "LLEN", "LRANGE", "MGET", "PING"),
        *("SMEMBERS", "TIME", "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZRANGE", "ZSCORE"),
    }
)

T = TypeVar("T")


class SentinelUrl(NamedTuple):
    """What a URL says."""

    sentinels: list[tuple[str, int]]
    service: str
    sentinel_login: Mapping[str, Any]
    options: Mapping[str, Any]
    """Those of the connections to Redis itself."""
    tls: Mapping[str, Any] | None
    """What goes for TLS, to both; None without it."""

    @classmethod
    def parse(cls, url: str) -> "SentinelUrl":
        """Reads a URL. Raises ValueError where it is none."""
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError(
                f"the name of the primary is missing; expected {SCHEME}://host:port,host:port/name/0"
            )
        query = dict(parse_qsl(parts.query))
        sentinel_login = {
            name.removeprefix("sentinel_"): query.pop(name) for name in OPTIONS & query.keys()
        }
        scheme = parts.scheme.partition("+")[0]
        plain = f"{scheme}://{login}{at}sentinel/{database or 0}?{urlencode(query)}"
        options = dict(parse_url(plain))
        del options["host"]
        has_tls = options.pop("connection_class", None) is not None
        tls = {name: options.pop(name) for name in list(options) if name.startswith("ssl_")}
        sentinels = [_address(host) for host in hosts.split(",")]
        return cls(sentinels, service, sentinel_login, options, tls if has_tls else None)


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a Sentinel's host is missing")
    return parts.hostname, parts.port or _DEFAULT_PORT


def sentinel_client(url: str, *, patient: bool, **settings: Any) -> Redis:
    """Makes a client of the primary. A `patient` one waits for a failover to end, others fail."""
    said = SentinelUrl.parse(url)
    retry = Retry(NoBackoff(), 0)
    sentinel = Sentinel(said.sentinels, sentinel_kwargs=_sentinel_options(said, retry=retry))
    if said.tls is None:
        connection_class = _PatientConnection if patient else _Connection
    else:
        connection_class = _PatientTLSConnection if patient else _TLSConnection
    client: Redis = sentinel.master_for(
        said.service,
        redis_class=_PatientRedis if patient else Redis,
        connection_class=connection_class,
        **{**settings, **said.options, **(said.tls or {})},
    )
    return client


def async_sentinel_client(url: str, **settings: Any) -> AsyncRedis:
    """Makes a client that waits for a failover to end. For reads only: each may be sent again."""
    said = SentinelUrl.parse(url)
    retry = AsyncRetry(NoBackoff(), 0)
    sentinel = AsyncSentinel(said.sentinels, sentinel_kwargs=_sentinel_options(said, retry=retry))
    client: AsyncRedis = sentinel.master_for(
        said.service,
        redis_class=_PatientAsyncRedis,
        **{**settings, **said.options, **_tls_options(said)},
    )
    return client


def sentinel_address(pool: SentinelConnectionPool) -> str:
    """Says where a client looks for its primary, without secrets, the same for any order."""
    hosts = []
    for sentinel in pool.sentinel_manager.sentinels:
        options = sentinel.connection_pool.connection_kwargs
        hosts.append(f"{options['host']}:{options['port']}")
    database = pool.connection_kwargs.get("db", 0)
    scheme = TLS_SCHEME if issubclass(pool.connection_class, SSLConnection) else SCHEME
    return f"{scheme}://{','.join(sorted(hosts))}/{pool.service_name}/{database}"


def _sentinel_options(said: SentinelUrl, *, retry: Any) -> dict[str, Any]:
    """Says how Sentinels are asked. The `retry` is none: redis-py's own takes eight seconds."""
    seconds = {"socket_timeout": _SENTINEL_SECONDS, "socket_connect_timeout": _SENTINEL_SECONDS}
    return {**seconds, **said.sentinel_login, **_tls_options(said), "retry": retry}


def _tls_options(said: SentinelUrl) -> dict[str, Any]:
    return {} if said.tls is None else {"ssl": True, **said.tls}


def _until_done(action: Callable[[], T], may_repeat: Callable[[Exception], bool]) -> T:
    """Does something, again where a failover came in between; raises its error after a minute."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return action()
        except (ConnectionError, TimeoutError) as error:
            if time.monotonic() > deadline or not may_repeat(error):
                raise
        time.sleep(_PAUSE)


class _Connection(SentinelManagedConnection):
    """A connection to the primary, as long as it is the primary."""

    def connect(self) -> None:
        try:
            super().connect()  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            service = self.connection_pool.service_name
            raise ConnectionError(
                f"no Sentinel can be reached that knows a primary {service!r}"
            ) from error


class _PatientConnection(_Connection):
    """Waits until there is a primary."""

    def connect(self) -> None:
        _until_done(super().connect, lambda error: True)


class _TLSConnection(_Connection, SSLConnection):
    """The same through TLS."""


class _PatientTLSConnection(_PatientConnection, SSLConnection):
    """The same through TLS."""


def _was_not_done(error: Exception) -> bool:
    """Tells the errors of a server that has done nothing: a former primary, or one that loads."""
    return isinstance(error, BusyLoadingError) or "previous master" in str(error)


class _PatientRedis(Redis):
    """Sends reads again after a failover."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        is_read = str(args[0]).upper() in _READS
        ask: Callable[..., Any] = super().execute_command
        return _until_done(
            lambda: ask(*args, **options), lambda error: is_read or _was_not_done(error)
        )

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> "_PatientPipeline":
        return _PatientPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )


class _PatientPipeline(Pipeline):
    """Does so where all of its commands are reads."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = list(self.command_stack)
        reads = all(str(args[0]).upper() in _READS for args, _ in commands)
        run = super().execute

        def ask() -> list[Any]:
            self.command_stack = list(commands)
            return run(raise_on_error)

        return _until_done(ask, lambda error: reads)


async def _until_read(ask: Callable[[], Awaitable[T]]) -> T:
    """Reads something, again where a failover came in between."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return await ask()
        except (ConnectionError, TimeoutError):
            if time.monotonic() > deadline:
                raise
        # Not the connection's own retry: that goes to the same server again.
        await asyncio.sleep(_PAUSE)


class _PatientAsyncRedis(AsyncRedis):
    """Reads, and again after a failover."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        ask: Callable[..., Any] = super().execute_command
        return await _until_read(lambda: ask(*args, **options))

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> AsyncPipeline:
        return _PatientAsyncPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )


class _PatientAsyncPipeline(AsyncPipeline):
    """Does so with many reads at once."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = list(self.command_stack)
        run = super().execute

        async def ask() -> list[Any]:
            self.command_stack = list(commands)
            return await run(raise_on_error)

        return await _until_read(ask)
