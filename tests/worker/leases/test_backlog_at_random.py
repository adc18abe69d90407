"""Whatever is submitted, given back, cancelled or lost: what waits is claimed, and once."""

import random
from typing import Any

import pytest
from redis import Redis

from mlx_rq import submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import lost_from, waiting_in
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.worker.leases.claim import ClaimedJob, Claims

QUEUE = keys.queue_name("default", "default")
COPIES = [f"rq:queue:{QUEUE}"], [f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}"]
"""What waits stands in each of them."""

STEPS = 40


class Queue:
    """A queue, two workers, and what should wait in it or be with one of them."""

    def __init__(self, connection: Redis, seed: int) -> None:
        self.connection = connection
        self.chance = random.Random(seed)
        max_wait = self.chance.choice([0, 30])
        for name in "ab":
            connection.set(keys.worker(name), "{}")  # it lives
        self.workers = [
            Claims(connection, name, ["default"], lease_seconds=600, max_wait=max_wait)
            for name in "ab"
        ]
        self.waiting: set[str] = set()
        self.held: dict[str, tuple[Claims, ClaimedJob]] = {}
        self.submitted = 0

    def _body(self) -> dict[str, Any]:
        self.submitted += 1
        about = f"{self.chance.randrange(60)} {'x' * 150}" if self.chance.random() < 0.7 else ""
        return {"prompt": f"{about} {self.submitted}"}

    def submit(self) -> None:
        for _ in range(self.chance.randrange(1, 5)):
            self.waiting.add(submit(**self._body()).id)

    def submit_many(self) -> None:
        count = self.chance.choice([30, 100, 600])
        self.waiting.update(job.id for job in submit_many(self._body() for _ in range(count)))

    def claim(self, limit: int | None = None, *, alone: bool | None = None) -> None:
        worker, limit = self.chance.choice(self.workers), limit or self.chance.choice([1, 16, 256])
        alone = self.chance.random() < 0.5 if alone is None else alone
        for job in worker.take(limit, alone=alone, enough=16):
            self.waiting.remove(job.id)  # raises where it was claimed before, or cancelled
            self.held[job.id] = worker, job

    def hand_back(self) -> None:
        for job_id, (worker, job) in list(self.held.items())[-20:]:
            assert worker.hand_back([job]) == 1
            del self.held[job_id]
            self.waiting.add(job_id)

    def cancel(self) -> None:
        some = self.chance.sample(sorted(self.waiting), len(self.waiting) // 5)
        cancel_jobs(self.connection, some)
        self.waiting.difference_update(some)

    def lose(self) -> None:
        """Loses one of the copies, which is mended before the other one is lost."""
        lost = self.chance.choice(COPIES)
        self.connection.delete(*lost)
        if self.chance.random() < 0.5:
            self.connection.set(lost[0], "x")
        for _ in range(9):
            self.claim(1)


@pytest.mark.parametrize("seed", range(4))
def test_each_is_claimed_once(redis_url: str, connection: Redis, seed: int) -> None:
    queue = Queue(connection, seed)
    ways = [queue.submit, queue.submit_many, queue.claim, queue.claim, queue.hand_back]
    ways += [queue.cancel, queue.lose] if seed % 2 else [queue.cancel]

    for way in queue.chance.choices(ways, k=STEPS):
        way()
        if queue.lose not in ways:
            assert waiting_in(connection, [QUEUE]) == [len(queue.waiting)]

    while queue.waiting:
        before = len(queue.waiting)
        queue.claim(256, alone=True)
        assert len(queue.waiting) < before
    assert waiting_in(connection, [QUEUE]) == [0]
    assert lost_from(connection, [QUEUE])[0].jobs == 0
