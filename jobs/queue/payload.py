"""How a job's body lies in RQ: JSON data under a name that nothing ever calls."""

import json
import zlib
from typing import Any, NamedTuple

from rq.exceptions import NoSuchJobError
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.sizes import max_body_bytes
from mlx_rq.jobs.openai.validation import encode_body
from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.reading import Unreadable

SERIALIZER = JSONSerializer

FUNCTION = "mlx_rq.jobs.queue.payload.only_an_mlx_rq_worker_can_run_this"
FORMER_FUNCTION = "mlx_rq.jobs.payload.only_an_mlx_rq_worker_can_run_this"
"""What jobs call that waited in a queue while mlx-rq was upgraded from 0.1.0."""

_MOST_ESCAPED = 4
"""So many times the bytes of its body may a payload unpack to.

RQ, and whatever else writes JSON, may escape what is not ASCII, at worst two bytes as six.
"""


def only_an_mlx_rq_worker_can_run_this(**_: Any) -> None:
    """Fails: a stock RQ worker was started on a queue of mlx-rq."""
    raise RuntimeError("start `mlx-rq worker` on this queue; a stock RQ worker cannot run this job")


class InertJob(RQJob):
    """An RQ job of which nothing is ever called.

    RQ runs the callbacks and webhooks that a job's record names when it recovers or deletes the
    job; whoever can write to Redis could have a worker, or a producer, run those.
    """

    def restore(self, raw_data: Any) -> Any:
        """Reads a job's record; one that cannot be read is no job, so that its neighbours live."""
        try:
            return super().restore(raw_data)
        except (ValueError, TypeError, KeyError) as error:
            raise NoSuchJobError(f"job {self.id} has a malformed record: {error}") from error

    @property
    def failure_callback(self) -> None:
        return None

    def send_webhooks(self, status: str, *, exc_string: str | None = None) -> None:
        """Sends nothing."""


def read_meta(reply: Any) -> dict[str, Any]:
    """Reads what the producer said beside the body; nothing where it cannot be read."""
    meta = reading.json_object(reply)
    return {} if isinstance(meta, Unreadable) else meta


def write_payload(kind: str, encoded: bytes) -> bytes:
    """Writes the data of an RQ job as RQ's own serializer would, around a body that is JSON."""
    start = f'["{FUNCTION}", null, [], {{"kind": "{kind}", "body": '.encode()
    return zlib.compress(b"%s%s}]" % (start, encoded))


class Payload(NamedTuple):
    """What a producer sent."""

    kind: str
    body: dict[str, Any]


def read_payload(data: bytes | None) -> Payload:
    """Reads the data of an RQ job as JSON, executing nothing.

    Raises RequestError where it is not a job of ours (pickled, cut off, another function's), or its
    body is too big.
    """
    try:
        if data is None:
            raise ValueError("it has no data")
        inflate = zlib.decompressobj()
        text = inflate.decompress(data, _MOST_ESCAPED * max_body_bytes())
        if inflate.unconsumed_tail:
            raise ValueError("it is too large")
        if not inflate.eof:
            raise ValueError("it is cut off")
        function, _, _, arguments = json.loads(text)
        if function not in (FUNCTION, FORMER_FUNCTION):
            raise ValueError(f"it calls {str(function)[:80]!r}")
        kind, body = arguments["kind"], arguments["body"]
        if not isinstance(kind, str) or not isinstance(body, dict):
            raise ValueError("its kind is not a string or its body not an object")
    except (ValueError, TypeError, KeyError, zlib.error, RecursionError) as error:
        raise RequestError(
            f"The payload is not a job of mlx-rq: {error}. "
            "Submit jobs with mlx_rq.submit() or the command line.",
            code="invalid_payload",
        ) from None
    if len(text) > max_body_bytes():  # which may be the escapes
        encode_body(body)
    return Payload(kind, body)
