"""Gives jobs back to their queues: of a worker that stops, that died, or whose leases ran out.

RQ's own clean-up of expired leases is not used: it puts a job back in several steps, between which
the job's late answer can be committed and then be overwritten; and it counts every job that a dead
worker had claimed as tried, though most of them had only waited. (`rq info` runs it all the same;
what it does to a job is what happens here, with those two faults.)
"""

import logging
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from redis import Redis
from rq import Queue
from rq.executions import ExecutionRegistry
from rq.job import Job as RQJob
from rq.utils import current_timestamp
from rq.worker import BaseWorker
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.finish import execution_key_parts, key_names
from mlx_rq.jobs.queue.scripts import backlog_script, by_name, load_script
from mlx_rq.jobs.queue.workers import live_workers

logger = logging.getLogger("mlx_rq.worker")

Count = Literal["no", "in_flight"]

_AT_ONCE = 1000
"""Expired leases that are looked at in one go."""


def script_of(*names: str) -> str:
    """Reads one of the worker's scripts, in pieces, with what stands before each of them."""
    return backlog_script() + "".join(load_script(__package__, name) for name in names)


class Held(NamedTuple):
    """A lease on a job, and the queue that the job came from."""

    job_id: str
    execution_id: str
    queue_name: str


@dataclass(frozen=True)
class GiveBackArguments:
    """What `give_back.lua` is told, under the names that it uses."""

    job_id: str
    execution_id: str
    count: Count
    to_others: bool
    expired_before: float | None
    owner_prefix: str
    in_flight_prefix: str
    wake_ups_kept: int
    wake_up_seconds: int
    execution_prefix: str
    worker_prefix: str
    worker_suffix: str


def machine() -> str:
    """Names this machine (or container), so that a process id can be looked up on the right one."""
    return f"{socket.gethostname()}/{uuid.getnode():x}"


def give_back(
    connection: Redis,
    held: Iterable[Held],
    *,
    count: Count,
    to_others: bool = False,
    expired_before: float | None = None,
) -> int:
    """Gives jobs back to the front of their queues, in this order; returns how many it were.

    The arguments are explained in `give_back.lua`. A lease that is held no longer is passed by.
    """
    script = connection.register_script(script_of("give_back.lua"))
    with connection.pipeline(transaction=False) as pipe:
        # Last first: each goes to the front, so that the order stays as it was.
        for job_id, execution_id, queue_name in reversed(list(held)):
            names = key_names(queue_name)
            model, _ = keys.model_and_priority(queue_name)
            arguments = GiveBackArguments(
                job_id=job_id,
                execution_id=execution_id,
                count=count,
                to_others=to_others,
                expired_before=expired_before,
                owner_prefix=keys.OWNER,
                in_flight_prefix=keys.IN_FLIGHT,
                wake_ups_kept=keys.WAKE_UPS_KEPT,
                wake_up_seconds=keys.WAKE_UP_SECONDS,
                **execution_key_parts()._asdict(),
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
        return sum(pipe.execute())


def recover_expired(connection: Redis, queues: Iterable[Queue]) -> int:
    """Gives back the jobs whose leases ran out; returns how many.

    RQ's lists of ended jobs are shortened on the way, by those whose results have expired.
    """
    now = current_timestamp()
    held: list[Held] = []
    for queue in queues:
        names = key_names(queue.name)
        expired = reading.ask(
            connection.zrange, names["started"], "-inf", now, byscore=True, offset=0, num=_AT_ONCE
        )
        held += [_held(composite, queue.name) for composite in reading.texts(expired)]
        for registry in ("finished", "failed", "canceled"):
            reading.ask(connection.zremrangebyscore, names[registry], "-inf", now)
    returned = give_back(connection, held, count="in_flight", expired_before=now) if held else 0
    if returned:
        logger.warning("the leases of %d jobs ran out: they are queued again", returned)
    return returned


def _held(composite: str, queue_name: str) -> Held:
    job_id, _, execution_id = composite.rpartition(":")
    return Held(job_id, execution_id, queue_name)


def reap(connection: Redis, worker_name: str) -> int:
    """Gives back what a dead worker held and takes it out of RQ's lists; returns how many jobs.

    Only for one that is known to be dead: a living one would lose its leases.
    """
    parts = execution_key_parts()
    executions = f"{parts.worker_prefix}{worker_name}{parts.worker_suffix}"
    members = reading.texts(reading.ask(connection.smembers, executions))
    leases = [_held(composite, "") for composite in members]
    with connection.pipeline(transaction=False) as pipe:
        for lease in leases:
            pipe.hmget(RQJob.key_for(lease.job_id), "origin", "enqueued_at")
        records = reading.ask_all(pipe)
    held = [
        (reading.text(fields[1]), lease._replace(queue_name=reading.text(fields[0])))
        for lease, fields in zip(leases, records, strict=True)
        if fields is not reading.WRONG_TYPE and keys.is_ours(reading.text(fields[0]))
    ]
    in_order = [lease for _, lease in sorted(held)]
    returned = give_back(connection, in_order, count="in_flight") if in_order else 0
    record = f"{BaseWorker.redis_worker_namespace_prefix}{worker_name}"
    queues = reading.text(reading.ask(connection.hget, record, "queues"))
    for listed_in in (
        BaseWorker.redis_workers_keys,
        *(WORKERS_BY_QUEUE_KEY % queue for queue in queues.split(",")),
    ):
        reading.ask(connection.srem, listed_in, record)
    ours = (keys.worker(worker_name), keys.in_flight(worker_name), keys.worker_name(worker_name))
    connection.delete(record, executions, *ours)
    return returned


def reap_dead_of_this_machine(connection: Redis) -> None:
    """Reaps the workers that once ran here and whose processes are gone, whoever killed them."""
    for worker in live_workers(connection):
        if worker.get("machine") == machine() and not _runs(worker.get("pid")):
            returned = reap(connection, worker["name"])
            logger.warning(
                "worker %s died here: %d of its jobs are queued again", worker["name"], returned
            )


def _runs(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return True  # nothing is known: leave it alone
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Tells a process that has ended, but whose parent has not asked how (Linux only says so)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "Z"
