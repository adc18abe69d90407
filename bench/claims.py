"""What a long backlog costs Redis: `python bench/backlog.py --claims 100000`."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from redis import Redis
from rq import Queue

from mlx_rq import submit
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.enqueue import JOBS_PER_STEP, enqueue
from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.prefix_path import path_of
from mlx_rq.jobs.queue.prepare import Prepared, prepare
from mlx_rq.worker.cli.valkey import embedded_valkey
from mlx_rq.worker.leases.claim import Claims

LIMIT = 256
MEASURED = 20
"""Claims."""

QUEUE = keys.queue_name("default", "default")
LIST = f"rq:queue:{QUEUE}"
ROUNDS = f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}"
UNLISTED = f"mlx-rq:backlog-unlisted:{QUEUE}", f"mlx-rq:backlog-unlisted-next:{QUEUE}"


class Costs(NamedTuple):
    """Processor time of Redis, in milliseconds, and bytes of its memory."""

    jobs: int
    enqueue_each: float
    lone_enqueue: float
    """A submission of one job, while all others wait."""
    bytes_each: float
    backlog_bytes_each: float
    """Of these, what the order of the backlog takes."""
    claim: float
    """The median."""
    slowest_claim: float
    backlog_lost: float
    """The slowest claim while the backlog was made anew."""
    list_lost: float
    emptied: float
    """The mean script after `rq empty`."""


def prepared(jobs: int) -> Iterator[list[Prepared]]:
    """Questions about documents, eight to each, in a random order, a step of a submission each."""
    numbers = list(range(jobs))
    random.Random(1).shuffle(numbers)
    messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user"}]
    model = prepare({"messages": [messages[0], {"role": "user", "content": "?"}]})
    for start in range(0, jobs, JOBS_PER_STEP):
        step = []
        for number in numbers[start : start + JOBS_PER_STEP]:
            text = f"{number // 8 * 7919} is a document {'x' * 200} Question {number % 8}?"
            body = {"messages": [messages[0], {"role": "user", "content": text}]}
            encoded = json.dumps(body).encode()
            step.append(model._replace(encoded=encoded, path=path_of(body)))
        yield step


class Clock:
    """Tells how long Redis was at work: its processor time, whatever else the machine does."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self.start()

    def start(self) -> None:
        self._connection.config_resetstat()
        self._at = self._now()

    def _now(self) -> float:
        told: dict[str, float] = self._connection.info("cpu")
        return told["used_cpu_user_main_thread"] + told["used_cpu_sys_main_thread"]

    def spent(self) -> float:
        """Milliseconds since the start."""
        return 1000 * (self._now() - self._at)

    def scripts(self) -> int:
        """How many scripts there were."""
        stats = self._connection.info("commandstats")
        return sum(stat["calls"] for name, stat in stats.items() if "_eval" in name)


def measure(jobs: int) -> Costs:
    with TemporaryDirectory() as folder, embedded_valkey(Path(folder), port=None) as url:
        connection = Redis.from_url(url, socket_timeout=300)
        connection.set(keys.worker("w"), "{}")
        claims = Claims(connection, "w", ["default"], lease_seconds=600, max_wait=30)
        clock = Clock(connection)
        before = connection.info("memory")["used_memory"]
        for step in prepared(jobs):
            enqueue(connection, step, JobOptions())
        enqueue_each = clock.spent() / jobs
        held = connection.info("memory")["used_memory"] - before
        members = sum(connection.memory_usage(name, samples=0) or 0 for name in ROUNDS)

        clock.start()
        for number in range(MEASURED):
            submit(prompt=f"Say {number}.", redis_url=url)
        lone = clock.spent() / MEASURED

        claim = _claims(claims, clock)
        backlog_lost = _without(connection, ROUNDS, claims, clock)
        list_lost = _without(connection, (LIST,), claims, clock)
        Queue(QUEUE, connection=connection, serializer=SERIALIZER).empty()
        clock.start()
        claims.take(LIMIT)
        return Costs(
            jobs=jobs,
            enqueue_each=enqueue_each,
            lone_enqueue=lone,
            bytes_each=held / jobs,
            backlog_bytes_each=members / jobs,
            claim=median(claim),
            slowest_claim=max(claim),
            backlog_lost=max(backlog_lost),
            list_lost=max(list_lost),
            emptied=clock.spent() / clock.scripts(),
        )


def _without(connection: Redis, lost: Sequence[str], claims: Claims, clock: Clock) -> list[float]:
    """Measures claims after some of the keys were lost; all are put back then."""
    for name in (LIST, *ROUNDS):
        connection.copy(name, f"kept:{name}", replace=True)
    connection.delete(*lost)
    while connection.info("memory")["lazyfree_pending_objects"]:  # would slow claims down
        time.sleep(0.1)
    times = _claims(claims, clock)
    for name in (LIST, *ROUNDS):
        connection.copy(f"kept:{name}", name, replace=True)
    connection.delete(*UNLISTED)
    return times


def _claims(claims: Claims, clock: Clock) -> list[float]:
    times = []
    for _ in range(MEASURED):
        clock.start()
        claims.take(LIMIT)
        times.append(clock.spent())
    return times


def told(costs: Costs) -> str:
    return (
        f"{costs.jobs:,} jobs wait: enqueue {1000 * costs.enqueue_each:.0f} µs each, a lone one "
        f"{1000 * costs.lone_enqueue:.0f} µs; {costs.bytes_each:.0f} bytes each, of which the "
        f"backlog's order {costs.backlog_bytes_each:.0f}; a claim of {LIMIT}: {costs.claim:.1f} ms "
        f"(slowest {costs.slowest_claim:.1f}); slowest claim with the backlog lost "
        f"{costs.backlog_lost:.1f} ms, the list lost {costs.list_lost:.1f} ms; a script after `rq "
        f"empty` {costs.emptied:.1f} ms"
    )
