"""Writes the ends of jobs: each in one transaction of its own, many in one round trip."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from mlx_rq.engine.interface import Outcome
from mlx_rq.jobs.openai.answers import usage_of
from mlx_rq.jobs.queue.finish import finish_job
from mlx_rq.jobs.queue.results import ending_of
from mlx_rq.jobs.queue.trace import Measured
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.tasks import no_answer

logger = logging.getLogger("mlx_rq.worker")

_ID_LENGTH = 12
"""So much of a job's id is told in the trace of another one."""

Finished = tuple[ClaimedJob, Outcome]


class Committed(NamedTuple):
    """What became of answers: how many ended their jobs, and which did not.

    `refused` have to be sent again, `discarded` came too late, and Redis knows no job for
    `unknown`, nor for `evicted`, which nobody has deleted.
    """

    ended: int
    refused: list[Finished]
    discarded: list[Finished]
    unknown: list[Finished]
    evicted: list[Finished]


def commit(connection: Redis, finished: Sequence[Finished]) -> Committed:
    """Ends jobs with their outcomes, unless somebody else has them by now.

    `refused` are those that Redis would not write (out of memory, read-only). Raises RedisError
    where Redis is away.
    """
    with connection.pipeline(transaction=False) as pipe:
        for job, outcome in finished:
            try:
                _end(pipe, connection, job, outcome.result, measured(job, outcome))
            except (TypeError, ValueError, AttributeError, RecursionError) as error:
                logger.error("job %s: its answer cannot be written: %s", job.id, error)
                _end(pipe, connection, job, no_answer(job.id).result)
        replies = pipe.execute(raise_on_error=False)
    committed = Committed(0, [], [], [], [])
    for (job, outcome), reply in zip(finished, replies, strict=True):
        if isinstance(reply, ResponseError):
            logger.error("job %s: Redis did not take the answer: %s", job.id, reply)
            committed.refused.append((job, outcome))
        elif isinstance(reply, RedisError):
            raise reply
        elif reply[0] == b"ended":
            committed = committed._replace(ended=committed.ended + 1)
        elif reply[0] == b"missing":
            committed.unknown.append((job, outcome))
        elif reply[0] == b"evicted":
            committed.evicted.append((job, outcome))
        else:
            logger.info("job %s: answer discarded (%s)", job.id, reply[0].decode())
            committed.discarded.append((job, outcome))
    return committed


def measured(job: ClaimedJob, outcome: Outcome) -> str | None:
    """Writes what is to be remembered of a job's way; None where the engine did not say it."""
    if (steps := outcome.steps) is None:
        return None
    ended = time.monotonic() - job.claimed_at
    rendered, admitted, first_token = (
        None if before is None else max(0.0, ended - before)
        for before in (steps.rendered, steps.admitted, steps.first_token)
    )
    usage = usage_of(outcome.result)
    return Measured(
        claimed_at=job.lease.started_at.timestamp(),
        rendered=rendered,
        admitted=admitted,
        first_token=first_token,
        ended=ended,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        generated_tokens=usage.completion,
        attempt=job.attempt,
        preempted=steps.preempted,
        failed=steps.failed,
        first_with=steps.first_with[:_ID_LENGTH],
    ).encode()


def _end(
    pipe: Pipeline,
    connection: Redis,
    job: ClaimedJob,
    result: Mapping[str, Any],
    trace: str | None = None,
) -> None:
    finish_job(
        pipe,
        connection,
        job_id=job.id,
        queue_name=job.queue_name,
        ending=ending_of(result),
        outcome=result,
        result_ttl=job.result_ttl,
        lease=job.lease,
        trace=trace,
    )
