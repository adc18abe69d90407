"""Puts jobs into the queue: validate, write JSON, ring the bell. The first stop of every job."""

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Queue, Retry
from rq.queue import EnqueueData

from mlx_rq.jobs import keys
from mlx_rq.jobs.connection import connect, reachable
from mlx_rq.jobs.errors import IdempotencyConflict, RequestError
from mlx_rq.jobs.handle import Job
from mlx_rq.jobs.history import with_history
from mlx_rq.jobs.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESULT_TTL,
    RECOVERY_RETRIES,
    JobOptions,
)
from mlx_rq.jobs.payload import FUNCTION, SERIALIZER
from mlx_rq.jobs.prefix import prefix_of
from mlx_rq.jobs.responses import ResponsesRequest
from mlx_rq.jobs.validation import encode_body, kind_of, validate

JOBS_PER_TRANSACTION = 500
_BELLS_KEPT = 16


class _Checked(NamedTuple):
    """A body that passed the door."""

    kind: str
    model: str
    body: Mapping[str, Any]
    priority: keys.Priority | None
    """What the body itself says of it; that goes before the option."""


def submit(
    body: Mapping[str, Any] | None = None,
    /,
    *,
    schema: type[BaseModel] | Mapping[str, Any] | None = None,
    priority: keys.Priority = "default",
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    stream: bool = False,
    idempotency_key: str | None = None,
    redis_url: str | None = None,
    **fields: Any,
) -> Job:
    """Puts one job into the queue and returns its handle at once.

    The body is given as one mapping or as keyword arguments: `messages=[…]` makes a chat job,
    `prompt="…"` a completion, `input="…"` a response. `schema`, a pydantic class or a JSON schema,
    asks for an answer of that shape. With an `idempotency_key`, a second call with the same body
    returns the first job.

    Raises RequestError (nothing was enqueued) where the body or an option is wrong,
    IdempotencyConflict where the key was used for another body, RedisUnavailable without Redis.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts, stream)
    whole = fields if body is None else {**body, **fields} if isinstance(body, Mapping) else body
    checked = _check(whole, schema, redis_url)
    connection = connect(redis_url)
    with reachable(connection):
        if idempotency_key is not None:
            (job_id,) = _enqueue_once(connection, [checked], options, [idempotency_key])
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
    stream: bool = False,
    idempotency_keys: Sequence[str] | None = None,
    redis_url: str | None = None,
) -> list[Job]:
    """Puts many jobs into the queue, hundreds in one transaction; returns handles in input order.

    Every body is checked before the first is enqueued. Options apply to all; `idempotency_keys`
    has one for each body. Raises as `submit` does; the message of a RequestError then names the
    body, as in `bodies[3]: …`.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts, stream)
    checked: list[_Checked] = []
    for index, body in enumerate(bodies):
        try:
            checked.append(_check(body, schema, redis_url))
        except RequestError as error:
            raise RequestError(
                f"bodies[{index}]: {error}", code=error.code, param=error.param
            ) from None
    if idempotency_keys is not None:
        _check_keys(idempotency_keys, len(checked))
    connection = connect(redis_url)
    jobs: list[Job] = []
    with reachable(connection):
        for start in range(0, len(checked), JOBS_PER_TRANSACTION):
            some = slice(start, start + JOBS_PER_TRANSACTION)
            if idempotency_keys is not None:
                job_ids = _enqueue_once(connection, checked[some], options, idempotency_keys[some])
            else:
                job_ids = _enqueue(connection, checked[some], options)
            jobs.extend(Job(job_id, redis_url, schema=schema) for job_id in job_ids)
    return jobs


def _check_keys(idempotency_keys: Sequence[str], bodies: int) -> None:
    """Raises RequestError unless every body has a key of its own."""
    distinct = len(set(idempotency_keys))
    if not bodies == len(idempotency_keys) == distinct:
        raise RequestError(
            f"Invalid 'idempotency_keys': expected {bodies} different keys, one for each body, "
            f"but got {len(idempotency_keys)}, of which {distinct} are different.",
            code="invalid_value",
            param="idempotency_keys",
        )


