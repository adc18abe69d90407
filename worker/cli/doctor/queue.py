"""The queue: whether Redis answers, how soon, what it keeps; its workers, and a real job."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from mlx_rq.jobs.client.submit import submit
from mlx_rq.jobs.openai.errors import JobFailed, JobNotFound, RedisUnavailable, ResultTimeout
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import address, reachable
from mlx_rq.jobs.queue.eviction import eviction_warning
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.cli.doctor.finding import Finding, Fix

_LEAST_VERSION = (6, 2)
_SLOW_SECONDS = 0.05
_CLOCK_SECONDS = 2.0
_PINGS = 5


def queue_findings(connection: Redis, *, ours: bool = False) -> Iterator[Finding]:
    """Looks at the server: our embedded one, whose settings may be mended, or another.

    Raises RedisUnavailable where none answers.
    """
    with reachable(connection):
        trip = min(_seconds_of_ping(connection) for _ in range(_PINGS))
        clock = redis_time(connection) - trip / 2 - time.time()
        told: Mapping[str, Any] = {}
        with suppress(ResponseError):  # a user who may not ask, at a hosted server
            told = connection.info()
    yield _of_version(told, address(connection), trip)
    if told:
        yield _of_persistence(told, _to_set(connection, "appendonly", "yes", ours=ours))
        warning = eviction_warning(connection)
        said = f"maxmemory-policy {told.get('maxmemory_policy', '?')}: nothing is thrown away"
        keep = _to_set(connection, "maxmemory-policy", "noeviction", ours=ours)
        found = Finding("eviction", "ok", said)
        yield Finding("eviction", "error", warning, fix=keep) if warning else found
    yield clock_finding(clock)


def _to_set(connection: Redis, name: str, value: str, *, ours: bool) -> Fix | None:
    """Mends a setting of our embedded server; others' settings are theirs."""
    if not ours:
        return None
    return Fix(f"CONFIG SET {name} {value}", lambda: connection.config_set(name, value))


def _seconds_of_ping(connection: Redis) -> float:
    start = time.perf_counter()
    connection.ping()
    return time.perf_counter() - start


def _of_version(told: Mapping[str, Any], where: str, trip: float) -> Finding:
    name = str(told.get("server_name", "redis")).capitalize()
    version = str(told.get(f"{name.lower()}_version", told.get("redis_version", "")))
    said = (
        f"{name} {version or '(it does not tell)'} at {where}, {1000 * trip:.1f} ms there and back"
    )
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and numbers < _LEAST_VERSION:
        return Finding("queue", "error", said, "Take Redis 6.2 or later, or any Valkey.")
    if told.get("role") == "slave":
        return Finding("queue", "error", said, "It is a replica: name its primary in --redis-url.")
    if trip > _SLOW_SECONDS:
        advice = "Move it nearer: each step of a job waits for it. Over Wi-Fi, take a cable."
        return Finding("queue", "warning", said, advice)
    return Finding("queue", "ok", said)


def _of_persistence(told: Mapping[str, Any], turn_on: Fix | None) -> Finding:
    if told.get("aof_enabled"):
        if told.get("aof_last_write_status", "ok") != "ok":
            advice = "Its disk may be full: its log says more. Jobs are not safe until then."
            return Finding("persistence", "error", "its append-only file cannot be written", advice)
        return Finding("persistence", "ok", "what is accepted is in its append-only file")
    return Finding(
        "persistence",
        "warning",
        "it has no append-only file: killed, it forgets what came since its last snapshot",
        "redis-cli CONFIG SET appendonly yes, and the same in its configuration file.",
        turn_on,
    )


def clock_finding(ahead: float) -> Finding:
    """Judges by how many seconds the clock of Redis is ahead of this machine's."""
    side = "ahead of" if ahead > 0 else "behind"
    if abs(ahead) < _CLOCK_SECONDS:
        return Finding("clock", "ok", "that of Redis and this machine's agree")
    return Finding(
        "clock",
        "warning",
        f"that of Redis is {abs(ahead):,.0f} s {side} this machine's",
        "Leases go by that of Redis, so no job is lost; times that are shown are off. "
        "Have both set by NTP.",
    )


def worker_findings(
    connection: Redis, redis_url: str | None, seconds: float | None
) -> Iterator[Finding]:
    """Looks for workers, and has one of them answer a real job within so many seconds.

    None of them is asked for one where `seconds` is None.
    """
    with reachable(connection):
        workers = live_workers(connection)
    if not workers:
        yield Finding(
            "worker", "warning", "none lives: jobs wait", "Start one: mlx-rq up, or mlx-rq worker."
        )
        return
    for worker in workers:
        said = f"{worker['model']} on {worker['host']}, {worker['running']} running"
        if worker.get("paused"):
            yield Finding("worker", "warning", f"{said}: takes no jobs, {worker['paused']}")
        else:
            yield Finding("worker", "ok", said)
    taking = [worker for worker in workers if not worker.get("paused")]
    if taking and seconds is not None:
        yield _of_a_job(taking[0], redis_url, seconds)


def _of_a_job(worker: Mapping[str, Any], redis_url: str | None, seconds: float) -> Finding:
    model = worker["serves"][0] if worker["serves"] else worker["model"]
    body = {"prompt": "One, two, three,", "max_tokens": 4, "model": model}
    start = time.monotonic()
    try:
        job = submit(body, priority="high", result_ttl=60, redis_url=redis_url)
        try:
            job.result(timeout=seconds)
        finally:
            with suppress(JobNotFound):
                job.delete()
    except ResultTimeout:
        return Finding(
            "job",
            "error",
            f"{model} did not answer within {seconds:.0f} s",
            "It may be busy with much (mlx-rq status), or hang: its terminal or log says more.",
        )
    except (JobFailed, JobNotFound) as error:
        return Finding("job", "error", str(error), "The worker's terminal or log says more.")
    except (RedisUnavailable, RedisError) as error:
        return Finding("job", "error", str(error))
    return Finding("job", "ok", f"{model} answered one in {time.monotonic() - start:.1f} s")
