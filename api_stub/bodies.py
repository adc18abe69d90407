"""What a request carries: how large it may be, how it may be encoded, and its JSON."""

import json
import zlib
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_rq.api_stub.errors import ApiError, error_response
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.sizes import max_body_bytes
from mlx_rq.jobs.openai.validation import RepeatedKey, unique_keys

ESCAPED = 2
"""So many times the bytes of the largest body may a request have, for JSON's escapes.

Uploads have a limit of their own.
"""

MAX_UPLOAD_BYTES = 200 * 1024 * 1024
"""The most bytes of an uploaded file, as OpenAI's batches have it."""

_FORM_BYTES = 64 * 1024
"""Room for the other fields of an upload."""

_UPLOADS = "/v1/files"

_GZIP = ("gzip", "x-gzip")
_PIECE_BYTES = 1 << 20
"""The most bytes that are decoded together."""


class BodyLimit:
    """Refuses a body that is too large: by its announced length at once, else while it comes.

    A gzip body is decoded on the way, and what comes out has the same limit.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            receive = _limited(scope, receive)
        except ApiError as error:
            response = error_response(error.status, error.error, error.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Makes the way in which a request's body is read; raises ApiError where it cannot be."""
    headers = Headers(scope=scope)
    upload = scope["path"] == _UPLOADS
    limit = MAX_UPLOAD_BYTES + _FORM_BYTES if upload else ESCAPED * max_body_bytes()
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:18]) > limit:
        raise _too_large(limit)
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return _Counted(receive, limit).receive
    if encoding not in _GZIP:
        raise ApiError(
            415,
            f"Unsupported content encoding: {encoding[:80]!r}. Send gzip, or none.",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "gzip"},
        )
    counted = _Counted(receive, limit)
    return _Counted(_Decoded(counted.receive).receive, limit).receive


class _Counted:
    """A body whose bytes are counted as they come."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit = receive, limit
        self._received = 0

    async def receive(self) -> Message:
        """Gives what comes next; raises ApiError where that is too much."""
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            raise _too_large(self._limit)
        return message


class _Decoded:
    """A gzip body, decoded a piece at a time, so that a small one cannot become a large piece."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._inflate = zlib.decompressobj(wbits=31)
        self._encoded = b""
        self._inside = False  # there may be more to decode without more bytes
        self._more = True

    async def receive(self) -> Message:
        """Gives the next piece; raises ApiError where it is no gzip."""
        if not self._encoded and not self._inside:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._encoded, self._more = message.get("body", b""), message.get("more_body", False)
        piece = self._decode()
        more = bool(self._encoded) or self._inside or self._more
        if not more and not self._inflate.eof:
            raise _not_gzip("it is cut off")
        return {"type": "http.request", "body": piece, "more_body": more}

    def _decode(self) -> bytes:
        if self._inflate.eof and self._encoded:  # gzip may be written in several parts
            self._inflate = zlib.decompressobj(wbits=31)
        try:
            piece = self._inflate.decompress(self._encoded, _PIECE_BYTES)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        self._encoded = self._inflate.unconsumed_tail or self._inflate.unused_data
        self._inside = len(piece) == _PIECE_BYTES and not self._inflate.eof
        return piece


def _not_gzip(why: str) -> ApiError:
    return ApiError(400, f"The body could not be decoded as gzip: {why}.", code="invalid_encoding")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request has more than {limit:,} bytes, which is the limit here.",
        code="request_too_large",
        headers={"connection": "close"},  # what still comes is not read
    )


def check_media_type(request: Request, expected: str) -> None:
    """Raises ApiError where the body is said to be something else."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != expected:
        raise ApiError(
            415,
            f"Unsupported content type: {media_type or 'none'!r}. Send {expected}.",
            code="unsupported_media_type",
        )


async def read_json(request: Request) -> dict[str, Any]:
    """Reads the body as a JSON object; raises ApiError or RequestError where it is none.

    Only `application/json`: a web page can send other types from a browser without asking.
    """
    check_media_type(request, "application/json")
    text = await request.body()
    try:
        body = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise RequestError(
            f"We could not parse the JSON body of your request: {error}.",
            code="invalid_json",
            param=error.key,
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"We could not parse the JSON body of your request: {error}.", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise RequestError(
            "Invalid body: expected an object, but got another JSON value instead.",
            code="invalid_type",
        )
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


JsonBody = Annotated[dict[str, Any], Depends(read_json)]
