"""Keeps the history of the queue (`jobs/queue/history.py`) while an HTTP server runs."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import connect
from mlx_rq.jobs.queue.history import SLOT_SECONDS, Sample, write_sample
from mlx_rq.jobs.queue.overview import overview

logger = logging.getLogger("mlx_rq.api_stub")

_RATES = ("prompt_tokens", "prefilled_tokens", "decoded_tokens")
_MEMORY = ("active", "cache", "ceiling")


class Sampler:
    """Looks at the queue now and then; a rate is what the workers did between two looks."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._last: tuple[float, Mapping[str, Mapping[str, int]]] | None = None

    async def run(self) -> None:
        """Writes a sample in each time slot, until it is cancelled."""
        while True:
            try:
                await run_in_threadpool(self.look)
            except Exception as error:  # Redis is away, say: there is a gap then, and no more
                logger.debug("no sample: %s", error)
            await asyncio.sleep(SLOT_SECONDS)

    def look(self) -> None:
        """Takes a look, and keeps what is new since the last one."""
        connection = connect(self._redis_url)
        if (sample := self._sample(redis_time(connection), overview(connection))) is not None:
            write_sample(connection, sample)

    def _sample(self, now: float, seen: Mapping[str, Any]) -> Sample | None:
        """Makes a sample; None at the first look, which has nothing to go by."""
        workers = seen["workers"]
        totals = {worker["name"]: _totals(worker) for worker in workers}
        last, self._last = self._last, (now, totals)
        if last is None or now <= last[0]:
            return None
        seconds, did = now - last[0], _difference(last[1], totals)
        rates = {name: round(count / seconds, 3) for name, count in did.items()}
        counts = {
            name: sum(queue[name] for queue in seen["queues"]) for name in ("queued", "in_progress")
        }
        memory = {f"memory_{name}": _held(workers, name) for name in _MEMORY}
        return Sample.model_validate({"workers": len(workers), **counts, **rates, **memory})


def _totals(worker: Mapping[str, Any]) -> dict[str, int]:
    return {"jobs_ended": worker["ended"], **{name: worker["totals"][name] for name in _RATES}}


def _difference(
    before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]
) -> dict[str, int]:
    """Sums up what workers did between two looks; one that began again did all that it says.

    What a worker that is new here did before is nobody's knowledge: it counts from now on.
    """
    did = dict.fromkeys(("jobs_ended", *_RATES), 0)
    for worker, totals in now.items():
        for name, count in totals.items():
            earlier = before.get(worker, totals)[name]
            did[name] += count - earlier if count >= earlier else count
    return did


def _held(workers: list[Mapping[str, Any]], name: str) -> int:
    return sum(worker["memory"][name] or 0 for worker in workers)
