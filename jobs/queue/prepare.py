"""The one way in for bodies: validated once and encoded once, then ready for the queue.

`submit`, the lines of batches and the server all make a `Prepared`, and nothing else is enqueued.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.plain import plain
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.requests import asked_model
from mlx_rq.jobs.openai.sizes import max_body_bytes
from mlx_rq.jobs.openai.validation import encode_body, kind_of, validate
from mlx_rq.jobs.queue.affinity import affinity_of
from mlx_rq.jobs.queue.prefix_path import path_of


class Prepared(NamedTuple):
    """A body that was found good, and all that the queue has to know of it."""

    kind: str
    model: str
    encoded: bytes
    """The body as JSON."""
    affinity: str
    path: str
    """Where it stands in the prefix tree of the backlog."""
    priority: Priority | None
    """What the body itself says of it; that goes before the option."""
    goes_back: bool
    """Whether it speaks of earlier answers, until these are in the body."""

    @classmethod
    def of(cls, request: JobRequest, body: Mapping[str, Any], encoded: bytes) -> "Prepared":
        """Makes it of a body that was validated, which gave the `request`, and encoded."""
        return cls(
            kind=request.kind,
            model=asked_model(request.model, request.adapters),
            encoded=encoded,
            affinity=affinity_of(body),
            path=path_of(body),
            priority=request.priority,
            goes_back=request.goes_back,
        )


def prepare(
    body: Mapping[str, Any],
    answer_format: Mapping[str, Any] | None = None,
    *,
    request: JobRequest | None = None,
) -> Prepared:
    """Validates and encodes a body; its kind is told by the field that only that kind has.

    An `answer_format`, as `response_format` makes it, goes into the body. A `request` is what the
    whole body was found to be by whoever has validated it. Raises RequestError where it is wrong.
    """
    if not isinstance(body, Mapping):
        raise RequestError(
            f"Invalid body: expected an object, but got a {type(body).__name__} instead.",
            code="invalid_type",
        )
    if request is None:
        body = plain(dict(body))
        kind = kind_of(body)
        if answer_format is not None:
            body = KINDS[kind].with_schema(body, answer_format)
        request = validate(kind, body)
    return Prepared.of(request, body, encode_body(body))


def check_encoded(encoded: bytes, body: Mapping[str, Any]) -> None:
    """Raises RequestError where what `json.dumps` made of a body may not go into the queue.

    Only what is in doubt is encoded once more: escapes are longer than the text that the limit
    counts, or may be half of a surrogate pair; and what looks like a number that is not finite.
    """
    is_safe = len(encoded) <= max_body_bytes() and b"\\ud" not in encoded
    if not is_safe or b"NaN" in encoded or b"Infinity" in encoded:
        encode_body(body)
