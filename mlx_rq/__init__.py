"""Asynchronous language-model jobs on Apple silicon: the names that a producer needs.

The rooms behind this door: `mlx_rq.jobs` (what a job is and how it travels), `mlx_rq.engine`
(tokens in, tokens out), `mlx_rq.worker` (the life of a job on this machine) and
`mlx_rq.api_stub` (a thin HTTP door). Importing this package never imports MLX.
"""

from importlib.metadata import version
from pathlib import Path

# Python started in a checkout finds this folder before the installed package; the rooms lie beside.
_beside = Path(__file__).parent.parent
if (_beside / "pyproject.toml").exists():
    __path__.append(str(_beside))

from mlx_rq.jobs.errors import (  # noqa: E402
    IdempotencyConflict,
    JobFailed,
    JobNotFound,
    NotParsed,
    QueueFull,
    RedisUnavailable,
    RequestError,
    ResultTimeout,
)
from mlx_rq.jobs.handle import Job, as_completed, fetch  # noqa: E402
from mlx_rq.jobs.mapping import map as map  # noqa: E402
from mlx_rq.jobs.submit import submit, submit_many  # noqa: E402

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
    "fetch",
    "submit",
    "submit_many",
]
