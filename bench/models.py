"""Several models in one worker, beside a worker for each and beside mlx-lm's server.

    python bench/models.py [--jobs 300] [--models 3] [--model FOLDER …] [--changes 50] [--json]

In one run, on the same shuffled jobs: the time of one worker with all models, of a worker for each
model one after another, and of `mlx_lm.server`, which has to change its model for nearly every
request. Then how often the model changes and how long a job waits where jobs come in over time;
the memory over many changes; and that of ten adapters on one model beside ten models. Without
--model, tiny random models: quick to load, which favours whoever changes often.
"""

import argparse
import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / part) for part in ("", "engine")]

import httpx  # noqa: E402
import mlx.core as mx  # noqa: E402
from adapting import write_adapter  # noqa: E402
from fakes import free_port  # noqa: E402
from tiny import model_folder  # noqa: E402

from mlx_rq import Job, submit_many  # noqa: E402
from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.interface import Adapter  # noqa: E402
from mlx_rq.engine.models.load import load  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402
from mlx_rq.jobs.queue.connection import new_connection  # noqa: E402
from mlx_rq.worker.cli.valkey import embedded_valkey  # noqa: E402
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel  # noqa: E402
from mlx_rq.worker.options import WorkerOptions  # noqa: E402
from mlx_rq.worker.worker import MLXWorker  # noqa: E402

SEED = 18
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BATCH = 16
KV_BYTES = 256_000_000
ANSWER_TOKENS = 16
TRICKLE = 300
"""Jobs that come in over time."""

CLIENTS = 8
"""Requests that mlx-lm's server has at a time."""

Body = dict[str, Any]


@dataclass
class Result:
    """Seconds, counts and bytes."""

    jobs: int
    models: int
    one_worker: float = 0.0
    workers_one_by_one: float = 0.0
    server: float = 0.0
    """Of as many jobs, at the rate of those that it was asked."""
    server_asked: int = 0
    same_answers: bool = False
    changes: int = 0
    changes_in_order: int = 0
    """As many as whoever takes the jobs in their order."""
    trickle_changes: int = 0
    trickle_changes_in_order: int = 0
    trickle_seconds: float = 0.0
    trickle_longest_wait: float = 0.0
    trickle_max_wait: float = 0.0
    memory_after_changes: list[int] = field(default_factory=list)
    adapters_on_one: int = 0
    ten_models: int = 0


class Shelf:
    """Models to load; counts the loads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.loads = 0
        self.switch = EngineSwitch(
            [ServedModel((str(folder),), self._loading(folder)) for folder in folders]
        )

    def _loading(self, folder: Path) -> Callable[[], MLXEngine]:
        def loading() -> MLXEngine:
            self.loads += 1
            return engine_of(folder)

        return loading


def engine_of(folder: Path) -> MLXEngine:
    return MLXEngine(load(str(folder)), EngineOptions(batch_size=BATCH, kv_bytes=KV_BYTES))


def body(number: int, model: Path) -> Body:
    return {
        "model": str(model),
        "prompt": f"Question {number}: what comes after {number * 7}? Answer in a word or two.",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }


def changes_in_order(bodies: Sequence[Body]) -> int:
    return len(list(groupby(one["model"] for one in bodies)))


@contextmanager
def valkey() -> Iterator[str]:
    """Runs an empty queue."""
    with TemporaryDirectory() as folder, embedded_valkey(Path(folder), port=None) as url:
        yield url


def work(url: str, shelf: Shelf, **options: Any) -> float:
    """Runs a worker in this thread until it is done; gives the seconds, loading included."""
    worker = MLXWorker(
        shelf.switch,
        new_connection(url),
        new_connection(url),
        options=WorkerOptions(**options),
    )
    started = time.monotonic()
    worker.run()
    seconds = time.monotonic() - started
    shelf.switch.unload()
    return seconds


def texts(jobs: Sequence[Job]) -> list[str]:
    return [job.result(0)["choices"][0]["text"] for job in jobs]


def beside_a_worker_for_each(bodies: list[Body], folders: list[Path], result: Result) -> None:
    with valkey() as url:
        jobs = submit_many(bodies, redis_url=url)
        shelf = Shelf(folders)
        result.one_worker = work(url, shelf, burst=True)
        result.changes = shelf.loads
        together = texts(jobs)
    with valkey() as url:
        jobs = submit_many(bodies, redis_url=url)
        result.workers_one_by_one = sum(work(url, Shelf([one]), burst=True) for one in folders)
        result.same_answers = together == texts(jobs)
    result.changes_in_order = changes_in_order(bodies)


def beside_the_server(bodies: list[Body], result: Result) -> None:
    """Asks mlx-lm's server, as its clients would: several at a time, each for its model."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm.server", "--port", str(port), "--log-level", "ERROR"]
    base = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with httpx.Client(base_url=base, timeout=600) as client:
                _until_there(client, server)

                def ask(one: Body) -> None:
                    client.post("/v1/completions", json=one).raise_for_status()

                ask(bodies[0])
                started = time.monotonic()
                with ThreadPoolExecutor(CLIENTS) as clients:
                    list(clients.map(ask, bodies))
                seconds = time.monotonic() - started
        finally:
            server.terminate()
    result.server, result.server_asked = seconds * result.jobs / len(bodies), len(bodies)


