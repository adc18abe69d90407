"""Asynchronous language-model jobs on Apple silicon: the names that a producer needs.

The rooms behind these names: `mlx_rq.jobs` (what a job is and how it travels), `mlx_rq.engine`
(tokens in, tokens out), `mlx_rq.worker` (the life of a job on this machine) and
`mlx_rq.api_stub` (a thin HTTP server). Importing this package never imports MLX.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (Apple's own python3 is 3.9, and a checkout is no wheel)
    raise ImportError(
        "mlx-rq needs Python 3.11 or newer, on a Mac a native (arm64) one; "
        f"this is Python {sys.version_info[0]}.{sys.version_info[1]}."
    )

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
