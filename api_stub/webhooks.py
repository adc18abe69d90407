"""Delivers webhooks: tells receivers how their jobs and batches ended, until they took it.

The list of deliveries is in Redis (`mlx_rq.jobs.queue.webhooks`). Any number of servers
may deliver.
"""

import asyncio
import json
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.http_post import PostFailed, post
from mlx_rq.api_stub.job_view import job_view
from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import JobNotFound, RedisUnavailable, RequestError
from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.connection import connect
from mlx_rq.jobs.queue.retry import RedisRetry
from mlx_rq.jobs.queue.webhook_events import is_event, read_event
from mlx_rq.jobs.queue.webhooks import (
    DELIVERS_SECONDS,
    Delivery,
    claim_due,
    is_allowed,
    postpone,
    say_delivers,
    settle,
    signed_headers,
    url_of,
)

logger = logging.getLogger("mlx_rq.api_stub")

LOOK_SECONDS = 1.0
"""How often it is looked for jobs that ended."""

_TOGETHER = 16
"""Deliveries on their way at once."""

_RETRY_SECONDS = 5.0
_GONE = 410
"""The status by which a receiver says that it wants no more of this."""


def check_target(url: str, settings: Settings) -> None:
    """Raises RequestError where this server would never deliver to a URL.

    What a name leads to is looked at when it is delivered.
    """
    if not settings.webhook_secrets:
        raise RequestError(
            "Invalid 'webhook': this server delivers none. Start it with --webhook-secret-file.",
            code="unsupported_parameter",
            param="webhook",
        )
    host = urlsplit(url).hostname or ""
    address = "127.0.0.1" if host == "localhost" else host
    try:
        allowed = is_allowed(address, settings.webhook_networks)
    except ValueError:  # a name
        return
    if not allowed:
        raise RequestError(
            f"Invalid 'webhook': {host} is no public address. The server delivers to others where "
            "--webhook-allow names their network.",
            code="invalid_value",
            param="webhook",
        )


class Webhooks:
    """Delivers for one server, as long as `run` runs."""

    def __init__(self, settings: Settings, redis_url: str) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._redis = RedisRetry(self._redis_failed, seconds=_RETRY_SECONDS)
        self._say_at = 0.0

    async def run(self) -> None:
        """Delivers what is due until it is cancelled; what is on its way then is taken up later."""
        if not self._settings.webhook_secrets:
            return
        on_their_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                due = await self._claim(_TOGETHER - len(on_their_way))
                on_their_way.update(asyncio.create_task(self._deliver(one)) for one in due)
                if not on_their_way:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                _, on_their_way = await asyncio.wait(
                    on_their_way, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in on_their_way:
                task.cancel()

    async def _claim(self, limit: int) -> list[Delivery]:
        due: list[Delivery] = []
        if limit:
            connection = connect(self._redis_url)

            def claim() -> None:
                due.extend(claim_due(connection, limit))
                if (now := time.monotonic()) >= self._say_at:
                    say_delivers(connection)
                    self._say_at = now + DELIVERS_SECONDS / 3

            await run_in_threadpool(self._redis.attempt, claim)
        return due

    @staticmethod
    def _redis_failed(error: Exception) -> None:
        logger.warning("webhooks wait for Redis: %s", error)

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            await self._try(delivery)
        except (RedisError, RedisUnavailable) as error:
            logger.warning("webhook of %s waits for Redis: %s", _words(delivery), error)
        except Exception:
            logger.exception("webhook of %s", _words(delivery))

    async def _try(self, delivery: Delivery) -> None:
        connection, name = connect(self._redis_url), delivery.name
        try:
            url, event = await run_in_threadpool(self._event, name)
        except (JobNotFound, RequestError) as error:
            logger.warning("webhook of %s is given up: %s", _words(delivery), error)
            await run_in_threadpool(settle, connection, name)
            return
        fault = await self._send(url, event)
        if fault is None:
            await run_in_threadpool(settle, connection, name)
            return
        delay = None
        if fault != _GONE:
            delay = await run_in_threadpool(postpone, connection, delivery)
        else:
            await run_in_threadpool(settle, connection, name)
        then = "given up" if delay is None else f"tried again in {delay:.0f} s"
        # The rest of the URL may hold a secret of the receiver's.
        host = urlsplit(url).hostname
        logger.warning("webhook of %s to %s failed (%s): %s", _words(delivery), host, fault, then)

    async def _send(self, url: str, event: dict[str, Any]) -> str | int | None:
        """Sends an event; returns what went wrong: the receiver's status, or words."""
        body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {
            "content-type": "application/json",
            "user-agent": "mlx-rq",
            **signed_headers(self._settings.webhook_secrets, event["id"], int(time.time()), body),
        }
        try:
            status = await post(url, headers, body, networks=self._settings.webhook_networks)
        except PostFailed as failure:
            return str(failure)
        return None if 200 <= status < 300 else status

    def _event(self, name: str) -> tuple[str, dict[str, Any]]:
        """Gives where to send an event, and what it says.

        Raises JobNotFound where it is too late, RequestError where it cannot be read.
        """
        return read_event(connect(self._redis_url), name) if is_event(name) else self._end_of(name)

    def _end_of(self, job_id: str) -> tuple[str, dict[str, Any]]:
        url = url_of(connect(self._redis_url), job_id)
        view = job_view(Job(job_id, self._redis_url))
        if url is None:
            raise RequestError("its record names no URL", code=None, param="webhook")
        event = {
            "id": f"evt_{job_id}",
            "object": "event",
            "type": f"job.{view['status']}",
            "created_at": int(reading.unix_time(view["ended_at"])),
            "data": view,
        }
        return url, event


def _words(delivery: Delivery) -> str:
    return delivery.name if is_event(delivery.name) else f"job {delivery.name}"
