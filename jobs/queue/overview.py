"""What the queues and the workers look like right now, for `mlx-rq status` and the HTTP server."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from redis import Redis

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.backlog import lost_from, our_queues, waiting_in
from mlx_rq.jobs.queue.eviction import eviction_warning
from mlx_rq.jobs.queue.finish import key_names
from mlx_rq.jobs.queue.limits import Limits, in_use, limits_in_use
from mlx_rq.jobs.queue.workers import live_workers

_REGISTRIES = {
    "in_progress": "started",
    "completed": "finished",
    "failed": "failed",
    "cancelled": "canceled",
}
"""Our words for states, and which registry of RQ's holds the jobs."""


def overview(connection: Redis) -> dict[str, Any]:
    """Counts the jobs of every queue of mlx-rq and lists the live workers.

    `limits` tell what new jobs are refused beyond, and how much of it is used. `notes` name the
    models that jobs wait for and no live worker serves, why workers take no jobs, limits that
    cannot be read, and how jobs were lost or may be.
    """
    workers = live_workers(connection)
    served = {model for worker in workers for model in worker["serves"]}
    queues = _count(connection, our_queues(connection))
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
    notes += [
        f"worker {worker['name'][:8]} loads {worker['next']['model']!r} next: "
        f"{worker['next']['why']}"
        for worker in workers
        if worker["next"]
    ]
    notes += [
        f"worker {worker['name'][:8]} could not load {model['id']!r}: {model['why']}"
        for worker in workers
        for model in worker["models"]
        if model["state"] == "failed"
    ]
    try:
        used = limits_in_use(connection)
    except RequestError as error:
        used = in_use(connection, Limits())
        notes.append(str(error))
    notes += _losses(connection, queues)
    return {"queues": queues, "workers": workers, "limits": used, "notes": notes}


def _losses(connection: Redis, queues: list[dict[str, Any]]) -> Iterator[str]:
    if (warning := eviction_warning(connection)) is not None:
        yield warning
    names = [keys.queue_name(queue["model"], queue["priority"]) for queue in queues]
    for queue, lost in zip(queues, lost_from(connection, names), strict=True):
        if lost.jobs:
            seen = datetime.fromtimestamp(min(lost.at, reading.MAX_UNIX_TIME), UTC).isoformat(
                sep=" "
            )
            which = f"for {queue['model']!r} ({queue['priority']})"
            gone = counted(
                lost.jobs,
                f"job {which} was gone from Redis when its turn came",
                f"jobs {which} were gone from Redis when their turn came, the last one",
            )
            them = "it" if lost.jobs == 1 else "them"
            yield f"{gone} at {seen}: it has evicted {them}, or somebody has deleted {them}"


def _count(connection: Redis, names: Sequence[str]) -> list[dict[str, Any]]:
    # Without RQ's own count, whose clean-up would run the callbacks that jobs name.
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            for registry in _REGISTRIES.values():
                pipe.zcard(key_names(name)[registry])
        counts = iter([reading.count(reply) for reply in reading.ask_all(pipe)])
    queues = []
    for name, queued in zip(names, waiting_in(connection, names), strict=True):
        model, priority = keys.model_and_priority(name)
        queue: dict[str, Any] = {"model": model, "priority": priority, "queued": queued}
        queues.append(queue | {state: next(counts) for state in _REGISTRIES})
    return queues
