"""Puts jobs into the queue: validate, write JSON, wake a worker. The first stop of every job."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from mlx_rq.jobs.client.conversation import with_history
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.openai.validation import encode_body, kind_of, validate
from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.enqueue import Checked, enqueue
from mlx_rq.jobs.queue.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_PRIORITY,
    DEFAULT_RESULT_TTL,
    JobOptions,
)


def submit(
    body: Mapping[str, Any] | None = None,
    /,
    *,
    schema: type[BaseModel] | Mapping[str, Any] | None = None,
    priority: Priority = DEFAULT_PRIORITY,
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    stream: bool = False,
    webhook: str | None = None,
    idempotency_key: str | None = None,
    redis_url: str | None = None,
    **fields: Any,
) -> Job:
    """Puts one job into the queue and returns it at once.

    The body is given as one mapping or as keyword arguments: `messages=[…]` makes a chat job,
    `prompt="…"` a completion, `input="…"` a response; `count_tokens={"messages": […]}` counts the
    tokens of such a body's prompt, and generates nothing. `schema`, a pydantic class or a JSON
    schema, asks for an answer of that shape. With an `idempotency_key`, a second call with the same
    body returns the first job.

    Raises RequestError (nothing was enqueued) where the body or an option is wrong,
    IdempotencyConflict where the key was used for another body, QueueFull where the operator's
    limits leave no room, RedisUnavailable without Redis.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts, stream, webhook)
    whole = fields if body is None else {**body, **fields} if isinstance(body, Mapping) else body
    redis_url = resolve_url(redis_url)
    checked = _check(whole, schema, redis_url)
    connection = connect(redis_url)
    with reachable(connection):
        once = None if idempotency_key is None else [idempotency_key]
        (job_id,) = enqueue(connection, [checked], options, once)
    return Job(job_id, redis_url, schema=schema)


def submit_many(
    bodies: Iterable[Mapping[str, Any]],
    *,
    schema: type[BaseModel] | Mapping[str, Any] | None = None,
    priority: Priority = DEFAULT_PRIORITY,
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    stream: bool = False,
    webhook: str | None = None,
    idempotency_keys: Sequence[str] | None = None,
    redis_url: str | None = None,
) -> list[Job]:
    """Puts many jobs into the queue, hundreds in one step; returns them in input order.

    Every body is checked, and there is room for all, before the first is enqueued. Options apply
    to all; `idempotency_keys` has one for each body. Raises as `submit` does; the message of a
    RequestError about a body names it, as in `bodies[3]: …`.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts, stream, webhook)
    redis_url = resolve_url(redis_url)
    checked: list[Checked] = []
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
    with reachable(connection):
        job_ids = enqueue(connection, checked, options, idempotency_keys)
        return [Job(job_id, redis_url, schema=schema) for job_id in job_ids]


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
) -> Checked:
    if not isinstance(body, Mapping):
        raise RequestError(
            f"Invalid body: expected an object, but got a {type(body).__name__} instead.",
            code="invalid_type",
        )
    kind = kind_of(body)
    if schema is not None:
        body = KINDS[kind].with_schema(body, response_format(schema))
    request = validate(kind, body)
    if request.continues is not None:
        body = KINDS[kind].amended(body, partial(with_history, redis_url=redis_url))
    size = len(encode_body(body))
    return Checked(kind, request.model or ANY_MODEL, body, size, request.priority)


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
