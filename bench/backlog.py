"""Shared tokens over a whole backlog: what workers compute of it, and how long a lone job waits.

    python bench/backlog.py [--documents 2500] [--orders shuffled sorted …] [--plain] [--json]

Through a real queue and real workers with a tiny random model, whose memory is for 40 documents. A
document's questions share all of it but their last words, and all share a system message; the
`unshared` ones share nothing. The figures are over the whole backlog: tokens that all workers
prefilled, for each distinct token of all prompts. All along the run come lone jobs, which begin
like no other: of the one that waited longest, `lone` is how many jobs ended before it since it
came, `lone_seconds` how long that took, and `lone_share` the same in parts of the whole run's time.

With `--plain`, each run is made again by workers that know of no prefix; `cpu` is the processor
time of the ones for that of the others. Where nothing is shared, that is what looking for prefixes
costs.

With `--claims 100000`, what such a backlog costs Redis, without workers (`claims.py`).
"""

import argparse
import json
import logging
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "engine")]

from claims import measure as measure_claims  # noqa: E402
from claims import told as told_claims  # noqa: E402
from redis import Redis  # noqa: E402
from tiny import tiny_model  # noqa: E402

from mlx_rq import Job, submit, submit_many  # noqa: E402
from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402
from mlx_rq.engine.prompts.render import render  # noqa: E402
from mlx_rq.engine.scheduling.budget import measure_kv  # noqa: E402
from mlx_rq.engine.scheduling.distinct_tokens import DistinctTokens  # noqa: E402
from mlx_rq.jobs.client.job import UNFINISHED  # noqa: E402
from mlx_rq.jobs.openai.requests import ChatRequest  # noqa: E402
from mlx_rq.worker.cli.valkey import embedded_valkey  # noqa: E402
from mlx_rq.worker.models.switch import EngineSwitch  # noqa: E402
from mlx_rq.worker.options import WorkerOptions  # noqa: E402
from mlx_rq.worker.worker import MLXWorker  # noqa: E402

HELD = 40
"""Documents that there is memory for."""

DOCUMENT = 900
"""Characters of a document: some 300 tokens of the tiny model."""

LONE = 20
"""Lone jobs, which come evenly over the run."""

SYSTEM = "Answer the question about the document in one word. "

Body = dict[str, Any]


class Figures(NamedTuple):
    """What came of one order of the backlog."""

    order: str
    workers: int
    jobs: int
    prefilled_per_distinct: float
    told: float
    """The same as the workers tell it; they count what each of them computed."""
    lone: int
    """Jobs that ended before a lone one since it came, at the most."""
    lone_seconds: float
    lone_share: float
    """Of the whole run's time: how long a lone job waited, at the most."""
    jobs_per_second: float
    cpu_seconds: float


def document(number: int) -> str:
    words = random.Random(number)
    return "".join(words.choices("abcdefghijklmnop ", k=DOCUMENT))


def question(about: int, number: int) -> Body:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{document(about)}\nQuestion {number}?"},
        ],
        "max_completion_tokens": 8,
        "temperature": 0,
    }


def backlog(order: str, documents: int, questions: int) -> list[Body]:
    """The bodies in the order in which they are submitted."""
    work = [(about, number) for about in range(documents) for number in range(questions)]
    if order == "shuffled":
        random.Random(1).shuffle(work)
    elif order == "files":  # ten files of questions, a line of each in turn
        work.sort(key=lambda pair: (pair[1], pair[0] % 10))
    elif order == "unshared":
        bodies = [question(about * questions + number, 0) for about, number in work]
        return [{**body, "messages": body["messages"][1:]} for body in bodies]
    return [question(about, number) for about, number in work]


class Told(NamedTuple):
    """What a worker says in the end."""

    prefilled: int
    distinct: int
    cpu_seconds: float


