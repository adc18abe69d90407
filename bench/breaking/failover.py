"""A primary that is killed under load, again and again, whose replica becomes the primary.

Redis copies to replicas after it has answered, so each time some jobs are submitted that the
replica never hears of. Whoever waits for them has to be told, and an answer to one of them has to
be kept.
"""

import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fakes import eventually
from pair import Pair
from redis.exceptions import RedisError

from breaking.ledger import Asked, Ledger
from breaking.workers import Workers
from mlx_rq import JobNotFound, ResultTimeout, as_completed, fetch, submit_many
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.results.spool import UNPLACED

SIDES, ROUNDS = ("0", "1"), 3
SHARE_UNKNOWN = 0.1
"""The part of the jobs that the replica never hears of."""
PATIENCE = 120.0


def fail_over(folder: Path, jobs: int, seed: int, pace: float, logs: Path) -> Any:
    """Runs it; gives what was done, what became of jobs, what was wrong, and more figures."""
    folder.mkdir(parents=True)
    done, ledger = Counter[str](), Ledger.of([], seed)
    unknown: set[str] = set()
    with closing(Pair(folder)) as pair, closing(Workers(folder, pair.url, pace)) as workers:
        for side in SIDES:
            workers.start(side).until("ready")
        with new_connection(pair.url, patient=True) as connection:
            for number in range(ROUNDS):
                few = max(2, int(jobs * SHARE_UNKNOWN / ROUNDS))
                _submit(ledger, pair.url, jobs // ROUNDS - few, "slow 4")
                pair.lag()
                newest = _submit(ledger, pair.url, few, "slow 40", priority="high")
                unknown.update(newest)
                if number:  # at first they wait, then they are at work
                    _until_begun(workers, newest)
                pair.kill_primary()
                pair.promote()
                done["failover"] += 1
                pair.swap()
                with suppress(RedisError):
                    ledger.look(connection)
            waiting = threading.Thread(target=_await, args=(ledger,))
            waiting.start()
            while waiting.is_alive():
                for side in SIDES:
                    done["(ended by itself)"] += workers.tend(side)
                waiting.join(0.2)
            workers.end(unknown)
            began = Counter(found[2] for found in workers.said(r"began (\w+)"))
            told = _Told(pair.url, workers)
            found, faults = ledger.reckon(connection, began, told.of)
        if faults:
            workers.keep_log(logs)
    return done, found, faults, {"unknown_to_replicas": len(unknown), "answers_kept": told.kept}


def _submit(ledger: Ledger, url: str, count: int, does: str, **options: Any) -> list[str]:
    bodies = [{"prompt": does}] * count
    made = submit_many(bodies, max_attempts=100, redis_url=url, **options)
    ledger.asked |= {job.id: Asked(job, "answer", 100) for job in made}
    return [job.id for job in made]


def _until_begun(workers: Workers, job_ids: list[str]) -> None:
    eventually(lambda: bool(workers.heard(r"began (\w+)").intersection(job_ids)), "work on them")


def _await(ledger: Ledger) -> None:
    """Waits for all as a producer does."""
    jobs = [one.job for one in ledger.asked.values()]
    with suppress(ResultTimeout):
        for _ in as_completed(jobs, timeout=PATIENCE):
            pass


class _Told:
    """Whether the loss of a job is told to who asks, and an answer that came after it is kept."""

    def __init__(self, url: str, workers: Workers) -> None:
        self._url = url
        self._named = workers.heard(r"log job (\w+): Redis has lost it; its answer is in")
        self._discarded = workers.heard(r"log job (\w+): answer discarded")
        self._files = {
            path.stem
            for side in workers.programs
            for path in (workers.spool(side) / UNPLACED).glob("*.json")
        }

    @property
    def kept(self) -> int:
        return len(self._files)

    def of(self, job_id: str) -> bool:
        try:
            fetch(job_id, redis_url=self._url)
        except JobNotFound:
            return job_id not in self._discarded and (job_id in self._files) == (
                job_id in self._named
            )
        return False
