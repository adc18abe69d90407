"""What happens to every request before its endpoint sees it.

Plain ASGI, outermost first: `RequestIds` (every answer names its request, also one to a fault of
ours), `AccessCheck` (who may come in, and how often), then `bodies.py`.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_rq.api_stub.errors import ApiError, error_response, internal_error
from mlx_rq.api_stub.metrics import Requests
from mlx_rq.api_stub.settings import ANYONE, Settings, is_loopback

CLIENT = "client"
"""Under this name a request's state says who sent it; None where no keys are asked for."""

_OPEN_TO_ALL = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that tell nothing of the work: health checks and the description need no key."""

ASSETS = "/docs/assets"
"""Below it are scripts and styles of the description, which come from a package."""


PAGE_ASSETS = "/page/assets"
"""Below it are the files of the page at `/` (`page/assets.py`)."""


class RequestIds:
    """Sends `x-request-id` with every answer, and answers what nobody else caught."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = internal_error(error, request_id)
            if status:
                raise  # half an answer is out already: the connection has to break
            await response(scope, receive, send_with_id)
        finally:
            self._requests.count(scope, status)


class AccessCheck:
    """Lets in who has a key (without keys: who is on this machine), and not too often."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._rates = RateLimit(settings.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            try:
                client = self._client(Headers(scope=scope))
                scope.setdefault("state", {})[CLIENT] = client
                self._rates.take(client or ANYONE)
            except ApiError as error:
                response = error_response(error.status, error.error, error.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, headers: Headers) -> str | None:
        """Says who asks; raises ApiError where nobody may."""
        if not self._settings.keys:
            self._refuse_web_pages(headers)
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401,
                "No API key was sent. Send one in the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        client = self._settings.keys.client(key.strip())
        if client is None:
            raise ApiError(
                401,
                "Incorrect API key provided. The keys are in the file that the server was "
                "started with.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return client

    def _refuse_web_pages(self, headers: Headers) -> None:
        """Raises ApiError for a foreign web page that has a browser on this machine ask for it.

        It may name this machine by a host name of its own, or send from its own origin.
        """
        host = headers.get("host", "")
        if not is_loopback(_split(f"//{host}").hostname or ""):
            raise ApiError(
                403,
                f"Without API keys the server answers to localhost only, not to {host!r}; started "
                "with --api-key-file, it answers under any name to who has a key.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if (
            origin is not None
            and _split(origin).netloc != host
            and origin not in self._settings.allowed_origins
        ):
            raise ApiError(
                403,
                f"Pages from {origin!r} may not use this server; --allow-origin lets them.",
                code="origin_not_allowed",
            )


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return wants_page(Headers(scope=scope))
    return path in _OPEN_TO_ALL or path.startswith((f"{ASSETS}/", f"{PAGE_ASSETS}/"))


def wants_page(headers: Headers) -> bool:
    """Tells a browser that a person opens from the clients of the API."""
    return "text/html" in headers.get("accept", "")


def _split(url: str) -> SplitResult:
    """Takes a URL apart; one that is none is of no host."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class RateLimit:
    """Counts requests by the minute: a bucket for each owner that fills up again steadily."""

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Counts one request; raises ApiError where the owner has no more for the moment."""
        if self._per_minute is None:
            return
        now = time.monotonic()
        left, at = self._buckets.get(owner, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - at) * self._per_minute / 60)
        if left < 1:
            wait = (1 - left) * 60 / self._per_minute
            raise rate_limited(f"{self._per_minute} requests a minute are allowed.", wait)
        self._buckets[owner] = left - 1, now


def rate_limited(why: str, wait: float) -> ApiError:
    """Makes the refusal of a request that may be sent again after some seconds (at most 120)."""
    seconds = max(1, min(120, round(wait + 0.5)))
    return ApiError(
        429,
        f"Rate limit reached: {why} Try again in {seconds} s.",
        code="rate_limit_exceeded",
        type="rate_limit_error",
        headers={"retry-after": str(seconds)},
    )


async def refuse_unknown_query(request: Request) -> None:
    """Raises ApiError for a query parameter that the endpoint does not know: it would be ignored.

    Names with brackets, as in `metadata[key]`, are known by what is before them. A coroutine: for
    anything else FastAPI would take a thread, at every request.
    """
    if not request.query_params:
        return
    known = _query_names(request.scope["route"])
    for name in request.query_params:
        if name.partition("[")[0] not in known:
            raise ApiError(
                400,
                f"Unknown query parameter: '{name}'. "
                f"There {'are' if known else 'is'} {', '.join(sorted(known)) or 'none'}.",
                code="unknown_parameter",
                param=name,
            )


def _query_names(route: APIRoute) -> set[str]:
    """Names the query parameters of an endpoint, also those that it reads for itself."""
    described = (route.openapi_extra or {}).get("parameters", ())
    names = {parameter["name"] for parameter in described}
    waiting = [route.dependant]
    while waiting:
        dependant = waiting.pop()
        names |= {parameter.alias for parameter in dependant.query_params}
        waiting += dependant.dependencies
    return names


def header_seconds(request: Request, name: str) -> float | None:
    """Reads a header as seconds above 0; None where it is not there or says something else."""
    try:
        seconds = float(request.headers.get(name, ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def cors_settings(settings: Settings) -> Mapping[str, Any]:
    """What Starlette's CORS middleware is told about the origins that are let in."""
    return {
        "allow_origins": list(settings.allowed_origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "x-job-id", "retry-after", "location"],
    }
