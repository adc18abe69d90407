"""Puts jobs into the queue: validate, write JSON, ring the bell. The first stop of every job."""

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from mlx_rq.jobs import keys
from mlx_rq.jobs.connection import connect, reachable
from mlx_rq.jobs.errors import IdempotencyConflict, RequestError
from mlx_rq.jobs.handle import Job
from mlx_rq.jobs.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESULT_TTL,
    RECOVERY_RETRIES,
    JobOptions,
)
from mlx_rq.jobs.payload import FUNCTION, SERIALIZER
from mlx_rq.jobs.validation import encode_body, kind_of, validate
from pydantic import BaseModel
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Queue, Retry
from rq.queue import EnqueueData

JOBS_PER_TRANSACTION = 500
_BELLS_KEPT = 16


class _Checked(NamedTuple):
    """A body that passed the door."""

    kind: str
    model: str
    body: Mapping[str, Any]


def submit(
    body: Mapping[str, Any] | None = None,
    /,
    *,
    schema: type[BaseModel] | Mapping[str, Any] | None = None,
    priority: keys.Priority = "default",
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    idempotency_key: str | None = None,
    redis_url: str | None = None,
    **fields: Any,
) -> Job:
    """Puts one job into the queue and returns its handle at once.

    The body is given as one mapping or as keyword arguments: `messages=[…]` makes a chat job,
    `prompt="…"` a completion. `schema`, a pydantic class or a JSON schema, asks for an answer of
    that shape. With an `idempotency_key`, a second call with the same body returns the first job.

    Raises RequestError (nothing was enqueued) where the body or an option is wrong,
    IdempotencyConflict where the key was used for another body, RedisUnavailable without Redis.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts)
    checked = _check({**(body or {}), **fields}, schema)
    connection = connect(redis_url)
    with reachable(connection):
        if idempotency_key is not None:
            job_id = _enqueue_once(connection, checked, options, idempotency_key)
        else:
            (job_id,) = _enqueue(connection, [checked], options)
    return Job(job_id, redis_url, schema=schema)


def submit_many(
    bodies: Iterable[Mapping[str, Any]],
    *,
    schema: type[BaseModel] | Mapping[str, Any] | None = None,
    priority: keys.Priority = "default",
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    redis_url: str | None = None,
) -> list[Job]:
    """Puts many jobs into the queue, hundreds in one transaction; returns handles in input order.

    Every body is checked before the first is enqueued. Options apply to all. Raises as `submit`
    does; the message of a RequestError then names the body, as in `bodies[3]: …`.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts)
    checked: list[_Checked] = []
    for index, body in enumerate(bodies):
        try:
            checked.append(_check(body, schema))
        except RequestError as error:
            raise RequestError(
                f"bodies[{index}]: {error}", code=error.code, param=error.param
            ) from None
    connection = connect(redis_url)
    remaining = iter(checked)
    jobs: list[Job] = []
    with reachable(connection):
        while chunk := list(islice(remaining, JOBS_PER_TRANSACTION)):
            job_ids = _enqueue(connection, chunk, options)
            jobs.extend(Job(job_id, redis_url, schema=schema) for job_id in job_ids)
    return jobs


def _check(body: Mapping[str, Any], schema: type[BaseModel] | Mapping[str, Any] | None) -> _Checked:
    if not isinstance(body, Mapping):
        raise RequestError(
            f"Invalid body: expected an object, but got a {type(body).__name__} instead.",
            code="invalid_type",
        )
    if schema is not None:
        body = {**body, "response_format": _response_format(schema)}
    kind = kind_of(body)
    request = validate(kind, body)
    encode_body(body)
    return _Checked(kind, request.model or keys.ANY_MODEL, body)


def _response_format(schema: type[BaseModel] | Mapping[str, Any]) -> dict[str, Any]:
    """Writes a schema as the `response_format` that OpenAI's client would send for it."""
    if isinstance(schema, Mapping):
        name, json_schema = "answer", dict(schema)
    else:
        name, json_schema = schema.__name__, schema.model_json_schema()
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": json_schema, "strict": True},
    }


def _enqueue(
    connection: Redis,
    checked: Sequence[_Checked],
    options: JobOptions,
    pipe: Pipeline | None = None,
) -> list[str]:
    """Enqueues jobs in one transaction; returns their ids, which cannot be guessed."""
    job_ids = [secrets.token_hex(16) for _ in checked]
    by_model: dict[str, list[EnqueueData]] = {}
    for job_id, item in zip(job_ids, checked, strict=True):
        by_model.setdefault(item.model, []).append(_enqueue_data(job_id, item, options))
    own_transaction = pipe is None
    pipe = connection.pipeline() if pipe is None else pipe
    for model, datas in by_model.items():
        queue = Queue(
            keys.queue_name(model, options.priority), connection=connection, serializer=SERIALIZER
        )
        queue.enqueue_many(datas, pipeline=pipe)
        pipe.rpush(keys.bell(model), 1)
        pipe.ltrim(keys.bell(model), -_BELLS_KEPT, -1)
    if own_transaction:
        pipe.execute()
    return job_ids


def _enqueue_data(job_id: str, item: _Checked, options: JobOptions) -> EnqueueData:
    return Queue.prepare_data(
        FUNCTION,
        kwargs={"kind": item.kind, "body": dict(item.body)},
        job_id=job_id,
        # RQ's default description spells out the arguments: prompts do not belong in dashboards.
        description=f"{item.kind} for {item.model}",
        timeout=-1 if options.timeout is None else math.ceil(options.timeout),
        result_ttl=options.result_ttl,
        failure_ttl=options.result_ttl,
        retry=Retry(max=options.max_attempts - 1 + RECOVERY_RETRIES),
        meta={"max_attempts": options.max_attempts, "timeout": options.timeout},
    )


def _enqueue_once(
    connection: Redis, item: _Checked, options: JobOptions, idempotency_key: str
) -> str:
    """Enqueues a job unless its idempotency key already has one; returns the id of that one."""
    key = keys.idempotency(idempotency_key)
    fingerprint = hashlib.sha256(encode_body(item.body).encode()).hexdigest()
    with connection.pipeline() as pipe:
        while True:
            try:
                pipe.watch(key)  # type: ignore[no-untyped-call]
                known: dict[bytes, bytes] = pipe.hgetall(key)  # type: ignore[assignment]
                if known:
                    if known[b"body"].decode() != fingerprint:
                        raise IdempotencyConflict(idempotency_key)
                    return known[b"job"].decode()
                pipe.multi()
                (job_id,) = _enqueue(connection, [item], options, pipe)
                pipe.hset(key, mapping={"job": job_id, "body": fingerprint})
                pipe.expire(key, options.result_ttl)
                pipe.execute()
                return job_id
            except WatchError:
                continue  # somebody used the same key meanwhile: look again
