"""What the queues and the workers look like right now, for `mlx-rq status` and the HTTP server."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from redis import Redis
from rq import Queue

from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys, limits
from mlx_rq.jobs.queue.backlog import lost_from, waiting_in
from mlx_rq.jobs.queue.eviction import eviction_warning
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.workers import live_workers


def overview(connection: Redis) -> dict[str, Any]:
    """Counts the jobs of every queue of mlx-rq and lists the live workers.

    `limits` tell what new jobs are refused beyond, and how much of it is used. `notes` name the
    models that jobs wait for and no live worker serves, say why workers take no jobs, and tell how
    jobs were lost or may be.
    """
    workers = live_workers(connection)
    served = {model for worker in workers for model in worker["serves"]}
    queues = []
    for queue in Queue.all(connection=connection, serializer=SERIALIZER):
        try:
            model, priority = keys.model_and_priority(queue.name)
        except ValueError:
            continue  # somebody else's queue in the same Redis
        # Counted without RQ's clean-up, which would run the callbacks that jobs name.
        queues.append(
            {
                "model": model,
                "priority": priority,
                "queued": waiting_in(connection, [queue.name])[0],
                "in_progress": queue.started_job_registry.get_job_count(cleanup=False),
                "completed": queue.finished_job_registry.get_job_count(cleanup=False),
                "failed": queue.failed_job_registry.get_job_count(cleanup=False),
                "cancelled": queue.canceled_job_registry.get_job_count(cleanup=False),
            }
        )
    queues.sort(key=lambda queue: (queue["model"], PRIORITIES.index(queue["priority"])))
    waiting_for = {queue["model"] for queue in queues if queue["queued"]} - served
    notes = [
        f"jobs wait for {model!r}, which no live worker serves" for model in sorted(waiting_for)
    ]
    notes += [
        f"worker {worker['name'][:8]} takes no jobs: {worker['paused']}"
        for worker in workers
        if worker.get("paused")
    ]
    notes += _losses(connection, queues)
    return {
        "queues": queues,
        "workers": workers,
        "limits": limits.limits_in_use(connection),
        "notes": notes,
    }


def _losses(connection: Redis, queues: list[dict[str, Any]]) -> Iterator[str]:
    if (warning := eviction_warning(connection)) is not None:
        yield warning
    names = [keys.queue_name(queue["model"], queue["priority"]) for queue in queues]
    for queue, lost in zip(queues, lost_from(connection, names), strict=True):
        if lost.jobs:
            seen = datetime.fromtimestamp(lost.at, UTC).isoformat(sep=" ")
            yield (
                f"{lost.jobs:,} jobs for {queue['model']!r} ({queue['priority']}) were gone from "
                f"Redis when their turn came, the last one at {seen}: it has evicted them, or "
                "somebody has deleted them"
            )
