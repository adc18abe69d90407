"""What a producer may say about a job beside its body."""

from dataclasses import dataclass
from typing import Any

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.priority import PRIORITIES, Priority
from mlx_rq.jobs.queue.webhooks import check_url

DEFAULT_PRIORITY: Priority = "default"
BATCH_PRIORITY: Priority = "low"
"""Of the jobs of a batch: what comes in singly has somebody who waits for it."""

DEFAULT_RESULT_TTL = 7 * 24 * 3600
"""Seconds that a result is kept."""

STORED_TTL = 30 * 24 * 3600
"""Seconds that a result is kept which the producer asked to store, as OpenAI does."""

MAX_SECONDS = 2**31 - 1
"""The longest time to live and timeout: Redis and RQ count them in 32 bits."""

DEFAULT_MAX_ATTEMPTS = 3

RECOVERY_RETRIES = 3
"""Retries that RQ is given beyond our own limit.

RQ's clean-up counts a retry for each expired lease and, when none is left, ends the job without
writing our result key. With a few to spare the worker always sees the exhausted job first and ends
it as a dead letter with an error object.
"""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of one submission; raises RequestError for a value out of its range.

    `result_ttl` in seconds, counted from the end of the job; `timeout` in seconds, counted in
    each attempt from when the job is generated; `max_attempts` counts the attempts that died with
    their worker. With `stream`, the worker publishes the text while it generates it (`stream.py`).
    A `webhook` is a URL that an HTTP server of this queue calls once the job has ended.
    """

    priority: Priority = DEFAULT_PRIORITY
    result_ttl: int = DEFAULT_RESULT_TTL
    timeout: float | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    stream: bool = False
    webhook: str | None = None

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise _invalid("priority", self.priority, f"one of {', '.join(PRIORITIES)}")
        if not _is_integer(self.result_ttl) or not 1 <= self.result_ttl <= MAX_SECONDS:
            raise _invalid("result_ttl", self.result_ttl, "whole seconds, at least 1")
        if self.timeout is not None and (
            not isinstance(self.timeout, int | float)
            or isinstance(self.timeout, bool)
            or not 0 < self.timeout <= MAX_SECONDS
        ):
            raise _invalid("timeout", self.timeout, "seconds above 0, or None for no limit")
        if not _is_integer(self.max_attempts) or not 1 <= self.max_attempts <= 100:
            raise _invalid("max_attempts", self.max_attempts, "a whole number from 1 to 100")
        if self.webhook is not None:
            if not isinstance(self.webhook, str):
                raise _invalid("webhook", self.webhook, "a URL")
            check_url(self.webhook)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(
        f"Invalid '{name}': expected {expected}, but got {value!r} instead.",
        code="invalid_value",
        param=name,
    )
