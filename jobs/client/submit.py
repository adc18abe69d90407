"""Puts jobs into the queue: prepare, enqueue, wake a worker. The first stop of every job."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from mlx_rq.jobs.client.conversation import with_history
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.schema_types import Schema, response_format
from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.enqueue import IDEMPOTENCY_KEY, enqueue, is_idempotency_key
from mlx_rq.jobs.queue.eviction import warn_once_of_eviction
from mlx_rq.jobs.queue.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_PRIORITY,
    DEFAULT_RESULT_TTL,
    JobOptionFields,
    JobOptions,
    invalid_option,
)
from mlx_rq.jobs.queue.prepare import Prepared, prepare


def submit(
    body: Mapping[str, Any] | None = None,
    /,
    *,
    schema: Schema | None = None,
    strict: bool = True,
    priority: Priority = DEFAULT_PRIORITY,
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    stream: bool = False,
    webhook: str | None = None,
    owner: str | None = None,
    idempotency_key: str | None = None,
    redis_url: str | None = None,
    **fields: Any,
) -> Job:
    """Puts one job into the queue and returns it at once.

    The body, in OpenAI's fields, is given as one mapping or as keyword arguments:

    body: the request as a mapping. `messages` make it a chat job, `prompt` a completion, `input` a
        response; `count_tokens`, with such a body in it, counts the tokens of its prompt and
        generates nothing. `model` says which model answers, by default any worker's. At most 4 MiB
        of JSON (MLX_RQ_MAX_BODY of the environment, as 16MB).
    fields: fields of the body, over those of `body`.
    schema: what the answer follows: a JSON schema, or any type of which pydantic makes one, as a
        model, a dataclass, a TypedDict, `list[X]`; goes into the body as its `response_format`. By
        default the answer is free text, or what the body asks for.
    strict: whether all of the schema is enforced, or refused; False: what cannot be is validated at
        the end, and objects may have more properties than are named.

    Options of the job (`JobOptions`; their limits stand there):

    priority: "high", "default" or "low": which jobs are taken first; "default".
    result_ttl: whole seconds that the result is kept after the end of the job; 7 days.
    timeout: seconds that an attempt may take, from when it is generated; None, no limit.
    max_attempts: how often the job is begun whose worker dies with it, 1 to 100; 3.
    stream: whether the worker publishes the text while it generates it; False.
    webhook: a URL that a server of the queue calls once the job has ended; None.
    owner: the client of an HTTP server with keys that sees the job there; None, only an operator.

    And where it goes:

    idempotency_key: a name for this submission, any text that is not empty. Another one with the
        same key and body returns the first job, as long as that is kept. None: every call makes
        a job.
    redis_url: where the queue is: redis://, rediss://, unix:// or redis+sentinel://. By default
        MLX_RQ_REDIS_URL of the environment, then a running `mlx-rq up` of this user, then
        redis://localhost:6379/0.

    Raises, and then nothing was enqueued:
    RequestError where the body, an option or the URL is wrong; it has OpenAI's `code` and `param`.
    IdempotencyConflict (a RequestError) where the key was used for another body.
    QueueFull (a RequestError) where the operator's limits leave no room.
    RedisUnavailable where Redis cannot be reached or refuses; after a lost connection the job may
    be enqueued all the same, so submit again under the same `idempotency_key`.
    """
    options = JobOptions(priority, result_ttl, timeout, max_attempts, stream, webhook, owner)
    if not (idempotency_key is None or is_idempotency_key(idempotency_key)):
        raise invalid_option("idempotency_key", idempotency_key, IDEMPOTENCY_KEY)
    whole = fields if body is None else {**body, **fields} if isinstance(body, Mapping) else body
    redis_url = resolve_url(redis_url)
    answer_format = None if schema is None else response_format(schema, strict=strict)
    prepared = with_history(prepare(whole, answer_format), redis_url, owner)
    idempotency_keys = None if idempotency_key is None else [idempotency_key]
    (job,) = send([prepared], options, idempotency_keys, redis_url=redis_url, schema=schema)
    return job


def submit_many(
    bodies: Iterable[Mapping[str, Any]],
    *,
    schema: Schema | None = None,
    strict: bool = True,
    idempotency_keys: Sequence[str] | None = None,
    redis_url: str | None = None,
    **options: Unpack[JobOptionFields],
) -> list[Job]:
    """Puts many jobs into the queue, hundreds in one step; returns them in input order.

    Every body is checked, and there is room for all, before the first is enqueued.

    bodies: requests, each as `submit` takes it; of any kinds and models.
    schema, strict: as of `submit`, for all of them.
    options: `priority`, `result_ttl`, `timeout`, `max_attempts`, `stream`, `webhook`,
        `owner`, as of `submit`, for all of them.
    idempotency_keys: one for each body, all different; None: every call makes new jobs.
    redis_url: as of `submit`.

    Raises as `submit` does; the message of a RequestError about a body names it, as in
    `bodies[3]: …`. IdempotencyConflict and RedisUnavailable may come when a step of 500 jobs was
    enqueued before; with the same `idempotency_keys` a second call makes none of those again.
    """
    job_options = JobOptions(**options)
    redis_url = resolve_url(redis_url)
    answer_format = None if schema is None else response_format(schema, strict=strict)
    prepared: list[Prepared] = []
    for index, body in enumerate(bodies):
        try:
            item = prepare(body, answer_format)
            prepared.append(with_history(item, redis_url, job_options.owner))
        except RequestError as error:
            raise RequestError(
                f"bodies[{index}]: {error}", code=error.code, param=error.param
            ) from None
    return send(prepared, job_options, idempotency_keys, redis_url=redis_url, schema=schema)


def send(
    prepared: Sequence[Prepared],
    options: JobOptions,
    idempotency_keys: Sequence[str] | None = None,
    *,
    redis_url: str,
    schema: Schema | None = None,
) -> list[Job]:
    """Enqueues what was prepared; returns the jobs, which read answers by the `schema`.

    Raises as `enqueue` does, and RedisUnavailable.
    """
    connection = connect(redis_url)
    with reachable(connection):
        warn_once_of_eviction(redis_url)
        job_ids = enqueue(connection, prepared, options, idempotency_keys)
    return [Job(job_id, redis_url, schema=schema) for job_id in job_ids]
