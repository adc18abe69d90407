"""Cancels jobs, hundreds in one step, however long the queues are that they wait in.

A queue's list is searched for single jobs; where many are cancelled in a long one, they are left in
it at first and then taken out in one walk (`sweep.lua`). No script does more than some hundredths
of a second of work.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redis import Redis
from rq.command import send_command
from rq.job import Job as RQJob

from mlx_rq.jobs.openai.errors import error_object
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.finish import finish_call, key_names
from mlx_rq.jobs.queue.options import DEFAULT_RESULT_TTL, MAX_SECONDS
from mlx_rq.jobs.queue.scripts import backlog_script, by_name, load_script

_JOBS_PER_STEP = 250
_SWEPT_PER_STEP = 2000
_READ_AT_ONCE = 5000

_ID = re.compile(r"[\w-]+", re.ASCII)
"""What RQ takes as the id of a job."""

_PLACE = "<job id>"
"""Stands for the id in what is told of every job."""


@dataclass(frozen=True)
class CancelArguments:
    """What `cancel.lua` is told, under the names that it uses."""

    jobs: int
    together: int
    """How many are cancelled in this and the next steps."""
    only_waiting: bool
    place: str
    job_prefix: str
    finish_keys: list[str]


class Cancelled(NamedTuple):
    """What became of the jobs that were to be cancelled, by their ids.

    `ended` were ended by this call, `unknown` are no jobs of ours (any more). All others had ended
    before, or were passed by.
    """

    ended: set[str]
    unknown: set[str]


def cancel_jobs(
    connection: Redis, job_ids: Iterable[str], *, only_waiting: bool = False
) -> Cancelled:
    """Cancels jobs; with `only_waiting` those that no worker has begun. Workers are told."""
    asked = dict.fromkeys(job_ids)
    distinct = [job_id for job_id in asked if _ID.fullmatch(job_id)]
    cancelled = Cancelled(ended=set(), unknown=set(asked).difference(distinct))
    to_sweep: dict[str, None] = {}
    for start in range(0, len(distinct), _READ_AT_ONCE):
        groups = _by_queue(connection, distinct[start : start + _READ_AT_ONCE])
        for (queue_name, result_ttl), alike in groups.items():
            if not keys.is_ours(queue_name):  # there is no such job, or it is another program's
                cancelled.unknown.update(alike)
            elif _cancel(connection, queue_name, result_ttl, alike, only_waiting, cancelled):
                to_sweep[key_names(queue_name)["queue"]] = None
    for list_name in to_sweep:
        _sweep(connection, list_name)
    return cancelled


def _by_queue(connection: Redis, job_ids: Sequence[str]) -> Mapping[tuple[str, int], list[str]]:
    """Groups jobs by what their ends have in common: the queue, and how long results are kept."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(RQJob.key_for(job_id), "origin", "result_ttl")
        records = reading.ask_all(pipe)
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for job_id, record in zip(job_ids, records, strict=True):
        origin, ttl = record if isinstance(record, list) else (None, None)
        kept = int(reading.number(ttl, 1, MAX_SECONDS) or DEFAULT_RESULT_TTL)
        groups[reading.text(origin), kept].append(job_id)
    return groups


def _cancel(
    connection: Redis,
    queue_name: str,
    result_ttl: int,
    job_ids: Sequence[str],
    only_waiting: bool,
    cancelled: Cancelled,
) -> bool:
    """Cancels jobs of one queue; says whether its list has to be swept."""
    error = error_object("The job was cancelled.", code="cancelled", type="cancelled")
    call = finish_call(
        connection,
        job_id=_PLACE,
        queue_name=queue_name,
        ending="canceled",
        outcome={"error": error},
        result_ttl=result_ttl,
        left_in_list=True,
    )
    ended, finish = (load_script(__package__, name) for name in ("ended.lua", "finish.lua"))
    script = connection.register_script(
        f"{backlog_script()}{ended}local function finish(KEYS, ARGV)\n{finish}\nend\n"
        + load_script(__package__, "cancel.lua")
    )
    needs_sweep = False
    for start in range(0, len(job_ids), _JOBS_PER_STEP):
        step = job_ids[start : start + _JOBS_PER_STEP]
        arguments = CancelArguments(
            len(step), len(job_ids), only_waiting, _PLACE, RQJob.key_for(""), call.keys
        )
        left, *replies = script(
            keys=[key_names(queue_name)["queue"]],
            args=[by_name(arguments), *step, *call.arguments],
        )
        needs_sweep = needs_sweep or bool(left)
        for job_id, (reply, *holders) in zip(step, replies, strict=True):
            _tell(connection, job_id, holders)
            if reply == b"ended":
                cancelled.ended.add(job_id)
            elif reply == b"missing":
                cancelled.unknown.add(job_id)
    return needs_sweep


def _tell(connection: Redis, job_id: str, holders: Sequence[bytes]) -> None:
    """Tells the workers that generate a job to stop that."""
    for worker, execution in zip(holders[::2], holders[1::2], strict=True):
        send_command(
            connection,
            reading.text(worker),
            "stop-execution",
            job_id=job_id,
            execution_id=reading.text(execution),
        )


def _sweep(connection: Redis, list_name: str) -> None:
    script = connection.register_script(backlog_script() + load_script(__package__, "sweep.lua"))
    at = 0
    while at >= 0:
        at = script(keys=[list_name], args=[at, _SWEPT_PER_STEP, RQJob.key_for("")])