def _until_there(client: httpx.Client, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            client.get("/health")
            return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("mlx_lm.server ended by itself")


def trickle(bodies: list[Body], folders: list[Path], max_wait: float, result: Result) -> None:
    """Has jobs come in over twice the time that they take at once."""
    pause = 2 * result.one_worker / result.jobs
    with valkey() as url:
        jobs: list[Job] = []

        def come_in() -> None:
            for one in bodies:
                jobs.extend(submit_many([one], redis_url=url))
                time.sleep(pause)

        coming = threading.Thread(target=come_in)
        coming.start()
        shelf = Shelf(folders)
        result.trickle_seconds = work(url, shelf, max_wait=max_wait, max_jobs=len(bodies))
        coming.join()
        result.trickle_longest_wait = max(map(_waited, jobs))
    result.trickle_changes, result.trickle_max_wait = shelf.loads, max_wait
    result.trickle_changes_in_order = changes_in_order(bodies)


def _waited(job: Job) -> float:
    info = job.info()
    began, came = (datetime.fromisoformat(str(info[k])) for k in ("started_at", "created_at"))
    return (began - came).total_seconds()


def memory_over_changes(folders: list[Path], changes: int, result: Result) -> None:
    """Reads what MLX holds each time that the first model is loaded again."""
    switch = Shelf(folders[:2]).switch
    for _ in range(changes // 2):
        for model in switch.models:
            switch.load(model)
        switch.unload()
        gc.collect()
        mx.clear_cache()
        result.memory_after_changes.append(mx.get_active_memory())


def adapters_beside_models(folder: Path, result: Result) -> None:
    """Compares the memory of a model under ten adapters, in turn, with that of ten models."""
    base = model_folder(folder / "base", **TINY)
    before = mx.get_active_memory()
    engine = engine_of(base)
    for number in range(10):
        adapter = write_adapter(folder / f"adapter-{number}", seed=number, model=TINY)
        engine.adapt(Adapter(f"base:{number}", adapter))
        gc.collect()
        result.adapters_on_one = max(result.adapters_on_one, mx.get_active_memory() - before)
    engine.close()
    before = mx.get_active_memory()
    engines = [engine_of(base) for _ in range(10)]
    gc.collect()
    result.ten_models = mx.get_active_memory() - before
    for one in engines:
        one.close()


def show(result: Result) -> None:
    one, flat = result.one_worker, result.memory_after_changes
    print(f"{result.jobs:,} jobs for {result.models} models, shuffled, {os.cpu_count()} CPUs")
    print(f"one worker with all models         {one:8.1f} s   1.00")
    each = result.workers_one_by_one
    print(f"a worker for each, one by one      {each:8.1f} s   {each / one:.2f}")
    if result.server_asked:
        asked = f"at the rate of {result.server_asked}"
        print(f"mlx_lm.server, {asked:20}{result.server:8.1f} s   {result.server / one:.2f}")
    print(f"same answers: {'yes' if result.same_answers else 'NO'}")
    print(
        f"models loaded: {result.changes} times, with --max-wait {WorkerOptions().max_wait:g}; the "
        f"least possible: {result.models}; in the order of the jobs: {result.changes_in_order:,}"
    )
    print(
        f"coming in over {result.trickle_seconds:.0f} s with --max-wait "
        f"{result.trickle_max_wait:g}: loaded {result.trickle_changes} times (in their order: "
        f"{result.trickle_changes_in_order:,}), longest wait {result.trickle_longest_wait:.1f} s"
    )
    if flat:
        print(
            f"bytes that MLX holds after {2 * len(flat)} changes / after 2: {flat[-1]:,} / "
            f"{flat[0]:,}"
        )
    print(
        f"ten adapters on one model / ten models: {result.adapters_on_one / 1e6:.0f} MB / "
        f"{result.ten_models / 1e6:.0f} MB = {result.adapters_on_one / result.ten_models:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument(
        "--models", type=int, default=3, help="tiny ones, where no --model is given"
    )
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--server-jobs", type=int, default=48, help="that the server is asked")
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--max-wait", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as name:
        folder = Path(name)
        folders = options.model or [
            model_folder(folder / f"model-{n}", seed=n, **TINY) for n in range(options.models)
        ]
        result = Result(options.jobs, len(folders))
        draw = random.Random(SEED)
        bodies = [body(number, draw.choice(folders)) for number in range(options.jobs)]
        beside_a_worker_for_each(bodies, folders, result)
        if options.server_jobs:
            beside_the_server(bodies[: options.server_jobs], result)
        trickle(bodies[:TRICKLE], folders, options.max_wait, result)
        memory_over_changes(folders, options.changes, result)
        adapters_beside_models(folder, result)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        show(result)


if __name__ == "__main__":
    main()
