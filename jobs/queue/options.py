"""What a producer may say about a job beside its body.

An option is declared here, once: in `JobOptions` and, by its type, in `JobOptionFields`. The
command line and `/v1/jobs` make theirs of it; `submit` repeats it in its signature. What it does is
up to `enqueue.py` and the worker.
"""

from dataclasses import dataclass, field
from typing import Any, TypedDict

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.priority import PRIORITIES, Priority
from mlx_rq.jobs.queue.owners import is_name
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
MOST_ATTEMPTS = 100

RECOVERY_RETRIES = 3
"""Retries that RQ is given beyond our own limit.

RQ's clean-up counts a retry for each expired lease and, when none is left, ends the job without
writing our result key. With a few to spare the worker always sees the exhausted job first and ends
it as a dead letter with an error object.
"""


def _offered(
    *, http: dict[str, Any] | None = None, command: str | None = None, seconds: bool = False
) -> dict[str, dict[str, Any] | str | bool | None]:
    """Says where else an option is offered.

    `http`: the limits of the parameter of `/v1/jobs`; `command`: the help of the command line's
    option. None: it has none of that name. `seconds`: it is a length of time.
    """
    return {"http": http, "command": command, "seconds": seconds}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of one submission; raises RequestError for a value out of its range."""

    priority: Priority = field(
        default=DEFAULT_PRIORITY, metadata=_offered(http={}, command="Which jobs are taken first.")
    )
    """One of high, default and low: a worker takes jobs of a higher priority first. What a body
    itself says, in its `background_options`, goes before it."""

    result_ttl: int = field(
        default=DEFAULT_RESULT_TTL,
        metadata=_offered(
            http={"ge": 1, "lt": MAX_SECONDS + 1},
            command="How long a result is kept: seconds, or as in 12h, 7d.",
            seconds=True,
        ),
    )
    """Whole seconds, 1 to 2**31 - 1, by default 7 days: how long the result, and all that is known
    of the job, is kept from the end of the job."""

    timeout: float | None = field(
        default=None,
        metadata=_offered(
            http={"gt": 0, "lt": MAX_SECONDS + 1},
            command="How long an attempt may take, once it has begun: seconds, or as in 10m.",
            seconds=True,
        ),
    )
    """Seconds, above 0 and up to 2**31 - 1: how long each attempt may take, counted from when the
    job is generated. None: no limit."""

    max_attempts: int = field(
        default=DEFAULT_MAX_ATTEMPTS,
        metadata=_offered(
            http={"ge": 1, "le": MOST_ATTEMPTS},
            command="How often a job is begun whose worker dies with it.",
        ),
    )
    """1 to 100, by default 3: how often the job is begun. Only attempts count that died with their
    worker."""

    stream: bool = field(default=False, metadata=_offered())
    """Whether the worker publishes the text while it generates it (`stream.py`)."""

    webhook: str | None = field(
        default=None, metadata=_offered(http={"examples": ["https://example.org/hook"]})
    )
    """A URL, http or https, that an HTTP server of this queue calls once the job has ended. None:
    none is called."""

    owner: str | None = field(default=None, metadata=_offered())
    """The client of an HTTP server with keys to whom the job belongs (`owners.py`): it sees the job
    there, and no other client does. None: only an operator sees it there."""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise invalid_option("priority", self.priority, f"one of {', '.join(PRIORITIES)}")
        if not _is_integer(self.result_ttl) or not 1 <= self.result_ttl <= MAX_SECONDS:
            expected = f"whole seconds, at least 1, at most {MAX_SECONDS}"
            raise invalid_option("result_ttl", self.result_ttl, expected)
        if self.timeout is not None and (
            not isinstance(self.timeout, int | float)
            or isinstance(self.timeout, bool)
            or not 0 < self.timeout <= MAX_SECONDS
        ):
            expected = f"seconds above 0, at most {MAX_SECONDS}, or None for no limit"
            raise invalid_option("timeout", self.timeout, expected)
        if not _is_integer(self.max_attempts) or not 1 <= self.max_attempts <= MOST_ATTEMPTS:
            raise invalid_option("max_attempts", self.max_attempts, "a whole number from 1 to 100")
        if not isinstance(self.stream, bool):
            raise invalid_option("stream", self.stream, "True or False")
        if self.webhook is not None:
            if not isinstance(self.webhook, str):
                raise invalid_option("webhook", self.webhook, "a URL")
            check_url(self.webhook)
        if self.owner is not None and not (isinstance(self.owner, str) and is_name(self.owner)):
            raise invalid_option(
                "owner", self.owner, "the name of a client: letters, digits, . _ -"
            )


class JobOptionFields(TypedDict, total=False):
    """The same as keyword arguments, for `**options: Unpack[JobOptionFields]`."""

    priority: Priority
    result_ttl: int
    timeout: float | None
    max_attempts: int
    stream: bool
    webhook: str | None
    owner: str | None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def invalid_option(name: str, value: Any, expected: str) -> RequestError:
    """The error for a value that an option cannot have."""
    return RequestError(
        f"Invalid '{name}': expected {expected}, but got {value!r} instead.",
        code="invalid_value",
        param=name,
    )
