"""Writes the ends of jobs: each in one transaction of its own, many in one round trip."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from mlx_rq.engine.protocol import Outcome
from mlx_rq.jobs.ending import Ending, end_job
from mlx_rq.jobs.errors import error_in
from mlx_rq.worker.claim import ClaimedJob

logger = logging.getLogger("mlx_rq.worker")

Finished = tuple[ClaimedJob, Outcome]


def commit(connection: Redis, finished: Sequence[Finished]) -> tuple[list[Finished], int]:
    """Ends jobs with their outcomes, as far as their leases are still held.

    Returns those that Redis refused (out of memory, read-only), which have to be sent again, and
    how many were ended by this call; the rest are discarded. Raises RedisError where Redis is away.
    """
    with connection.pipeline(transaction=False) as pipe:
        for job, outcome in finished:
            end_job(
                pipe,
                connection,
                job_id=job.id,
                queue_name=job.queue_name,
                ending=_ending(outcome.result),
                outcome=outcome.result,
                result_ttl=job.result_ttl,
                lease=job.lease,
            )
        replies = pipe.execute(raise_on_error=False)
    refused: list[Finished] = []
    ended = 0
    for (job, outcome), reply in zip(finished, replies, strict=True):
        if isinstance(reply, ResponseError):
            logger.error("job %s: Redis did not take the answer: %s", job.id, reply)
            refused.append((job, outcome))
        elif isinstance(reply, RedisError):
            raise reply
        elif reply[0] == b"ended":
            ended += 1
        else:
            logger.info("job %s: answer discarded (%s)", job.id, reply[0].decode())
    return refused, ended


def _ending(result: Mapping[str, Any]) -> Ending:
    error = error_in(result)
    if error is None:
        return "finished"
    return "canceled" if error["type"] == "cancelled" else "failed"
