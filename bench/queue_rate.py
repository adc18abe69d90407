"""Jobs a second through submit → claim → commit, beside RQ's own SimpleWorker running a no-op.

    python bench/queue_rate.py [--jobs 4000] [--peer-jobs 400] [--json]

Both run against one valkey-server that this script starts. Our worker has an engine that answers at
once, so that only the queue is measured; RQ's worker runs a function that returns None. Prints
ratios: absolute rates depend on the machine.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker

from mlx_rq import submit_many
from mlx_rq.engine.interface import Adapter, Outcome, Partial, Task, Totals
from mlx_rq.worker.cli.valkey import embedded_valkey
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.worker import MLXWorker


class InstantEngine:
    """Answers every task in the step after it came."""

    model_id = "instant"
    fingerprint = "fp_instant"
    totals = Totals()
    capacity = 256
    running = 0
    prefix_sharing = "none"
    drafting = ""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> int:
        return len(self._tasks)

    @property
    def waiting_tokens(self) -> int:
        return 0

    @property
    def in_flight(self) -> list[str]:
        return [task.id for task in self._tasks]

    @property
    def task_ids(self) -> list[str]:
        return [task.id for task in self._tasks]

    def check(self) -> None:
        """It has nothing to lose track of."""

    def adapt(self, adapter: Adapter | None) -> None:
        """It answers the same with any."""

    def mix(self, adapters: Mapping[str, Adapter]) -> Collection[str]:
        return ()

    def close(self) -> None:
        """It has nothing to free."""

    def generated(self) -> dict[str, int]:
        return {}

    def partial(self, task_ids: Collection[str]) -> dict[str, Sequence[Partial]]:
        return {}

    def memory(self) -> dict[str, int | None]:
        return {}

    def throttle(self, share: float) -> None:
        """It has no batch."""

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        self._tasks += tasks
        return []

    def step(self) -> list[Outcome]:
        tasks, self._tasks = self._tasks, []
        return [Outcome(task.id, {"object": "chat.completion", "id": task.id}) for task in tasks]

    def spare(self, count: int) -> list[str]:
        return []

    def cancel(self, task_id: str) -> None:
        self._tasks = [task for task in self._tasks if task.id != task_id]


def body(number: int) -> dict[str, Any]:
    """A chat as people send it: a system message and a question."""
    return {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 10},
            {"role": "user", "content": f"Question {number}: what comes after {number}?"},
        ],
        "max_completion_tokens": 64,
    }


def measure_ours(url: str, jobs: int) -> dict[str, float]:
    """Jobs a second: submitting, working, and both in turn."""
    started = time.perf_counter()
    submit_many([body(number) for number in range(jobs)], redis_url=url)
    submitted = time.perf_counter()
    worker = MLXWorker(
        EngineSwitch.of(InstantEngine()),
        Redis.from_url(url),
        Redis.from_url(url),
        options=WorkerOptions(burst=True),
    )
    ended = worker.run()
    finished = time.perf_counter()
    assert ended == jobs, f"{ended} of {jobs} jobs ended"
    return {
        "submit": jobs / (submitted - started),
        "work": jobs / (finished - submitted),
        "whole": jobs / (finished - started),
    }


def measure_peer(url: str, jobs: int) -> dict[str, float]:
    """The same for RQ: enqueue_many, and SimpleWorker on a function that does nothing."""
    connection = Redis.from_url(url)
    queue = Queue("peer", connection=connection, serializer="json")
    datas = [Queue.prepare_data("time.time", kwargs={}) for _ in range(jobs)]
    started = time.perf_counter()
    queue.enqueue_many(datas)
    submitted = time.perf_counter()
    SimpleWorker([queue], connection=connection, serializer="json").work(burst=True)
    finished = time.perf_counter()
    assert queue.finished_job_registry.count == jobs
    return {
        "submit": jobs / (submitted - started),
        "work": jobs / (finished - submitted),
        "whole": jobs / (finished - started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--peer-jobs", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as folder, embedded_valkey(Path(folder), port=None) as url:
        peer = measure_peer(url, arguments.peer_jobs)
        ours = measure_ours(url, arguments.jobs)
    ratios = {name: ours[name] / peer[name] for name in ours}
    if arguments.json:
        print(json.dumps({"ours": ours, "peer": peer, "ratios": ratios}, indent=1))
        return
    print(f"{'jobs a second':14} {'mlx-rq':>9} {'RQ':>9} {'ratio':>7}")
    for name, ratio in ratios.items():
        print(f"{name:14} {ours[name]:9,.0f} {peer[name]:9,.0f} {ratio:7.1f}")


if __name__ == "__main__":
    main()
