"""Gives jobs back to their queues: of a worker that stops, that died, or whose leases ran out.

RQ's own clean-up of expired leases finds none (`lease.lua`): it puts a job back in several steps,
between which the job's late answer can be committed and then be overwritten; it goes by the clock
of whoever runs it; and it counts every job that a dead worker had claimed as tried, though most of
them had only waited.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from redis import Redis
from rq import Queue
from rq.executions import ExecutionRegistry
from rq.job import Job as RQJob
from rq.worker import BaseWorker
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from mlx_rq.jobs.openai.validation import short
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.finish import execution_key_parts, key_names
from mlx_rq.jobs.queue.scripts import by_name
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.leases.machine import has_died
from mlx_rq.worker.leases.scripts import key_prefixes, script_of

logger = logging.getLogger("mlx_rq.worker")

Count = Literal["no", "in_flight"]

EPOCH = 10_000_000_000
"""The ends of leases are counted from here, by the clock of Redis (`lease.lua`)."""


class Held(NamedTuple):
    """A lease on a job, and the queue that the job came from."""

    job_id: str
    execution_id: str
    queue_name: str


class Ending(NamedTuple):
    """A lease as it was seen: another, once it is renewed."""

    held: Held
    end: float
    """By the clock of Redis, counted from EPOCH."""


@dataclass(frozen=True)
class GiveBackArguments:
    """What `give_back.lua` is told, under the names that it uses."""

    job_id: str
    execution_id: str
    worker: str
    """Who has it, where nothing in Redis says so; "": nobody knows."""
    count: Count
    to_others: bool
    ends: float | None
    prefixes: Mapping[str, str]
    wake_ups_kept: int
    wake_up_seconds: int
    worker_prefix: str
    worker_suffix: str


def give_back(
    connection: Redis,
    held: Sequence[Held],
    *,
    count: Count,
    worker: str = "",
    to_others: bool = False,
    ends: Sequence[float | None] | None = None,
) -> int:
    """Gives jobs back to the front of their queues, in this order; returns how many it were.

    The arguments are explained in `give_back.lua`; `ends` are one for each. A lease that is held no
    longer is passed by. Jobs that are gone from Redis are named in the log.
    """
    parts = execution_key_parts()
    script = connection.register_script(script_of("give_back.lua"))
    with connection.pipeline(transaction=False) as pipe:
        # Last first: each goes to the front, so that the order stays as it was.
        in_order = list(zip(held, ends or [None] * len(held), strict=True))
        for (job_id, execution_id, queue_name), end in reversed(in_order):
            names = key_names(queue_name)
            model, _ = keys.model_and_priority(queue_name)
            arguments = GiveBackArguments(
                job_id=job_id,
                execution_id=execution_id,
                worker=worker,
                count=count,
                to_others=to_others,
                ends=end,
                prefixes=key_prefixes(),
                wake_ups_kept=keys.WAKE_UPS_KEPT,
                wake_up_seconds=keys.WAKE_UP_SECONDS,
                worker_prefix=parts.worker_prefix,
                worker_suffix=parts.worker_suffix,
            )
            script(
                keys=[
                    RQJob.key_for(job_id),
                    names["queue"],
                    names["started"],
                    ExecutionRegistry(job_id, connection).key,
                    keys.wake_up(model),
                ],
                args=[by_name(arguments)],
                client=pipe,
            )
        replies = pipe.execute()[::-1]
    _say_gone([short(job.job_id) for job, reply in zip(held, replies, strict=True) if reply < 0])
    return sum(reply > 0 for reply in replies)


def _say_gone(job_ids: Sequence[str]) -> None:
    if not job_ids:
        return
    jobs = counted(
        len(job_ids),
        "job was gone from Redis when it had to be queued again",
        "jobs were gone from Redis when they had to be queued again",
    )
    logger.error("%s: %s", jobs, ", ".join(job_ids))


class ExpiredLeases:
    """Gives back jobs whose leases ran out and were not renewed within another `patience` seconds.

    How long a lease lasts is read off the clock of Redis when it is first seen; then a clock that
    nobody sets counts. So the clock of Redis may be set, and Redis or a machine may be away for
    longer than a lease: by the time that anything is taken, every living worker has renewed.
    """

    def __init__(
        self,
        connection: Redis,
        queues: Iterable[Queue],
        *,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._queues = list(queues)
        self._patience = patience
        self._clock = clock
        self._due: dict[Ending, float] = {}

    def give_back(self) -> int:
        """Looks once more; returns how many jobs went back."""
        now = self._clock()
        seen = find_leases(self._connection, self._queues)
        self._due = {
            lease: self._due.get(lease, now + max(0.0, lasts) + self._patience)
            for lease, lasts in seen.items()
        }
        due = [lease for lease, at in self._due.items() if at <= now]
        return _give_back_expired(self._connection, due)


def give_back_unlisted(connection: Redis, worker_name: str) -> int:
    """Gives back what a worker that is gone held, where its leases were lost with their registry.

    Those that are listed end by themselves. Returns how many jobs went back.
    """
    held = []
    for job_id, execution_id, queue_name in _held_by(connection, worker_name):
        leases = key_names(queue_name)["started"]
        end = reading.ask(connection.zscore, leases, f"{job_id}:{execution_id}")
        if end is None or end is reading.WRONG_TYPE:
            held.append(Held(job_id, execution_id, queue_name))
    return give_back(connection, held, count="in_flight", worker=worker_name) if held else 0


def recover_expired(connection: Redis, queues: Iterable[Queue]) -> int:
    """Gives back the jobs whose leases ran out, at once; returns how many."""
    seen = find_leases(connection, queues)
    return _give_back_expired(connection, [lease for lease, lasts in seen.items() if lasts <= 0])


def _give_back_expired(connection: Redis, due: list[Ending]) -> int:
    held, ends = [lease.held for lease in due], [lease.end for lease in due]
    returned = give_back(connection, held, count="in_flight", ends=ends) if held else 0
    if returned:
        ran_out = counted(
            returned,
            "job ran out: it is queued again",
            "jobs ran out: they are queued again",
        )
        logger.warning("the leases of %s", ran_out)
    return returned


def find_leases(connection: Redis, queues: Iterable[Queue]) -> dict[Ending, float]:
    """Finds the leases on jobs of some queues, and for how many seconds each still lasts.

    RQ's lists of ended jobs are shortened on the way, by those whose results have expired.
    """
    now = redis_time(connection)
    found: dict[Ending, float] = {}
    for queue in queues:
        names = key_names(queue.name)
        leases: Any = reading.ask(connection.zrange, names["started"], 0, -1, withscores=True)
        for composite, end in () if leases is reading.WRONG_TYPE else leases:
            held = _held(reading.text(composite), queue.name)
            found[Ending(held, end)] = end - EPOCH - now
        for registry in ("finished", "failed", "canceled"):
            reading.ask(connection.zremrangebyscore, names[registry], "-inf", now)
    return found


def _held(composite: str, queue_name: str) -> Held:
    job_id, _, execution_id = composite.rpartition(":")
    return Held(job_id, execution_id, queue_name)


def reap(connection: Redis, worker_name: str) -> int:
    """Gives back what a dead worker held and takes it out of RQ's lists; returns how many jobs.

    Only for one that is known to be dead: a living one would lose its leases.
    """
    in_order = _held_by(connection, worker_name)
    returned = (
        give_back(connection, in_order, count="in_flight", worker=worker_name) if in_order else 0
    )
    record = f"{BaseWorker.redis_worker_namespace_prefix}{worker_name}"
    for listed_in in (
        BaseWorker.redis_workers_keys,
        *(WORKERS_BY_QUEUE_KEY % queue for queue in _queues_of(connection, worker_name)),
    ):
        reading.ask(connection.srem, listed_in, record)
    # What it had in flight is still asked for where a lease is left that this did not find.
    ours = (keys.worker(worker_name), keys.worker_name(worker_name))
    connection.delete(record, executions_of(worker_name), *ours)
    return returned


def executions_of(worker_name: str) -> str:
    """Names RQ's set of a worker's executions."""
    parts = execution_key_parts()
    return f"{parts.worker_prefix}{worker_name}{parts.worker_suffix}"


def _held_by(connection: Redis, worker_name: str) -> list[Held]:
    """Tells what RQ's set of a worker's executions says that it holds, in the jobs' order."""
    members = reading.texts(reading.ask(connection.smembers, executions_of(worker_name)))
    leases = [_held(composite, "") for composite in members]
    with connection.pipeline(transaction=False) as pipe:
        for lease in leases:
            pipe.hmget(RQJob.key_for(lease.job_id), "origin", "enqueued_at")
        records = reading.ask_all(pipe)
    held, queues = [], _queues_of(connection, worker_name)
    for lease, fields in zip(leases, records, strict=True):
        origin, since = ("", "") if fields is reading.WRONG_TYPE else map(reading.text, fields)
        # One that is gone does not say where it came from.
        queue = origin or _queue_of_lease(connection, lease, queues)
        if keys.is_ours(queue):
            held.append((since, lease._replace(queue_name=queue)))
    return [lease for _, lease in sorted(held)]


def _queues_of(connection: Redis, worker_name: str) -> list[str]:
    record = f"{BaseWorker.redis_worker_namespace_prefix}{worker_name}"
    queues = reading.text(reading.ask(connection.hget, record, "queues"))
    return [queue for queue in queues.split(",") if keys.is_ours(queue)]


def _queue_of_lease(connection: Redis, lease: Held, queues: Sequence[str]) -> str:
    """Finds among a worker's queues the one that lists a lease; else gives any, or none at all."""
    composite = f"{lease.job_id}:{lease.execution_id}"
    for queue in queues:
        end = reading.ask(connection.zscore, key_names(queue)["started"], composite)
        if isinstance(end, float):
            return queue
    return queues[0] if queues else ""


def reap_dead_of_this_machine(connection: Redis, machine: str) -> None:
    """Reaps the workers that once ran here and whose processes are gone, whoever killed them."""
    for worker in live_workers(connection):
        if has_died(worker, machine):
            returned = reap(connection, worker["name"])
            again = counted(returned, "of its jobs is", "of its jobs are")
            logger.warning("worker %s died here: %s queued again", worker["name"], again)
