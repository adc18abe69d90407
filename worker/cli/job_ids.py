"""Jobs as people name them: by an id, by its first characters, or `-` for standard input."""

import re
import sys
from collections.abc import Iterable
from contextlib import suppress

import click
from redis import Redis

from mlx_rq.jobs.client.job import Job, fetch
from mlx_rq.jobs.openai.errors import JobNotFound, RequestError
from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.job_ids import ids_that_begin

STDIN = "-"
LEAST = 4
"""Fewer characters of an id are a slip rather than a job."""

_BEGINNING = re.compile(r"[0-9a-f]{1,31}")
_LISTED = 10


def find_job(given: str, redis_url: str | None) -> Job:
    """Finds one job. Raises JobNotFound, and RequestError where more ids begin so."""
    ids = whole_ids([given], redis_url)
    if len(ids) > 1:
        raise click.UsageError(f"one job, please: standard input names {len(ids):,}")
    return fetch(ids[0], redis_url=redis_url)


def whole_ids(given: Iterable[str], redis_url: str | None) -> list[str]:
    """Gives the whole ids of jobs, in order and each once; what begins none, as it is.

    Raises RequestError where one is how the ids of several jobs begin, which it lists.
    """
    words = [word for one in given for word in (read_stdin().split() if one == STDIN else [one])]
    connection = connect(redis_url)
    with reachable(connection):
        return list(dict.fromkeys(_whole_id(connection, word, redis_url) for word in words))


def read_stdin() -> str:
    """Reads standard input; raises RequestError where it is empty, or no UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"Standard input is not UTF-8: {error}.", code="invalid_value") from None
    if not text.strip():
        raise RequestError("Standard input is empty.", code="invalid_value")
    return text


def _whole_id(connection: Redis, given: str, redis_url: str | None) -> str:
    if not _BEGINNING.fullmatch(given):
        return given
    if len(given) < LEAST:
        raise RequestError(
            f"{given!r} is too short for a job's id: give its first {LEAST} characters, or more.",
            code="invalid_value",
            param="job_id",
        )
    found = ids_that_begin(connection, given)
    if len(found) > 1:
        message = "\n".join(
            [f"{given!r} is how {len(found):,} ids begin:", *_lines(found, redis_url)]
        )
        raise RequestError(message, code="ambiguous_id", param="job_id")
    return found[0] if found else given


def _lines(found: list[str], redis_url: str | None) -> Iterable[str]:
    for job_id in found[:_LISTED]:
        with suppress(JobNotFound):  # it has gone meanwhile, or is another program's
            info = Job(job_id, resolve_url(redis_url)).info()
            yield f"  {job_id}  {info['status']}, {info['model']}"
    if len(found) > _LISTED:
        yield "  …"
