"""Keeps a worker's leases alive from a thread of its own, while the MLX thread computes.

The thread has its own connection. It renews only while the generation thread shows progress: a
worker that hangs loses its leases, and with them its jobs, to one that works.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq import Queue

from mlx_rq.jobs.openai.words import in_a_sentence
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.retry import RETRY_SECONDS, RedisRetry
from mlx_rq.jobs.queue.scripts import by_name
from mlx_rq.jobs.queue.workers import live_workers, remember_served
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.leases.in_flight import kept_seconds
from mlx_rq.worker.leases.name import WITHOUT_END, NameLease, NameTaken
from mlx_rq.worker.leases.recovery import ExpiredLeases, executions_of, give_back_unlisted
from mlx_rq.worker.leases.rq_registration import RQRegistration
from mlx_rq.worker.leases.scripts import key_prefixes, script_of

logger = logging.getLogger("mlx_rq.worker")

_COUNTS_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock that goes on while the machine sleeps (macOS has none of that name, but it is so)."""

RECOVERY_MILLISECONDS = 1000
"""All workers together look for leases that ran out no more often."""


@dataclass(frozen=True)
class RenewArguments:
    """What `renew.lua` is told, under the names that it uses."""

    leases: list[tuple[str, str, str]]
    """Of each its job, its execution and the job's queue."""
    worker: str
    executions: str
    """The key of RQ's set of the worker's executions."""
    lease: int
    prefixes: Mapping[str, str]
    data_set: str
    new_data_set: str
    """The id that the data gets where it has none."""


class LeaseKeeper(threading.Thread):
    """Renews leases every quarter of their length and says that the worker lives."""

    def __init__(
        self,
        connection: Redis,
        worker: RQRegistration,
        *,
        lease_seconds: int,
        stall_seconds: float,
        jobs: Callable[[], list[ClaimedJob]],
        describe: Callable[[], Mapping[str, Any]],
        recover: list[Queue],
        name: NameLease,
    ) -> None:
        super().__init__(name="leases", daemon=True)
        self._connection = connection
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._jobs = jobs
        self._describe = describe
        self._renew = connection.register_script(script_of("renew.lua"))
        self._expired = ExpiredLeases(connection, recover, patience=2 * self.interval)
        self._data_set: str | None = None
        self._others: set[str] = set()
        self._name = name
        self._redis = RedisRetry(self._redis_failed, seconds=min(RETRY_SECONDS, self.interval))
        self._stopping = threading.Event()
        self.alone = True
        """No other live worker serves one of this worker's models (as of the last renewal)."""
        self._last_progress = time.monotonic()

    @property
    def interval(self) -> float:
        return self._lease_seconds / 4

    def progress(self) -> None:
        """Called by the generation thread whenever it has done a piece of work."""
        self._last_progress = time.monotonic()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    def forget(self) -> None:
        """Takes the worker's records away. Not before its jobs are back: they are read for that."""
        self._connection.delete(keys.worker(self._worker.name), keys.in_flight(self._worker.name))

    def run(self) -> None:
        threading.Thread(target=self._notice_sleep, name="sleep", daemon=True).start()
        keep = self._recover_expired  # who starts this has just renewed them
        while not self._stopping.is_set():
            try:
                self._redis.attempt(keep)
            except NameTaken as error:
                logger.error("%s: this one was away for too long, and ends", error)
                return
            except Exception:  # a malformed record in Redis must not end the renewals
                logger.exception("leases: going on after")
            keep = self._keep
            self._stopping.wait(self._redis.pause or self.interval)

    def _notice_sleep(self) -> None:
        """Says when this process was stopped for longer than a lease, in a thread of its own.

        Which does nothing else: a Redis that is slow to answer is no sleep.
        """
        while not self._stopping.is_set():
            began = time.clock_gettime(_COUNTS_SLEEP)
            self._stopping.wait(self.interval)
            slept = time.clock_gettime(_COUNTS_SLEEP) - began - self.interval
            if slept > self._lease_seconds:
                logger.warning(
                    "this worker slept for %.0f s: other workers may have its jobs", slept
                )

    def _keep(self) -> None:
        if time.monotonic() - self._last_progress > self._stall_seconds:
            logger.error("no progress for %.0f s: leases are not renewed", self._stall_seconds)
        else:
            self.renew()
        self._recover_expired()

    @staticmethod
    def _redis_failed(error: Exception) -> None:
        logger.warning("leases could not be renewed: %s; trying again", in_a_sentence(error))

    def renew(self) -> None:
        """Prolongs all leases and the worker's own record, in one round trip.

        A lease that was lost in the meantime is not taken back (`renew.lua`). Raises NameTaken.
        """
        self._name.take()
        arguments = RenewArguments(
            leases=[(job.id, job.lease.execution_id, job.queue_name) for job in self._jobs()],
            worker=self._worker.name,
            executions=executions_of(self._worker.name),
            lease=self._lease_seconds,
            prefixes=key_prefixes(),
            data_set=keys.DATA_SET,
            new_data_set=secrets.token_hex(16),
        )
        with self._connection.pipeline(transaction=False) as pipe:
            self._worker.heartbeat(2 * self._lease_seconds, pipeline=pipe)
            self.say(pipe)
            pipe.expire(keys.in_flight(self._worker.name), kept_seconds(self._lease_seconds))
            pipe.sadd(self._worker.redis_workers_keys, self._worker.key)
            pipe.hexists(self._worker.key, "birth")
            self._renew(args=[by_name(arguments)], client=pipe)
            *_, listed, known, data_set = reading.ask_all(pipe)
        self._look_at_data(reading.text(data_set))
        if not known or reading.WRONG_TYPE in (listed, known):
            self._register_again()
        served = set(self._describe()["serves"])
        remember_served(self._connection, served)
        others = {
            other["name"]: other["serves"]
            for other in live_workers(self._connection)
            if other["name"] != self._worker.name
        }
        self.alone = not any(map(served.intersection, others.values()))
        for gone in self._others.difference(others):
            give_back_unlisted(self._connection, gone)
        self._others = set(others)

    def say(self, pipe: Pipeline | None = None) -> None:
        """Says what the worker serves and has done; the record ends by itself where nobody does."""
        described = self._describe()
        client = self._connection if pipe is None else pipe
        name = keys.worker(self._worker.name)
        client.set(name, json.dumps(described), ex=2 * self._lease_seconds)

    def _look_at_data(self, data_set: str) -> None:
        """Says where Redis has lost its data: what it had, has gone with its id."""
        if self._data_set not in (None, data_set):
            logger.error(
                "Redis lost its data (was it started without an append-only file?): the jobs that "
                "waited in it are gone; answers to those that run here will be kept on disk"
            )
        self._data_set = data_set

    def _register_again(self) -> None:
        """Enters RQ's lists, from which this worker has gone: its records have a time to live."""
        self._worker.sign_on_again()

    def _recover_expired(self) -> None:
        """Puts the jobs of dead workers back into their queues.

        One worker does it at a time: the record that says so expires by itself. (Not soon, where
        the clock of Redis was set back since; never, where somebody has put another there.)
        """
        left = self._connection.pttl(keys.RECOVERY)
        if left == WITHOUT_END or left > RECOVERY_MILLISECONDS:
            self._connection.delete(keys.RECOVERY)
        if self._connection.set(
            keys.RECOVERY, self._worker.name, nx=True, px=RECOVERY_MILLISECONDS
        ):
            self._expired.give_back()
