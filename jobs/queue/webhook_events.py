"""Events that webhooks tell of what is no job: how a batch of the command line ended.

Such an event lies in Redis with its URL, under a name of its own, until it has been delivered, as a
job's end is (`webhooks.py`), or for a week where no HTTP server delivers any.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from redis import Redis

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.webhooks import check_url

_KEPT_SECONDS = 7 * 24 * 3600
_SEPARATOR = "_"
"""Between the kind of an event's object and the rest of its name; ids of jobs have none."""


def tell(connection: Redis, url: str, kind: str, status: str, data: Mapping[str, Any]) -> None:
    """Has an HTTP server of the queue tell a URL what became of an object of this kind.

    Raises RequestError for a wrong URL.
    """
    check_url(url)
    name, now = f"{kind}{_SEPARATOR}{secrets.token_hex(16)}", redis_time(connection)
    event = {
        "id": f"evt_{name}",
        "object": "event",
        "type": f"{kind}.{status}",
        "created_at": int(now),
        "data": data,
    }
    with connection.pipeline() as pipe:
        pipe.set(
            keys.webhook_event(name), json.dumps({"url": url, "event": event}), ex=_KEPT_SECONDS
        )
        pipe.zadd(keys.WEBHOOKS, {name: now})
        pipe.zremrangebyrank(keys.WEBHOOKS, 0, -keys.WEBHOOKS_KEPT - 1)
        replies = reading.ask_all(pipe)
    if reading.WRONG_TYPE in replies:
        connection.delete(keys.WEBHOOKS)
        connection.zadd(keys.WEBHOOKS, {name: now})


def is_event(name: str) -> bool:
    """Tells whether a delivery is of an event of its own, and not of a job."""
    return _SEPARATOR in name


def read_event(connection: Redis, name: str) -> tuple[str, dict[str, Any]]:
    """Gives the URL and the event of a delivery; raises RequestError where there is none."""
    told = reading.json_object(reading.ask(connection.get, keys.webhook_event(name)))
    if isinstance(told, reading.Unreadable):
        raise RequestError(f"its event cannot be read: {told.why}", code=None, param="webhook")
    url, event = told.get("url"), told.get("event")
    check_url(url if isinstance(url, str) else "")
    if not isinstance(event, dict):
        raise RequestError("its event cannot be read: no JSON object", code=None, param="webhook")
    return str(url), {**event, "id": f"evt_{name}"}
