"""The one place where jobs enter the queue: `enqueue.lua`, in one step and one round trip.

RQ's own records are written in RQ's own format, so that `rq info` and rq-dashboard show the truth.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from rq import Queue, Retry
from rq.job import Job as RQJob
from rq.utils import now

from mlx_rq.jobs.openai.errors import IdempotencyConflict, QueueFull
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.validation import encode_body
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.affinity import affinity_of
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES, JobOptions
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER
from mlx_rq.jobs.queue.scripts import load_script

JOBS_PER_STEP = 500
"""Redis does nothing else while it takes that many in: some hundredths of a second."""

LONGEST_WAIT = 30 * 24 * 3600
"""Seconds that an idempotency key is kept for while its job waits, beside those of the result."""


class Checked(NamedTuple):
    """A body that was checked."""

    kind: str
    model: str
    body: Mapping[str, Any]
    size: int
    """Bytes of the body as JSON."""
    priority: Priority | None
    """What the body itself says of it; that goes before the option."""


def enqueue(
    connection: Redis,
    checked: Sequence[Checked],
    options: JobOptions,
    idempotency_keys: Sequence[str] | None = None,
) -> Iterator[str]:
    """Enqueues jobs, hundreds in one step; yields their ids, which cannot be guessed.

    With idempotency keys, one for each and all different, a job that was made before under its key
    is found again. Raises QueueFull, where the operator's limits leave no room for all, before
    anything is enqueued, and IdempotencyConflict where a key was used for another body.
    """
    bytes_coming = sum(item.size for item in checked)
    for start in range(0, len(checked), JOBS_PER_STEP):
        part = slice(start, start + JOBS_PER_STEP)
        step = _Step(connection, options)
        for index, item in enumerate(checked[part], start):
            step.add(item, None if idempotency_keys is None else idempotency_keys[index])
        later = max(0, len(checked) - part.stop)
        reply, *told = step.run(later, bytes_coming, admitted=start > 0)
        if reply == b"conflict" and idempotency_keys is not None:
            raise IdempotencyConflict(idempotency_keys[start + told[0] - 1])
        if reply != b"enqueued":
            raise QueueFull(reply.decode(), *told)
        yield from (job_id.decode() for job_id in told)


class _Step:
    """The jobs of one call of `enqueue.lua`."""

    def __init__(self, connection: Redis, options: JobOptions) -> None:
        self._connection = connection
        self._options = options
        self._queues: dict[tuple[str, Priority], tuple[int, Queue]] = {}
        self._arguments: list[Any] = []

    def add(self, item: Checked, idempotency_key: str | None) -> None:
        """Takes one job in."""
        name = item.model, item.priority or self._options.priority
        if name not in self._queues:
            queue = Queue(
                keys.queue_name(*name), connection=self._connection, serializer=SERIALIZER
            )
            self._queues[name] = len(self._queues) + 1, queue
        number, queue = self._queues[name]
        record, fingerprint = "", ""
        if idempotency_key is not None:
            record, fingerprint = keys.idempotency(idempotency_key), _fingerprint(item.body)
        job = _rq_job(queue, item, self._options)
        fields = [part for pair in job.to_dict().items() for part in pair]
        kept = LONGEST_WAIT + self._options.result_ttl
        self._arguments += (number, job.id, job.key, record, fingerprint, kept)
        self._arguments += (len(fields), *fields)

    def run(self, later: int, bytes_coming: int, *, admitted: bool) -> Any:
        """Sends it; returns the reply that `enqueue.lua` describes."""
        script = self._connection.register_script(load_script(__package__, "enqueue.lua"))
        names = [Queue.redis_queues_keys]
        for (model, _), (_, queue) in self._queues.items():
            names += (queue.key, keys.wake_up(model))
        ours = f"{Queue.redis_queue_namespace_prefix}{keys.QUEUE}:"
        fixed: list[Any] = [keys.LIMITS, ours, keys.WAKE_UPS_KEPT, keys.WAKE_UP_SECONDS]
        fixed += [later, bytes_coming, int(admitted), RQJob.key_for("")]
        return script(keys=names, args=[*fixed, *self._arguments])


def _rq_job(queue: Queue, item: Checked, options: JobOptions) -> RQJob:
    """Makes RQ's object of a job, in the state of one that waits."""
    job = queue.create_job(
        FUNCTION,
        kwargs={"kind": item.kind, "body": dict(item.body)},
        job_id=secrets.token_hex(16),
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
            "submitted_at": time.time(),
            "prefix": affinity_of(item.body),
            **({"webhook": options.webhook} if options.webhook is not None else {}),
        },
    )
    job.enqueued_at = now()
    return job


def _fingerprint(body: Mapping[str, Any]) -> str:
    """Names what a body says: the order of its fields says nothing."""
    text = json.dumps(json.loads(encode_body(body)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
