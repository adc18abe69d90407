"""How many jobs wait in a queue, as the scripts of the backlog keep it (`backlog.lua`)."""

from collections.abc import Sequence

from redis import Redis
from rq import Queue

from mlx_rq.jobs.queue import keys

EXACT_LIST = 1024
"""Entries up to which RQ's list holds just what waits; of a longer one, claims leave out of its
middle what they take, until the round ends."""


def waiting_in(connection: Redis, queue_names: Sequence[str]) -> list[int]:
    """Counts the jobs that wait in each of the queues, in one round trip."""
    with connection.pipeline(transaction=False) as pipe:
        for name in queue_names:
            pipe.llen(f"{Queue.redis_queue_namespace_prefix}{name}")
            pipe.zcard(keys.backlog(name))
            pipe.zcard(keys.next_backlog(name))
        # A key that somebody made another type holds no job.
        counts = [
            reply if isinstance(reply, int) else 0 for reply in pipe.execute(raise_on_error=False)
        ]
    return [_waiting(*counts[place : place + 3]) for place in range(0, 3 * len(queue_names), 3)]


def _waiting(entries: int, this_round: int, next_round: int) -> int:
    return entries if entries <= EXACT_LIST else (this_round + next_round) or entries
