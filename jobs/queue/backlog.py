"""How many jobs wait in a queue: what RQ's list holds, less what claims left in its middle."""

from collections.abc import Sequence

from redis import Redis
from rq import Queue

from mlx_rq.jobs.queue import keys, reading


def waiting_in(connection: Redis, queue_names: Sequence[str]) -> list[int]:
    """Counts the jobs that wait in each of the queues, in one round trip."""
    with connection.pipeline(transaction=False) as pipe:
        for name in queue_names:
            pipe.llen(f"{Queue.redis_queue_namespace_prefix}{name}")
            pipe.hget(keys.backlog_state(name), "stale")
        counts = [reading.count(reply) for reply in reading.ask_all(pipe)]
    return [
        max(0, entries - stale) for entries, stale in zip(counts[::2], counts[1::2], strict=True)
    ]


def our_queues(connection: Redis) -> list[str]:
    """Names the queues of mlx-rq that there are."""
    prefix = Queue.redis_queue_namespace_prefix
    lists = reading.texts(reading.ask(connection.smembers, Queue.redis_queues_keys))
    names = sorted(name.removeprefix(prefix) for name in lists if name.startswith(prefix))
    return [name for name in names if keys.is_ours(name)]
