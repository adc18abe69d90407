"""Takes jobs from the queues with a lease, keeps the leases, gives jobs back.

RQ's own intermediate queue fails whoever takes many jobs at once: a job that waits there for a
minute is taken for stuck. So one script claims straight into RQ's StartedJobRegistry (`claim.lua`).
"""

import logging
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.utils import now, utcformat

from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.openai.validation import short
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.finish import Lease
from mlx_rq.jobs.queue.options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESULT_TTL,
    MAX_SECONDS,
    RECOVERY_RETRIES,
)
from mlx_rq.jobs.queue.payload import SERIALIZER, read_meta
from mlx_rq.jobs.queue.scripts import by_name
from mlx_rq.worker.leases.name import WITHOUT_END
from mlx_rq.worker.leases.recovery import Count, Held, executions_of, give_back
from mlx_rq.worker.leases.scripts import key_prefixes, script_of

logger = logging.getLogger("mlx_rq.worker")

MAX_BYTES = 2**40

_NAMED = 1000
"""Lost jobs that are named, at most."""

SUSPECT_AFTER = 2
"""A job that was in flight this many workers that died is generated alone."""


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that this worker holds a lease on. `data` is what lies in Redis, unread."""

    id: str
    queue_name: str
    rank: int
    data: bytes | None
    result_ttl: int
    timeout: float | None
    attempt: int
    max_attempts: int
    lease: Lease
    suspect: bool = False
    """Whether several workers died with it in flight: nothing else is generated beside it then."""
    lost_in_reading: bool = False
    """Whether a worker died while it read this job together with others."""
    others_follow: bool = False
    """Whether the claim ended amid jobs that begin alike, of which this is one."""
    stream: bool = False
    """Whether its text is to be published while it is generated."""
    submitted_at: float | None = None
    """Unix time in seconds; None where its record does not say."""
    claimed_at: float = field(default_factory=time.monotonic, compare=False)
    """Seconds of the monotonic clock: what was measured since holds though the time is set."""


@dataclass(frozen=True)
class ClaimArguments:
    """What `claim.lua` is told, under the names that it uses; prefixes are those of keys."""

    limit: int
    nbytes: int
    enough: int
    alone: bool
    idle: bool
    worker: str
    started_at: str
    lease: int
    max_wait: float
    """Seconds that a round of the backlog takes new jobs in, and after which a job has waited too
    long."""
    suspect_after: int
    default_attempts: int
    recovery_retries: int
    prefixes: Mapping[str, str]
    data_set: str
    execution_ids: list[str]
    """One for each job that may be claimed."""


class Claims:
    """Claims on the queues of the models that a worker serves, most urgent priority first."""

    def __init__(
        self,
        connection: Redis,
        worker_name: str,
        models: Iterable[str],
        *,
        lease_seconds: int,
        max_wait: float,
    ) -> None:
        self._connection = connection
        self._worker_name = worker_name
        self._models = list(models)
        self.lease_seconds = lease_seconds
        self._max_wait = max_wait
        self._said_idle = False
        self._queues = {
            (model, priority): Queue(
                keys.queue_name(model, priority), connection=connection, serializer=SERIALIZER
            )
            for priority in PRIORITIES
            for model in self._models
        }
        self.queues = list(self._queues.values())
        self._executions = executions_of(worker_name)
        self._queue_keys = {
            queue.name: (queue.key, queue.started_job_registry.key) for queue in self.queues
        }
        self._gone: list[str] = []
        self._script = connection.register_script(
            script_of("claim_job.lua", "claim_mend.lua", "claim_walk.lua", "claim.lua")
        )

    def queues_of(self, models: Collection[str]) -> list[Queue]:
        """Gives the queues of some of the models, of each priority in their order."""
        return [self._queues[model, priority] for priority in PRIORITIES for model in models]

    def take(
        self,
        limit: int,
        *,
        nbytes: int = MAX_BYTES,
        enough: int = 1,
        alone: bool = True,
        idle: bool = True,
        models: Collection[str] | None = None,
    ) -> list[ClaimedJob]:
        """Claims up to `limit` jobs and returns them; an empty list where none wait.

        With `models`, jobs of those of its models only, of each priority in their order.
        What is stored of all but the last comes to less than `nbytes`.
        Where other workers share the queues (not `alone`), groups of jobs that begin alike are
        taken whole until there are `enough`. A suspect comes by itself, to an `idle` worker only:
        until then nothing behind it is claimed. See `claim.lua`.
        """
        started_at, claimed_at = now(), time.monotonic()
        arguments = ClaimArguments(
            limit=limit,
            nbytes=nbytes,
            enough=enough,
            alone=alone,
            idle=idle,
            worker=self._worker_name,
            started_at=utcformat(started_at),
            lease=self.lease_seconds,
            max_wait=self._max_wait,
            suspect_after=SUSPECT_AFTER,
            default_attempts=DEFAULT_MAX_ATTEMPTS,
            recovery_retries=RECOVERY_RETRIES,
            prefixes=key_prefixes(),
            data_set=keys.DATA_SET,
            execution_ids=[uuid.uuid4().hex for _ in range(limit)],
        )
        queues = self.queues if models is None else self.queues_of(models)
        script_keys = [key for queue in queues for key in self._queue_keys[queue.name]]
        claimed: list[Sequence[Any]] = []
        more = True
        while more and not claimed:  # so that no script has to look through all that is no job
            claimed, lost, gone, more = self._script(
                keys=[*script_keys, self._executions], args=[by_name(arguments)]
            )
            self._say_lost(lost, gone)
        if claimed and self._said_idle:
            with suppress(RedisError):  # it ends by itself, and what was claimed is ours by now
                self._connection.delete(*map(keys.idle, self._models))
            self._said_idle = False
        return [self._read(entry, queues, started_at, claimed_at) for entry in claimed]

    def _read(
        self, entry: Sequence[Any], queues: Sequence[Queue], started_at: datetime, claimed_at: float
    ) -> ClaimedJob:
        number, job_id, execution_id, data, meta_text, ttl, most, *more = entry
        lost, suspect, data_set, lost_in_reading, others_follow = more
        lease = Lease(
            execution_id.decode(),
            self._worker_name,
            started_at,
            data_set.decode(errors="replace"),
        )
        queue = queues[number - 1]
        _, priority = keys.model_and_priority(queue.name)
        meta = read_meta(meta_text)
        return ClaimedJob(
            id=job_id.decode(),
            queue_name=queue.name,
            rank=PRIORITIES.index(priority),
            data=data,
            result_ttl=int(reading.number(ttl, 1, MAX_SECONDS) or DEFAULT_RESULT_TTL),
            timeout=reading.number(meta.get("timeout"), 0, MAX_SECONDS),
            attempt=lost + 1,
            max_attempts=most,
            lease=lease,
            suspect=bool(suspect),
            lost_in_reading=bool(lost_in_reading),
            others_follow=bool(others_follow),
            stream=meta.get("stream") is True,
            submitted_at=reading.number(meta.get("submitted_at"), 0, reading.MAX_UNIX_TIME),
            claimed_at=claimed_at,
        )

    def say_idle(self, seconds: float, models: Iterable[str]) -> None:
        """Says to workers that have too much of some models that this one has nothing to do.

        It holds for twice the time, so that it still does when it is said once more.
        """
        self._said_idle = True
        with self._connection.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.set(keys.idle(model), self._worker_name, px=int(2000 * seconds))
            pipe.execute()

    def idle_models(self) -> set[str]:
        """Names those of the models for which another worker has nothing to do.

        What says so without an end says nothing, and is deleted.
        """
        with self._connection.pipeline(transaction=False) as pipe:
            for model in self._models:
                pipe.get(keys.idle(model))
                pipe.pttl(keys.idle(model))
            replies = reading.ask_all(pipe)
        said = {
            model: reading.text(name)
            for model, name, left in zip(self._models, replies[::2], replies[1::2], strict=True)
            if left != WITHOUT_END
        }
        if stale := [keys.idle(model) for model in self._models if model not in said]:
            self._connection.delete(*stale)
        nobody = ("", self._worker_name)
        return {model for model, name in said.items() if name not in nobody}

    def _say_lost(self, lost: int, gone: Sequence[bytes]) -> None:
        """Says how many jobs were lost, and which, where that is certain.

        Others may be gone because they have ended, and their time was over.
        """
        self._gone += [short(reading.text(job_id)) for job_id in gone][: _NAMED - len(self._gone)]
        if not lost:
            return
        names = f": {', '.join(self._gone)}" if len(self._gone) == lost else ""
        jobs = counted(
            lost,
            "job was gone from Redis when its turn came",
            "jobs were gone from Redis when their turn came",
        )
        logger.error("%s%s", jobs, names)
        self._gone.clear()

    def wait(self, seconds: float, models: Iterable[str]) -> None:
        """Returns when a producer rings the wake-up of one of the models, or after some seconds."""
        names = [keys.wake_up(model) for model in models]
        if not names:
            time.sleep(seconds)
        elif reading.ask(self._connection.blpop, names, timeout=seconds) is reading.WRONG_TYPE:
            for name in names:
                if reading.ask(self._connection.llen, name) is reading.WRONG_TYPE:
                    self._connection.delete(name)

    def hand_back(
        self, jobs: Iterable[ClaimedJob], *, count: Count = "no", to_others: bool = False
    ) -> int:
        """Gives jobs back; returns how many were still ours. Arguments as in `give_back.lua`."""
        held = [Held(job.id, job.lease.execution_id, job.queue_name) for job in jobs]
        return give_back(
            self._connection, held, count=count, worker=self._worker_name, to_others=to_others
        )
