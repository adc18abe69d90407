"""Which live workers serve a model: read from what each worker says of itself."""

import json
from typing import Any

from redis import Redis
from rq.utils import as_text
from rq.worker import BaseWorker

from mlx_rq.jobs.queue import keys


def live_workers(connection: Redis) -> list[dict[str, Any]]:
    """Lists the live workers: each with its name, birth, and what it last said of itself.

    A worker that died is gone when its record's time to live is over.
    """
    prefix = BaseWorker.redis_worker_namespace_prefix
    names = sorted(
        as_text(key).removeprefix(prefix)
        for key in connection.smembers(BaseWorker.redis_workers_keys)
    )
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.get(keys.worker(name))
            pipe.hget(f"{prefix}{name}", "birth")
        found = pipe.execute()
    return [
        {"name": name, "born": as_text(born or b""), **said}
        for name, record, born in zip(names, found[::2], found[1::2], strict=True)
        if (said := _read(record)) is not None
    ]


def _read(record: bytes | None) -> dict[str, Any] | None:
    """Reads what a worker said of itself; None where it is gone, or said nothing that we know."""
    try:
        said = json.loads(record or b"")
    except ValueError:
        return None
    return said if isinstance(said, dict) and isinstance(said.get("serves"), list) else None


def workers_for(connection: Redis, model: str) -> list[dict[str, Any]]:
    """Lists the live workers that serve a model, as `live_workers` does."""
    return [worker for worker in live_workers(connection) if model in worker["serves"]]
