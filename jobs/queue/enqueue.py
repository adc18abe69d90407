"""The one place where jobs enter the queue: `enqueue.lua`, in one step and one round trip.

RQ's own records are written in RQ's own format, so that `rq info` and rq-dashboard show the truth.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from rq import Queue, Retry
from rq.job import Job as RQJob
from rq.utils import now, utcformat

from mlx_rq.jobs.openai.errors import IdempotencyConflict, QueueFull, RequestError
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.surrogates import is_writable
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES, JobOptions, invalid_option
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER, write_payload
from mlx_rq.jobs.queue.prepare import Prepared
from mlx_rq.jobs.queue.scripts import backlog_script, load_script

IDEMPOTENCY_KEY = "a text that is not empty"

JOBS_PER_STEP = 500
"""Redis does nothing else while it takes that many in: some hundredths of a second."""

LONGEST_WAIT = 30 * 24 * 3600
"""Seconds that an idempotency key is kept for while its job waits, beside those of the result."""


def enqueue(
    connection: Redis,
    prepared: Sequence[Prepared],
    options: JobOptions,
    idempotency_keys: Sequence[str] | None = None,
    batch: str | None = None,
) -> list[str]:
    """Enqueues jobs, hundreds in one step; returns their ids, which cannot be guessed.

    With idempotency keys, one for each and all different, a job that was made before under its key
    is found again. `batch` names what they are a part of, so that all of it can be found. Raises
    QueueFull, where the operator's limits leave no room for all, before anything is enqueued, and
    IdempotencyConflict where a key was used for another body.
    """
    if idempotency_keys is not None:
        _check_keys(idempotency_keys, len(prepared))
    job_ids: list[str] = []
    bytes_coming = sum(len(item.encoded) for item in prepared)
    submission = secrets.token_hex(8) if len(prepared) > JOBS_PER_STEP else ""
    for start in range(0, len(prepared), JOBS_PER_STEP):
        part = slice(start, start + JOBS_PER_STEP)
        step = _Step(connection, options, batch)
        for index, item in enumerate(prepared[part], start):
            step.add(item, None if idempotency_keys is None else idempotency_keys[index])
        later = max(0, len(prepared) - part.stop)
        reply, *told = step.run(later, bytes_coming, submission, admitted=start > 0)
        if reply == b"conflict" and idempotency_keys is not None:
            raise IdempotencyConflict(idempotency_keys[start + told[0] - 1])
        if reply != b"enqueued":
            raise QueueFull(reply.decode(), *told)
        job_ids += (job_id.decode() for job_id in told)
        bytes_coming -= sum(len(item.encoded) for item in prepared[part])
    return job_ids


def is_idempotency_key(value: Any) -> bool:
    """Tells what an idempotency key can be: `IDEMPOTENCY_KEY`."""
    return isinstance(value, str) and value != "" and is_writable(value)


def _check_keys(idempotency_keys: Sequence[str], bodies: int) -> None:
    """Raises RequestError unless every body has a key of its own."""
    if isinstance(idempotency_keys, str):
        raise invalid_option("idempotency_keys", idempotency_keys, "one key for each body")
    for at, key in enumerate(idempotency_keys):
        if not is_idempotency_key(key):
            raise invalid_option(f"idempotency_keys[{at}]", key, IDEMPOTENCY_KEY)
    distinct = len(set(idempotency_keys))
    if not bodies == len(idempotency_keys) == distinct:
        raise RequestError(
            f"Invalid 'idempotency_keys': expected {bodies} different keys, one for each body, "
            f"but got {len(idempotency_keys)}, of which {distinct} are different.",
            code="invalid_value",
            param="idempotency_keys",
        )


class _Group(NamedTuple):
    """Jobs of one model, priority and kind."""

    number: int
    """The first of a step has 1."""
    queue: Queue
    wake_up: str
    record: Mapping[str, Any]
    """The fields of RQ's record that they have in common: all but those that `add` writes."""