def _check(
    body: Mapping[str, Any],
    schema: type[BaseModel] | Mapping[str, Any] | None,
    redis_url: str | None,
) -> _Checked:
    if not isinstance(body, Mapping):
        raise RequestError(
            f"Invalid body: expected an object, but got a {type(body).__name__} instead.",
            code="invalid_type",
        )
    kind = kind_of(body)
    if schema is not None:
        body = _with_schema(kind, body, response_format(schema))
    request = validate(kind, body)
    priority = None
    if isinstance(request, ResponsesRequest):
        priority = request.priority
        if request.previous_response_id is not None:
            body = with_history(body, redis_url)
    encode_body(body)
    return _Checked(kind, request.model or keys.ANY_MODEL, body, priority)


def _with_schema(kind: str, body: Mapping[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Copies a body with a `response_format` in it, where its kind has the place for that."""
    if kind != "responses":
        return {**body, "response_format": wanted}
    flat = {"type": wanted["type"], **wanted["json_schema"]}
    return {**body, "text": {**(body.get("text") or {}), "format": flat}}


def response_format(schema: type[BaseModel] | Mapping[str, Any]) -> dict[str, Any]:
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
    by_queue: dict[tuple[str, keys.Priority], list[EnqueueData]] = {}
    for job_id, item in zip(job_ids, checked, strict=True):
        queue_of = (item.model, item.priority or options.priority)
        by_queue.setdefault(queue_of, []).append(_enqueue_data(job_id, item, options))
    own_transaction = pipe is None
    pipe = connection.pipeline() if pipe is None else pipe
    for (model, priority), datas in by_queue.items():
        name = keys.queue_name(model, priority)
        queue = Queue(name, connection=connection, serializer=SERIALIZER)
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
        meta={
            "max_attempts": options.max_attempts,
            "timeout": options.timeout,
            "stream": options.stream,
            "prefix": prefix_of(item.body),
        },
    )


def _enqueue_once(
    connection: Redis,
    checked: Sequence[_Checked],
    options: JobOptions,
    idempotency_keys: Sequence[str],
) -> list[str]:
    """Enqueues, in one transaction, the jobs whose idempotency keys have none yet.

    Returns the ids of all, found or made. The keys must differ from one another.
    """
    records = [keys.idempotency(key) for key in idempotency_keys]
    fingerprints = [_fingerprint(item.body) for item in checked]
    with connection.pipeline() as pipe:
        while True:
            try:
                pipe.watch(*records)  # type: ignore[no-untyped-call]
                job_ids = _known_jobs(connection, records, fingerprints, idempotency_keys)
                new = [index for index, job_id in enumerate(job_ids) if job_id is None]
                pipe.multi()
                made = _enqueue(connection, [checked[index] for index in new], options, pipe)
                for index, job_id in zip(new, made, strict=True):
                    job_ids[index] = job_id
                    pipe.hset(records[index], mapping={"job": job_id, "body": fingerprints[index]})
                    pipe.expire(records[index], options.result_ttl)
                pipe.execute()
                return [job_id for job_id in job_ids if job_id is not None]
            except WatchError:
                continue  # somebody used one of the keys meanwhile: look again


def _fingerprint(body: Mapping[str, Any]) -> str:
    """Names what a body says: the order of its fields says nothing."""
    text = json.dumps(json.loads(encode_body(body)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _known_jobs(
    connection: Redis,
    records: Sequence[str],
    fingerprints: Sequence[str],
    idempotency_keys: Sequence[str],
) -> list[str | None]:
    """Reads which idempotency records name a job already, all in one round trip.

    Not through the pipeline that watches them: there, every read would be a round trip of its own.
    """
    with connection.pipeline(transaction=False) as reads:
        for record in records:
            reads.hmget(record, "job", "body")
        known = reads.execute()
    job_ids: list[str | None] = []
    for (job_id, body), fingerprint, key in zip(known, fingerprints, idempotency_keys, strict=True):
        if body is not None and body.decode() != fingerprint:
            raise IdempotencyConflict(key)
        job_ids.append(None if job_id is None else job_id.decode())
    return job_ids
