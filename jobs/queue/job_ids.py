"""Finds the jobs whose ids begin with some characters, as git finds commits."""

import re
from itertools import islice

from redis import Redis
from redis.exceptions import NoPermissionError
from rq.job import Job as RQJob

from mlx_rq.jobs.openai.errors import RequestError

_WHOLE = re.compile(r"[0-9a-f]{32}")
_READ_AT_ONCE = 5000


def ids_that_begin(connection: Redis, beginning: str, most: int | None = None) -> list[str]:
    """Finds the ids that begin so, at most so many, in order.

    Raises RequestError where the user of Redis may not search.
    """
    start = RQJob.key_for("")
    names = connection.scan_iter(f"{start}{beginning}*", count=_READ_AT_ONCE)
    ids = (name.decode(errors="replace").removeprefix(start) for name in names)
    try:  # SCAN may give a name twice
        return sorted(set(islice((job_id for job_id in ids if _WHOLE.fullmatch(job_id)), most)))
    except NoPermissionError:
        raise RequestError(
            f"{beginning!r} is no whole id, and this user of Redis may not search (SCAN): "
            "give all 32 characters.",
            code="invalid_value",
            param="job_id",
        ) from None