def work(url: str, told: Any, batch_size: int, plain: bool) -> None:
    """One worker: works until nothing waits, then tells what it computed."""
    logging.disable(logging.WARNING)
    model = tiny_model("llama")
    of_one = measure_kv(model.model).bytes(1, DOCUMENT // 3)
    options = EngineOptions(batch_size=batch_size, kv_bytes=HELD * of_one, reserve=16)
    if plain:
        options = replace(options, min_prefix_tokens=10**9, share_prefixes=False)
    engine = MLXEngine(model, options)
    worker = MLXWorker(
        EngineSwitch.of(engine),
        Redis.from_url(url),
        Redis.from_url(url),
        options=WorkerOptions(lease=20),
    )
    threading.Thread(target=_stop_when_done, args=(url, worker), daemon=True).start()
    started = time.process_time()
    worker.run()
    totals = engine.totals
    seconds = time.process_time() - started
    told.put(Told(totals.prefilled_tokens, totals.distinct_tokens, seconds))


def _stop_when_done(url: str, worker: MLXWorker) -> None:
    """Stops the worker once every job that was submitted has ended."""
    connection = Redis.from_url(url)
    while not connection.exists("bench:done"):
        time.sleep(0.2)
    worker.request_stop(signal.SIGTERM, None)


def distinct_of(bodies: list[Body]) -> int:
    """Distinct tokens of all prompts, as the model renders them."""
    model = tiny_model("llama")
    distinct = DistinctTokens(exact=2**26)
    for body in bodies:
        request = ChatRequest.model_validate(body)
        for prompt in render(request, model.tokenizer, model.vocab_size):
            distinct.add(prompt)
    return distinct.count


def wait_for(connection: Redis, ended: int) -> Iterator[int]:
    """Gives how many jobs have ended, until it are so many."""
    while (count := connection.xlen("mlx-rq:completions")) < ended:
        yield count
        time.sleep(0.1)


def lone_jobs(connection: Redis, url: str, jobs: int) -> Iterator[tuple[int, float]]:
    """Submits lone jobs while others are done; gives what ended before each, and its wait."""
    waiting: dict[Job, tuple[int, float]] = {}
    come = 0
    for ended in wait_for(connection, jobs + LONE):
        now = time.monotonic()
        if come < LONE and ended >= (come + 1) * jobs // (LONE + 2):
            begins = random.Random(-1 - come).choices("qrstuvwxyz ", k=100)
            lone = submit(prompt="".join(begins), max_tokens=4, redis_url=url)
            waiting[lone] = ended, now
            come += 1
        for lone in [job for job in waiting if job.status() not in UNFINISHED]:
            before, since = waiting.pop(lone)
            yield max(0, ended - before - 1), now - since
    for before, since in waiting.values():  # they were the last
        yield jobs + LONE - before - 1, time.monotonic() - since


def measure(
    order: str, bodies: list[Body], workers: int, batch_size: int, plain: bool = False
) -> Figures:
    """Submits the backlog, and lone jobs while workers are at it."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, embedded_valkey(Path(folder), port=None) as url:
        connection = Redis.from_url(url)
        submit_many(bodies, redis_url=url)
        told = context.Queue()
        started = time.monotonic()
        processes = [
            context.Process(target=work, args=(url, told, batch_size, plain))
            for _ in range(workers)
        ]
        for process in processes:
            process.start()
        waits = list(lone_jobs(connection, url, len(bodies)))
        seconds = time.monotonic() - started
        connection.set("bench:done", 1)
        totals: list[Told] = [told.get() for _ in processes]
        for process in processes:
            process.join()
    prefilled = sum(one.prefilled for one in totals)
    return Figures(
        order=order,
        workers=workers,
        jobs=len(bodies),
        prefilled_per_distinct=prefilled / distinct_of(bodies),
        told=prefilled / sum(one.distinct for one in totals),
        lone=max(passed for passed, _ in waits),
        lone_seconds=max(waited for _, waited in waits),
        lone_share=max(waited for _, waited in waits) / seconds,
        jobs_per_second=len(bodies) / seconds,
        cpu_seconds=sum(one.cpu_seconds for one in totals),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=2500)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--orders", nargs="+", default=["shuffled", "sorted", "files", "unshared"])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--claims", type=int, nargs="+", metavar="JOBS")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    for jobs in arguments.claims or ():
        costs = measure_claims(jobs)
        print(json.dumps(costs._asdict()) if arguments.json else told_claims(costs), flush=True)
    if arguments.claims:
        return
    for order in arguments.orders:
        bodies = backlog(order, arguments.documents, arguments.questions)
        for workers in arguments.workers:
            figures = measure(order, bodies, workers, arguments.batch_size)
            line = (
                f"{order:9} {workers} worker(s), {figures.jobs:,} jobs: prefilled / distinct "
                f"{figures.prefilled_per_distinct:.3f} (told {figures.told:.3f}); a lone job "
                f"waited for {figures.lone} ({figures.lone_share:.1%} of the time)"
            )
            if arguments.plain:
                plain = measure(order, bodies, workers, arguments.batch_size, plain=True)
                line += f"; cpu {figures.cpu_seconds / plain.cpu_seconds:.3f}"
            print(json.dumps(figures._asdict()) if arguments.json else line, flush=True)


if __name__ == "__main__":
    main()
