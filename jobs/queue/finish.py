"""The one place where a job ends, whether answered, failed or cancelled: `finish.lua`, atomically.

RQ's own records (status, registries, result stream, counters) are written in the same step as our
result key, in RQ's own format, so that `rq info` and rq-dashboard show the truth.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.job import Job as RQJob
from rq.registry import BaseRegistry
from rq.results import Result
from rq.utils import now, utcformat
from rq.worker import BaseWorker

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.scripts import by_name, tolerant_script

FinishState = Literal["finished", "failed", "canceled"]


class Lease(NamedTuple):
    """A worker's claim on one attempt of a job."""

    execution_id: str
    worker_name: str
    started_at: datetime
    data_set: str = ""
    """What Redis held then, and which server's history that was (`claim_job.lua`)."""


@dataclass(frozen=True)
class FinishArguments:
    """What `finish.lua` is told, under the names that it uses."""

    job_id: str
    execution_id: str | None
    """The lease's; None: the job is cancelled, whoever has it."""
    left_in_list: bool
    """Whether the caller takes the job out of its queue's list."""
    status: FinishState
    result_ttl: int
    ended_at: str
    completions_kept: int
    webhooks_kept: int
    trace: str | None
    """What a worker measured on the way (`trace.py`)."""
    rq_worker_prefix: str
    """Before the name of a worker: the key of RQ's record of it."""
    execution_prefix: str
    worker_prefix: str
    worker_suffix: str


class FinishCall(NamedTuple):
    """What `finish.lua` is called with."""

    keys: list[str]
    arguments: list[Any]


def finish_job(pipe: Pipeline | Redis, connection: Redis, **ending: Any) -> Any:
    """Ends a job as `finish_call` describes it; returns the script's reply (`finish.lua`).

    Sent through `pipe`, which may be a pipeline that ends many.
    """
    call = finish_call(connection, **ending)
    script = connection.register_script(tolerant_script(__package__, "ended.lua", "finish.lua"))
    return script(keys=call.keys, args=call.arguments, client=pipe)


def finish_call(
    connection: Redis,
    *,
    job_id: str,
    queue_name: str,
    ending: FinishState,
    outcome: Mapping[str, Any],
    result_ttl: int,
    lease: Lease | None = None,
    left_in_list: bool = False,
    trace: str | None = None,
) -> FinishCall:
    """Says how a job ends: `outcome`, the response object or `{"error": …}`, becomes its result.

    With a lease, it ends only while that is held. `result_ttl` in seconds. With `left_in_list`, the
    caller takes a job that waits out of its queue's list.
    """
    names = key_names(queue_name)
    holder = "" if lease is None else lease.worker_name
    script_keys = [
        RQJob.key_for(job_id),
        keys.result(job_id),
        Result.get_key(job_id),
        names["started"],
        names[ending],
        names["queue"],
        ExecutionRegistry(job_id, connection).key,
        keys.COMPLETIONS,
        f"{BaseWorker.redis_worker_namespace_prefix}{holder}",
        keys.WEBHOOKS,
    ]
    ended_at = now()
    arguments = FinishArguments(
        job_id=job_id,
        execution_id=lease and lease.execution_id,
        left_in_list=left_in_list,
        status=ending,
        result_ttl=result_ttl,
        ended_at=utcformat(ended_at),
        completions_kept=keys.COMPLETIONS_KEPT,
        webhooks_kept=keys.WEBHOOKS_KEPT,
        trace=trace,
        rq_worker_prefix=BaseWorker.redis_worker_namespace_prefix,
        **execution_key_parts()._asdict(),
    )
    # Models may write half of a surrogate pair, which UTF-8 cannot say.
    answer = json.dumps(outcome, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    rq_result = _rq_result(job_id, connection, ending, outcome, lease, ended_at)
    fields = chain.from_iterable(rq_result.items())
    return FinishCall(script_keys, [by_name(arguments), answer, *fields])


def forget_job(connection: Redis, job_id: str) -> None:
    """Deletes all that Redis has of a job that has ended; calls nothing that its record names."""
    names = [keys.result(job_id), RQJob.key_for(job_id), Result.get_key(job_id)]
    origin = reading.text(reading.ask(connection.hget, RQJob.key_for(job_id), "origin"))
    with connection.pipeline() as pipe:
        pipe.delete(*names, ExecutionRegistry(job_id, connection).key)
        for ending in ("finished", "failed", "canceled"):
            pipe.zrem(key_names(origin)[ending], job_id)
        reading.ask_all(pipe)


class KeyParts(NamedTuple):
    """The prefix of RQ's execution keys, and both ends of a worker's set of them."""

    execution_prefix: str
    worker_prefix: str
    worker_suffix: str


@cache
def execution_key_parts() -> KeyParts:
    """Asks RQ what it calls executions."""
    probe = Execution(id="", job_id="", connection=None)  # type: ignore[arg-type]
    before, _, after = WORKER_EXECUTIONS_KEY_TEMPLATE.partition("{0}")
    return KeyParts(probe.key.removesuffix(":"), before.format(), after.format())


@cache
def key_names(queue_name: str) -> Mapping[str, str]:
    """Asks RQ what it calls a queue's list and registries."""
    unconnected = Redis()  # a client connects when it is first used; here only names are asked for
    queue = Queue(queue_name, connection=unconnected, serializer=SERIALIZER)
    registries: Mapping[str, BaseRegistry] = {
        "started": queue.started_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
        "canceled": queue.canceled_job_registry,
    }
    return {"queue": queue.key, **{name: registry.key for name, registry in registries.items()}}


def _rq_result(
    job_id: str,
    connection: Redis,
    ending: FinishState,
    outcome: Mapping[str, Any],
    lease: Lease | None,
    ended_at: datetime,
) -> dict[str, Any]:
    """Writes the entry of RQ's result stream: it names our result key instead of repeating it."""
    error = outcome.get("error")
    reason = f"{error['code']}: {error['message']}" if error else None
    types = {
        "finished": Result.Type.SUCCESSFUL,
        "failed": Result.Type.FAILED,
        "canceled": Result.Type.STOPPED,
    }
    return Result(
        job_id=job_id,
        type=types[ending],
        connection=connection,
        return_value=None if error else {"result_key": keys.result(job_id)},
        exc_string=reason and reason.encode(errors="replace").decode(),
        worker_name=lease.worker_name if lease else "",
        serializer=SERIALIZER,
        execution_id=lease.execution_id if lease else None,
        execution_started_at=lease.started_at if lease else None,
        execution_ended_at=ended_at if lease else None,
    ).serialize()
