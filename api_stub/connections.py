"""Bounds what clients can hold open: how many connections there are, how slowly a request may come.

`LimitedState` counts the connections of a server. At its bounds a new one takes the place of the
one whose client has been silent for longest: one that is idle or half-sent. A request that came
whole is never dropped; where there are only those, the new connection is refused.
"""

import asyncio
import json
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_rq.jobs.openai.errors import error_object

HEADER_SECONDS = 20.0
"""How long the head of a request may take, from its first byte or the opening of the connection."""

BODY_SECONDS = 30.0
"""How long a body may take, beside what its bytes take at the slowest rate."""

SLOWEST_RATE = 1000
"""Bytes a second."""

_MOST_DESCRIPTORS = 10_240
"""As many as macOS lets any process have, which gives it 256 unless it asks."""

_MOST_AT_ONCE = 2048


class Bounds(NamedTuple):
    """How many connections may be open, and how many are taken in together."""

    open: int
    backlog: int


def bounds() -> Bounds:
    """Asks for the file descriptors that there can be, and divides them.

    Half are for connections and a quarter for those that come together, which are open before any
    can be refused. The rest is for Redis and files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    descriptors = most if soft == resource.RLIM_INFINITY else soft
    return Bounds(max(1, descriptors // 2), max(1, min(descriptors // 4, _MOST_AT_ONCE)))


class LimitedState(ServerState):
    """The connections of a server by their addresses; those that wait for their clients by silence.

    One address has at most three quarters of all, so that none can shut out the others.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._most_of_one = most, max(1, most * 3 // 4)
        self._open: _ByAddress = {}
        self._silent: _ByAddress = {}

    def admit(self, connection: "LimitedProtocol") -> bool:
        """Takes a connection in, in another's place if need be; returns whether there was one."""
        address = connection.address
        admitted = True
        if len(self._open.get(address, ())) >= self._most_of_one:
            admitted = self._drop_silent_of(address)
        elif sum(map(len, self._open.values())) >= self._most:
            most_silent = max(self._silent, key=lambda one: len(self._silent[one]), default="")
            admitted = self._drop_silent_of(most_silent)
        if admitted:
            _add(self._open, connection)
        return admitted

    def _drop_silent_of(self, address: str) -> bool:
        longest = next(iter(self._silent.get(address, ())), None)
        if longest is None:
            return False
        self.forget(longest)
        longest.transport.close()
        return True

    def heard(self, connection: "LimitedProtocol") -> None:
        """Notes that a client from which more has to come was silent until now."""
        _remove(self._silent, connection)
        _add(self._silent, connection)

    def busy(self, connection: "LimitedProtocol") -> None:
        """Notes that a client waits for its answer."""
        _remove(self._silent, connection)

    def forget(self, connection: "LimitedProtocol") -> None:
        """Notes that a connection is closed."""
        _remove(self._silent, connection)
        _remove(self._open, connection)


_ByAddress = dict[str, dict["LimitedProtocol", None]]
"""Connections in the order in which they were added."""


def _add(some: _ByAddress, connection: "LimitedProtocol") -> None:
    some.setdefault(connection.address, {})[connection] = None


def _remove(some: _ByAddress, connection: "LimitedProtocol") -> None:
    of_one = some.get(connection.address, {})
    of_one.pop(connection, None)
    if not of_one:
        some.pop(connection.address, None)


class LimitedProtocol(H11Protocol):
    """A connection that is closed where a request does not come within its time."""

    server_state: LimitedState
    address = ""
    _until: float | None = None
    """When what is missing of a request has to be there, by the loop's clock; None: nothing is."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called with a new connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.server_state.admit(self):
            self.server_state.heard(self)
            self._expect(HEADER_SECONDS)
        else:
            self._refuse(503, "Too many connections are open. Try again soon.", "overloaded")

    def data_received(self, data: bytes) -> None:
        """Called with what came."""
        if self.transport.is_closing():
            return
        was_in_body = self._is_in_body
        super().data_received(data)
        if self._is_in_body:
            seconds = len(data) / SLOWEST_RATE + (0.0 if was_in_body else BODY_SECONDS)
            self._expect(seconds, more=was_in_body)
            self.server_state.heard(self)
        elif self._is_answering:
            self._cancel_timer()
            self.server_state.busy(self)
        else:
            if self._until is None:
                self._expect(HEADER_SECONDS)
            self.server_state.heard(self)

    def on_response_complete(self) -> None:
        """Called when an answer has been sent."""
        self._cancel_timer()
        super().on_response_complete()
        if not self._is_answering and not self.transport.is_closing():
            self.server_state.heard(self)
            if self.conn.trailing_data[0]:  # the beginning of another request
                self._expect(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when a connection is gone."""
        self._cancel_timer()
        self.server_state.forget(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server closes: what is half-sent is not waited for."""
        if self._is_in_body:
            self._refuse(503, "The server is closing. Try again soon.", "server_closing")
        else:
            super().shutdown()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_in_body(self) -> bool:
        return self._is_answering and self.cycle.more_body

    def _expect(self, seconds: float, more: bool = False) -> None:
        """Gives the client so long from now, or so much `more` than it had."""
        now = self.loop.time()
        self._until = (self._until if more and self._until is not None else now) + seconds
        if self._timer is None:
            self._timer = self.loop.call_at(self._until, self._look_at_clock)

    def _cancel_timer(self) -> None:
        self._until = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_clock(self) -> None:
        """Called when the time may be up; it may have been prolonged since."""
        self._timer = None
        if self._until is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # what is missing may have come: it is we who are slow
            self._expect(BODY_SECONDS)
        elif self.loop.time() < self._until:
            self._timer = self.loop.call_at(self._until, self._look_at_clock)
        else:
            self._refuse(408, "The request did not come within its time.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Closes the connection; says why, unless an answer was begun already."""
        begun = self._is_answering and self.cycle.response_started
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not begun:
            self.transport.write(_answer(status, error_object(message, code=code)))
        self.server_state.forget(self)
        self.transport.close()


_PHRASES = {408: "Request Timeout", 503: "Service Unavailable"}


def _answer(status: int, error: Mapping[str, Any]) -> bytes:
    """Writes an answer to a request that never was one."""
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
