"""A Redis that throws away what was used least when its memory is full, under jobs in all states.

Its memory is made smaller again and again, for a moment, while jobs wait, run and have ended. What
is gone has to be told by its id: to whoever asks for it, and by the worker that could not place the
answer, whose turn it was to claim it, or that found it with a dead one.
"""

import random
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from harness import Server
from redis import Redis

from breaking.ledger import Asked, Ledger
from breaking.workers import Workers
from mlx_rq import JobFailed, JobNotFound, fetch, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.results.spool import UNPLACED

SQUEEZES, EVERY, SHARE = 8, 0.7, 0.06
"""How often, seconds in between, and the part of all keys that has no room then."""
QUEUE = keys.queue_name("default", "default")
PATIENCE = 120.0
STUCK = 20.0
"""Seconds without any end, after which it is over: what has none by then, gets none."""


def evict(folder: Path, jobs: int, seed: int, pace: float, logs: Path) -> Any:
    """Runs it; gives what was done, what became of jobs, what was wrong, and more figures."""
    (folder / "valkey").mkdir(parents=True)
    server = Server(folder / "valkey", append_only=False)
    server.start()
    chance, done = random.Random(f"evict {seed}"), Counter[str]()
    with closing(server), closing(Workers(folder, server.url, pace)) as workers:
        with Redis.from_url(server.url) as connection:
            connection.config_set("maxmemory-policy", "allkeys-lru")
            bodies = [{"prompt": f"slow {chance.randrange(2, 8)} | {'x' * 2000}"}] * jobs
            made = submit_many(bodies, max_attempts=100, redis_url=server.url)
            ledger = Ledger.of([Asked(job, "answer", 100) for job in made], seed)
            workers.start("0")
            _squeeze_until_all_ended(connection, ledger, done)
            workers.end(ledger.asked)
            began = Counter(found[2] for found in workers.said(r"began (\w+)"))
            told = _Told(workers, server.url, ledger)
            found, faults = ledger.reckon(connection, began, told.of)
            evicted = connection.info("stats")["evicted_keys"]
        if faults:
            workers.keep_log(logs)
    return done, found, faults, {"evicted_keys": evicted, **told.figures}


def _squeeze_until_all_ended(connection: Redis, ledger: Ledger, done: Counter[str]) -> None:
    """Evicts now and then, until each job has an end or is gone, and no worker has any.

    Not before a worker has some: where the queue goes with all of its jobs, nobody knows of them.
    """
    queue, registry = f"rq:queue:{QUEUE}", f"rq:wip:{QUEUE}"
    over = time.monotonic() + PATIENCE
    while not connection.zcard(registry) and time.monotonic() < over:
        time.sleep(0.1)
    now = time.monotonic()
    changed, squeeze_at, last = now, now, 0
    while (now := time.monotonic()) < min(over, changed + STUCK):
        ledger.look(connection)
        left = connection.llen(queue) + connection.zcard(registry) + len(ledger.open)
        if done["evict"] == SQUEEZES and left == 0:
            break
        if left != last:
            last, changed = left, now
        if done["evict"] < SQUEEZES and now >= squeeze_at:
            squeeze_at += EVERY
            _squeeze(connection)
            done["evict"] += 1
        time.sleep(0.1)


def _squeeze(connection: Redis) -> None:
    """Lets it evict some keys, a few at a time: each look takes memory of its own."""
    most = int(connection.dbsize() * SHARE)
    before = connection.info("stats")["evicted_keys"]
    while connection.info("stats")["evicted_keys"] < before + most:
        connection.config_set("maxmemory", connection.info("memory")["used_memory"] - 1000)
        connection.config_set("maxmemory", 0)


class _Told:
    """Whether the loss of a job was told."""

    def __init__(self, workers: Workers, url: str, ledger: Ledger) -> None:
        self._url = url
        self._answered = workers.heard(r"answered (\w+)")
        self._gone = {
            job_id
            for said in workers.said(r"log \d+ jobs? (?:was|were) gone from Redis when .*: (.*)")
            for job_id in said[2].split(", ")
        }
        self._named = workers.heard(r"log job (\w+): Redis has lost it; its answer is in")
        self._kept = {path.stem for path in (workers.spool("0") / UNPLACED).glob("*.json")}
        # The stream of ends is a key like others, and may go before it is read.
        self._ended = {id for id, seen in ledger.seen.items() if seen.outcome} | set(ledger.told)
        self.figures: Counter[str] = Counter()

    def of(self, job_id: str) -> bool:
        if not self._is_told_to_who_asks(job_id):
            return False
        if job_id in self._ended:
            self.figures["lost_with_its_answer"] += 1
            return True
        if job_id in self._answered:
            self.figures["lost_while_generated"] += 1
            # Of a worker that ended before it could place the answer, whoever comes next tells.
            return job_id in self._named & self._kept or job_id in self._gone
        self.figures["lost_while_it_waited"] += 1
        return job_id in self._gone

    def _is_told_to_who_asks(self, job_id: str) -> bool:
        try:
            fetch(job_id, redis_url=self._url).result(0)
        except JobNotFound:
            return True
        except JobFailed as failure:
            return bool(failure.error["code"] == "job_lost")
        return False
