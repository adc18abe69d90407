"""How many jobs wait in a queue, and how many were lost out of it."""

from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq.jobs.queue import keys, reading


def waiting_in(connection: Redis, queue_names: Sequence[str]) -> list[int]:
    """Counts the jobs that wait in each of the queues, in one round trip.

    That is what RQ's list holds, less what claims left in its middle.
    """
    with connection.pipeline(transaction=False) as pipe:
        for name in queue_names:
            pipe.llen(f"{Queue.redis_queue_namespace_prefix}{name}")
            pipe.hget(keys.backlog_state(name), "stale")
        counts = [reading.count(reply) for reply in reading.ask_all(pipe)]
    return [
        max(0, entries - stale) for entries, stale in zip(counts[::2], counts[1::2], strict=True)
    ]


def some_waiting(connection: Redis, queue_names: Sequence[str], count: int) -> list[bytes]:
    """Gives the data of some jobs that wait in each of the queues, from all over its length."""
    with connection.pipeline(transaction=False) as pipe:
        for name, jobs in zip(queue_names, waiting_in(connection, queue_names), strict=True):
            for place in range(0, jobs, max(1, -(-jobs // count))):
                pipe.lindex(f"{Queue.redis_queue_namespace_prefix}{name}", place)
        found = reading.ask_all(pipe)
        job_ids = reading.texts([job_id for job_id in found if isinstance(job_id, bytes)])
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(RQJob.key_for(job_id), "data")
        return [data for data in reading.ask_all(pipe) if isinstance(data, bytes)]


class Lost(NamedTuple):
    """How many jobs of a queue were gone when their turn came; `at` is Unix time in seconds."""

    jobs: int
    at: int


def lost_from(connection: Redis, queue_names: Sequence[str]) -> list[Lost]:
    """Tells what was lost out of each of the queues since Redis has its data."""
    with connection.pipeline(transaction=False) as pipe:
        for name in queue_names:
            pipe.hget(keys.backlog_state(name), "lost")
            pipe.hget(keys.backlog_state(name), "lost_at")
        numbers = [reading.count(reply) for reply in reading.ask_all(pipe)]
    return [Lost(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def our_queues(connection: Redis) -> list[str]:
    """Names the queues of mlx-rq that there are."""
    prefix = Queue.redis_queue_namespace_prefix
    lists = reading.texts(reading.ask(connection.smembers, Queue.redis_queues_keys))
    names = sorted(name.removeprefix(prefix) for name in lists if name.startswith(prefix))
    return [name for name in names if keys.is_ours(name)]
