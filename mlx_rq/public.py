"""The names that a producer needs, where they come from."""

from importlib.metadata import version

from mlx_rq.jobs.batch.map import map as map
from mlx_rq.jobs.client.cancel import cancel_many
from mlx_rq.jobs.client.job import Job, as_completed, fetch
from mlx_rq.jobs.client.submit import submit, submit_many
from mlx_rq.jobs.openai.errors import (
    IdempotencyConflict,
    JobFailed,
    JobNotFound,
    NotParsed,
    QueueFull,
    RedisUnavailable,
    RequestError,
    ResultTimeout,
)

__version__ = version("mlx-rq")

# Without `map`: a star import must not replace Python's own.
__all__ = [
    "IdempotencyConflict",
    "Job",
    "JobFailed",
    "JobNotFound",
    "NotParsed",
    "QueueFull",
    "RedisUnavailable",
    "RequestError",
    "ResultTimeout",
    "as_completed",
    "cancel_many",
    "fetch",
    "submit",
    "submit_many",
]
