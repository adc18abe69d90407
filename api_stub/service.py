"""Takes a request's body to the queue: the way of every job through the server.

`read_json` → `Service.submit` (kind, model, room, then as `mlx_rq.submit` does) → a job, on which
an endpoint waits (`long_poll.py`) or whose id it answers with.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from redis import Redis
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.batch_runner import BatchRunner
from mlx_rq.api_stub.errors import ApiError, away, never_known
from mlx_rq.api_stub.file_store import FileStore, lock_folder
from mlx_rq.api_stub.metrics import Requests
from mlx_rq.api_stub.middleware import CLIENT
from mlx_rq.api_stub.quota import Quota, Room
from mlx_rq.api_stub.sampler import Sampler
from mlx_rq.api_stub.settings import ANYONE, Settings
from mlx_rq.api_stub.webhooks import Webhooks
from mlx_rq.jobs.client.conversation import with_history
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.client.submit import send
from mlx_rq.jobs.openai.errors import JobNotFound, RedisUnavailable, RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.requests import ANY_MODEL, asked_model
from mlx_rq.jobs.openai.surrogates import writable
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.discovery import HTTP_FOLDER
from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.jobs.queue.owners import may_see, may_see_job, owner_of
from mlx_rq.jobs.queue.prepare import prepare
from mlx_rq.jobs.queue.workers import known_models, live_workers

logger = logging.getLogger("mlx_rq.api_stub")

_DEFAULTS = JobOptions()

_SERVING_SECONDS = 1.0
"""How long the server goes by what it last saw the live workers serve."""

_SWEEP_SECONDS = 60.0


class Service:
    """What the endpoints share: the settings, the way to Redis, files and batches, and counts.

    Raises RequestError where another server uses the same data folder.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redis_url = resolve_url(settings.redis_url)
        self.requests = Requests()
        self._quota = Quota(settings.jobs_per_key)
        self._room = Room(settings.max_queued)
        self._served: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        folder = settings.data_dir / HTTP_FOLDER
        self._lock = lock_folder(folder)
        self.files = FileStore(folder / "files")
        self.webhooks = Webhooks(settings, self.redis_url)
        self.batches = BatchRunner(
            folder / "batches", self.files, self.redis_url, self._is_batch_model
        )

    @property
    def connection(self) -> Redis:
        return connect(self.redis_url)

    async def submit(
        self,
        request: Request,
        kind: str,
        body: Mapping[str, Any],
        *,
        options: JobOptions = _DEFAULTS,
        waits: bool = False,
        any_model: bool = False,
        wanted: JobRequest | None = None,
    ) -> Job:
        """Puts a job into the queue under the request's Idempotency-Key, if it has one.

        As at OpenAI, a body has to name its model, unless `any_model` will do. `wanted` is the
        body's request where that was validated already.

        Raises RequestError where the body is wrong, ApiError where no live worker serves the model
        (an endpoint that `waits` never takes such a job) or too many jobs wait for it.
        """
        key = request.headers.get("idempotency-key") or None
        if body.get("model") is None and not any_model:
            validate(kind, body)
            raise RequestError(
                f"Missing required parameter: 'model'. Every worker serves {ANY_MODEL!r}.",
                code="missing_required_parameter",
                param="model",
            )
        options = replace(options, owner=request.scope["state"][CLIENT])
        return await run_in_threadpool(self._submit, kind, body, wanted, options, waits, key)

    def _submit(
        self,
        kind: str,
        body: Mapping[str, Any],
        wanted: JobRequest | None,
        options: JobOptions,
        waits: bool,
        idempotency_key: str | None,
    ) -> Job:
        names = [body.get("model"), body.get("adapters")]
        if all(name is None or _is_text(name) for name in names):  # else submit says what is wrong
            with reachable(self.connection):
                model = asked_model(*names)
                try:
                    self.check_served(model, waits=waits)
                except ApiError as error:
                    if error.status == HTTPStatus.SERVICE_UNAVAILABLE and wanted is None:
                        validate(kind, body)  # what is wrong is not to come again
                    raise
                self._room.check(self.connection, model)
        with self._quota.place(self.connection, options.owner or ANYONE) as place:
            prepared = prepare(body, request=wanted or validate(kind, body))
            prepared = with_history(prepared, self.redis_url, options.owner)
            keys = None if idempotency_key is None else [idempotency_key]
            (job,) = send([prepared], options, keys, redis_url=self.redis_url)
            place.job_id = job.id
            return job

    def retry(self, job: Job) -> Job:
        """Puts what a job asked for into the queue once more, as urgent as it was and its owner's.

        Raises ApiError where it has not failed, or there is no room.
        """
        info = job.info()
        if info["status"] not in ("failed", "cancelled"):
            raise ApiError(
                409,
                f"Job {job.id} is {info['status']}; only one that failed or was cancelled is tried "
                "again.",
                code="job_not_failed",
                param="id",
            )
        options = JobOptions(priority=info["priority"], owner=owner_of(self.redis_url, job.id))
        with reachable(self.connection):
            self._room.check(self.connection, info["model"])
        with self._quota.place(self.connection, options.owner or ANYONE) as place:
            # Without its history: what came before a response is in its body already.
            (again,) = send([prepare(job.payload().body)], options, redis_url=self.redis_url)
            place.job_id = again.id
            return again

    async def find(self, client: str | None, job_id: str) -> Job:
        """Gives the job of an id; raises JobNotFound where the client may not see it.

        Whether it is there at all is seen when it is asked.
        """
        sees_all = may_see(client, None)
        if not sees_all and not await run_in_threadpool(
            may_see_job, self.redis_url, client, job_id
        ):
            raise JobNotFound(job_id)
        return Job(job_id, self.redis_url)

    def check_served(self, model: str, *, waits: bool) -> None:
        """Raises ApiError where no live worker serves the model and the job may not wait for one.

        What is only away (503 for who `waits`) is told from what never was (404).
        A worker that came a moment ago is seen, because a refusal is never taken from memory.
        """
        now = time.monotonic()
        if model in self._served and now < self._looked_at + _SERVING_SECONDS:
            return
        workers = live_workers(self.connection)
        self._served = frozenset(name for worker in workers for name in worker["serves"])
        self._looked_at = now
        if model in self._served or (self.settings.queue_unserved and not waits):
            return
        known = self.known()
        if model not in known:
            raise never_known(model, self._served, known - self._served)
        if waits:
            raise away(model)

    def known(self) -> set[str]:
        """Gives the models that this queue has known or the server was told of."""
        return {ANY_MODEL, *self.settings.models, *known_models(self.connection)}

    @property
    def served(self) -> frozenset[str]:
        """The models that live workers served when that was looked at last."""
        return self._served

    def _is_batch_model(self, model: str) -> bool:
        with reachable(self.connection):
            try:
                self.check_served(model, waits=False)
            except ApiError:
                return False
        return True

    async def run(self) -> None:
        """Runs batches, sends webhooks, and deletes expired files, until it is cancelled."""
        await run_in_threadpool(self._look_for_redis)
        self.batches.resume()
        beside = [
            asyncio.create_task(task)
            for task in (self.webhooks.run(), Sampler(self.redis_url).run())
        ]
        try:
            while True:
                await self._sweep()
                await asyncio.sleep(_SWEEP_SECONDS)
        finally:
            for task in beside:
                task.cancel()
            self.batches.close()
            self._lock.close()

    def _look_for_redis(self) -> None:
        """Says so where there is no Redis, which requests would find out one by one."""
        try:
            with reachable(self.connection):
                self.connection.ping()
        except RedisUnavailable as error:
            logger.warning("%s Until then, requests are answered with 503.", error)

    async def _sweep(self) -> None:
        """Deletes files and folders that nobody needs; what goes wrong is tried again later."""
        for sweep in (self.files.sweep, self.batches.sweep):
            try:
                await run_in_threadpool(sweep)
            except Exception:  # as a disk's error: that must not end the batches, which run on
                logger.exception("Cleaning up the data folder failed")


async def get_service(request: Request) -> Service:
    """Finds the service of the app that serves a request.

    Dependencies are coroutines: FastAPI would call each function in a thread.
    """
    service: Service = request.app.state.service
    return service


async def _get_files(request: Request) -> FileStore:
    return (await get_service(request)).files


async def _get_batches(request: Request) -> BatchRunner:
    return (await get_service(request)).batches


async def _get_client(request: Request) -> str | None:
    """Says who asks; None where the server asks for no keys."""
    client: str | None = request.scope["state"][CLIENT]
    return client


TheService = Annotated[Service, Depends(get_service)]
TheClient = Annotated[str | None, Depends(_get_client)]
TheFiles = Annotated[FileStore, Depends(_get_files)]
TheBatches = Annotated[BatchRunner, Depends(_get_batches)]


def _is_text(value: Any) -> bool:
    """Tells whether a value is some text that can be written."""
    return isinstance(value, str) and value != "" and writable(value) is value
