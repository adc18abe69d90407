"""What a worker sees in Redis before it chooses: what waits, and what others have loaded."""

from collections.abc import Iterable
from typing import get_args

from redis import Redis

from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.jobs.queue.workers import ModelState, live_workers
from mlx_rq.worker.models.choice import Backlog
from mlx_rq.worker.models.switch import ServedModel

_FURTHEST: tuple[ModelState, ...] = get_args(ModelState)
"""Those first that answer soonest."""


def backlogs_of(connection: Redis, models: Iterable[ServedModel]) -> dict[str, Backlog]:
    """Counts what waits for each of the models, by its id, in one round trip."""
    queues = [
        (model.id, rank, keys.queue_name(name, priority))
        for model in models
        for rank, priority in enumerate(PRIORITIES)
        for name in model.names
    ]
    ranks: dict[str, list[int]] = {}
    waiting = waiting_in(connection, [queue for _, _, queue in queues])
    for (model_id, rank, _), jobs in zip(queues, waiting, strict=True):
        ranks.setdefault(model_id, [0] * len(PRIORITIES))[rank] += jobs
    return {model_id: Backlog(tuple(of)) for model_id, of in ranks.items()}


def states_elsewhere(
    connection: Redis, models: Iterable[ServedModel], worker: str
) -> dict[str, ModelState]:
    """Tells how far other workers that take jobs are with each of the models: the furthest of them.

    A model that none of them serves is left out.
    """
    best: dict[str, ModelState] = {}
    for other in live_workers(connection):
        if other["name"] == worker or other["paused"]:
            continue
        for model in other["models"]:
            for name in model["names"]:
                best[name] = min(model["state"], best.get(name, "failed"), key=_FURTHEST.index)
    return {
        model.id: min((best[name] for name in model.names if name in best), key=_FURTHEST.index)
        for model in models
        if not best.keys().isdisjoint(model.names)
    }
