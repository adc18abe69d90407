"""Memory of a worker over many small jobs, with a real engine: it must not grow with their number.

    python bench/memory.py [--jobs 5000] [--model smollm2] [--json]

One worker answers all jobs; each tenth of them its resident memory is read. Every third job has a
beginning of its own, so that prefixes are kept and evicted, as far as their memory goes. Prints a
plot, and by how much the second half grew. Without --model, a tiny random model: quick, and every
leak that has to do with jobs shows just as well.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "engine")]

from redis import Redis  # noqa: E402
from tiny import tiny_model  # noqa: E402

from mlx_rq import submit_many  # noqa: E402
from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.models.load import LoadedModel, load  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402
from mlx_rq.worker.cli.valkey import embedded_valkey  # noqa: E402
from mlx_rq.worker.models.switch import EngineSwitch  # noqa: E402
from mlx_rq.worker.options import WorkerOptions  # noqa: E402
from mlx_rq.worker.worker import MLXWorker  # noqa: E402

KV_BYTES = 32_000_000
SAMPLES = 20


def resident_megabytes() -> float:
    """What this process has in memory now."""
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True)
    return int(told.stdout) / 1000


def body(number: int) -> dict[str, Any]:
    """A short prompt; every third begins as no other does."""
    topic = f"number {number // 3}" if number % 3 == 0 else "nothing in particular"
    return {
        "messages": [
            {"role": "system", "content": f"You answer questions about {topic}. " * 4},
            {"role": "user", "content": f"Question {number}?"},
        ],
        "max_completion_tokens": 4,
    }


def measure(model: LoadedModel, jobs: int, url: str) -> list[tuple[int, float]]:
    """Jobs that have ended, and the memory then, a sample each twentieth."""
    for first in range(0, jobs, 1000):
        bodies = [body(number) for number in range(first, min(jobs, first + 1000))]
        submit_many(bodies, redis_url=url)
    worker = MLXWorker(
        EngineSwitch.of(MLXEngine(model, EngineOptions(batch_size=32, kv_bytes=KV_BYTES))),
        Redis.from_url(url),
        Redis.from_url(url),
        options=WorkerOptions(burst=True),
    )
    samples: list[tuple[int, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.05):
            ended = int(worker.describe()["ended"])
            if ended >= len(samples) * jobs // SAMPLES:
                samples.append((ended, resident_megabytes()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        ended = worker.run()
    finally:
        over.set()
        sampler.join()
    assert ended == jobs, f"{ended} of {jobs} jobs ended"
    return [*samples, (ended, resident_megabytes())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    model = load(arguments.model) if arguments.model else tiny_model("llama")
    with TemporaryDirectory() as folder, embedded_valkey(Path(folder), port=None) as url:
        samples = measure(model, arguments.jobs, url)
    half = next(megabytes for ended, megabytes in samples if ended >= arguments.jobs / 2)
    growth = samples[-1][1] / half - 1
    if arguments.json:
        print(json.dumps({"samples": samples, "second_half_growth": growth}))
        return
    most = max(megabytes for _, megabytes in samples)
    for ended, megabytes in samples:
        print(f"{ended:6} jobs {megabytes:7.1f} MB  {'#' * round(50 * megabytes / most)}")
    print(f"the second half grew by {100 * growth:.1f} %")


if __name__ == "__main__":
    main()