class _Step:
    """The jobs of one call of `enqueue.lua`."""

    def __init__(self, connection: Redis, options: JobOptions, batch: str | None) -> None:
        self._connection = connection
        self._batch = batch
        self._options = options
        self._groups: dict[tuple[str, Priority, str], _Group] = {}
        self._metas: dict[str, bytes] = {}
        self._jobs: list[str | bytes | int] = []

    def add(self, item: Prepared, idempotency_key: str | None) -> None:
        """Takes one job in."""
        identity = item.model, item.priority or self._options.priority, item.kind
        if identity not in self._groups:
            self._groups[identity] = self._group(*identity)
        if item.affinity not in self._metas:
            self._metas[item.affinity] = self._meta(item.affinity)
        record, fingerprint = "", ""
        if idempotency_key is not None:
            record = keys.idempotency(idempotency_key, self._options.owner)
            fingerprint = _fingerprint(item.encoded)
        data = write_payload(item.kind, item.encoded)
        self._jobs += (self._groups[identity].number, secrets.token_hex(16), record, fingerprint)
        # The time differs from job to job: by it recovery puts jobs back in their order.
        meta = b'%s,"path":"%s"' % (self._metas[item.affinity], item.path.encode())
        self._jobs += (data, meta, utcformat(now()), item.path)

    def run(self, later: int, bytes_coming: int, submission: str, *, admitted: bool) -> Any:
        """Sends it; returns the reply that `enqueue.lua` describes."""
        pieces = (load_script(__package__, name) for name in ("reserve.lua", "enqueue.lua"))
        script = self._connection.register_script(backlog_script() + "".join(pieces))
        names = [Queue.redis_queues_keys]
        ours = f"{Queue.redis_queue_namespace_prefix}{keys.QUEUE}:"
        arguments: list[Any] = [keys.LIMITS, ours, keys.WAKE_UPS_KEPT, keys.WAKE_UP_SECONDS]
        arguments += [later, bytes_coming, int(admitted), RQJob.key_for("")]
        arguments += [LONGEST_WAIT + self._options.result_ttl, submission]
        for group in self._groups.values():
            names += (group.queue.key, group.wake_up)
            arguments.append(2 * len(group.record))
            arguments += (part for field in group.record.items() for part in field)
        return script(keys=names, args=arguments + self._jobs)

    def _group(self, model: str, priority: Priority, kind: str) -> _Group:
        """Has RQ write the record of one job, in the state of one that waits."""
        options = self._options
        queue = Queue(
            keys.queue_name(model, priority), connection=self._connection, serializer=SERIALIZER
        )
        job = queue.create_job(
            FUNCTION,
            # RQ's default description spells out the arguments: no prompts in dashboards.
            description=f"{kind} for {model}",
            timeout=-1 if options.timeout is None else math.ceil(options.timeout),
            result_ttl=options.result_ttl,
            failure_ttl=options.result_ttl,
            retry=Retry(max=options.max_attempts - 1 + RECOVERY_RETRIES),
        )
        record = job.to_dict(include_meta=False)
        del record["data"]
        return _Group(len(self._groups) + 1, queue, keys.wake_up(model), record)

    def _meta(self, affinity: str) -> bytes:
        """Writes what the worker has to know beside the body, as far as jobs have it in common."""
        options = self._options
        meta = {
            "max_attempts": options.max_attempts,
            "timeout": options.timeout,
            "stream": options.stream,
            "prefix": affinity,
            **({"webhook": options.webhook} if options.webhook is not None else {}),
            **({"batch": self._batch} if self._batch is not None else {}),
            **({"owner": options.owner} if options.owner is not None else {}),
        }
        written: bytes = SERIALIZER.dumps(meta)
        return written.removesuffix(b"}")


def _fingerprint(encoded: bytes) -> str:
    """Names what a body says: the order of its fields says nothing."""
    text = json.dumps(json.loads(encoded), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
