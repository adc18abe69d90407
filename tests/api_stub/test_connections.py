"""What clients can hold open: half-sent requests, and how many connections."""

import json
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fakes import PATIENCE, eventually
from servers import RunningServer, StartServer, run_server

from mlx_rq import Job, submit
from mlx_rq.api_stub import connections
from mlx_rq.api_stub.connections import Bounds
from mlx_rq.api_stub.settings import Settings

HEAD = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HALF = b"GET /health HTTP/1.1\r\nhost: loc"
HALF_BODY = HEAD + b'content-length: 100\r\n\r\n{"prompt": '


class Clients:
    """Plain connections to a server, which send what no library would."""

    def __init__(self, server: RunningServer, stack: ExitStack) -> None:
        self._address = "127.0.0.1", int(server.url.rpartition(":")[2])
        self._stack = stack
        self._state = server.server.server_state

    def send(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(self._address, PATIENCE)
        self._stack.enter_context(connection)
        connection.sendall(data)
        return connection

    def wait_for(self, job: Job, then: bytes = b"") -> socket.socket:
        """Asks for a job's end, and for what comes `then`; returns once the server waits."""
        head = f"GET /v1/jobs/{job.id}?wait=60 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        connection = self.send(head.encode() + then)
        eventually(lambda: len(self._state.tasks) == 1, "the request")
        return connection


def _read(connection: socket.socket) -> bytes:
    """Reads until the server closes; nothing where it did not wait for what was sent."""
    with connection.makefile("rb") as file:
        try:
            return file.read()
        except ConnectionResetError:
            return b""


def _answered(data: bytes) -> tuple[int, str]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), str(json.loads(body)["error"]["code"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_half_sent_requests_end(
    server: RunningServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.1)
    clients = Clients(server, stack)
    for half in (b"", HALF, HALF_BODY, HEAD + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n"):
        answer = _read(clients.send(half)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert _answered(answer) == (408, "request_timeout"), half


def test_what_was_begun_behind_a_whole_request_ends_too(
    server: RunningServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    job = submit(prompt="x")
    waiting = Clients(server, stack).wait_for(job, then=b"GET /hea")
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    job.cancel()
    assert _read(waiting).startswith(b"HTTP/1.1 200 OK")


def test_bytes_that_drip_do_not_prolong_a_head(
    server: RunningServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    connection = Clients(server, stack).send(HALF)
    connection.settimeout(0.02)
    answer = b""
    while not answer:
        with suppress(TimeoutError):
            connection.sendall(b"x")
            answer = connection.recv(4096)
    connection.settimeout(PATIENCE)
    assert _answered(answer + _read(connection)) == (408, "request_timeout")


def test_a_body_has_time_for_its_bytes(
    server: RunningServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(connections, "SLOWEST_RATE", 1)  # a second for each
    closing = HALF_BODY.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    connection = Clients(server, stack).send(closing + b" " * 60)
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(4096)
    connection.sendall(b"x" * 40)
    connection.settimeout(PATIENCE)
    assert _answered(_read(connection)) == (400, "invalid_json")


def test_who_waits_for_an_answer_has_all_the_time(
    server: RunningServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    waiting = Clients(server, stack).wait_for(submit(prompt="x"))
    (connection,) = server.server.server_state.connections
    loop: Any = connection.loop  # type: ignore[union-attr]
    clock, hours, passing = loop.time, 0, True

    def an_hour_later() -> float:
        nonlocal hours
        hours += passing
        return float(clock() + 3600 * hours)

    monkeypatch.setattr(loop, "time", an_hour_later)  # than when it was looked at before
    answer = _read(waiting)
    passing = False
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"status":"queued"' in answer


def test_at_the_bound_who_was_silent_for_longest_goes(
    start_server: StartServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.server.bounds", lambda: Bounds(8, 64))
    server = start_server()
    clients = Clients(server, stack)
    idle = server.http
    assert idle.get("/health").status_code == 200
    half_sent = [clients.send(HALF if n % 2 else HALF_BODY) for n in range(40)]
    for _ in range(3):
        assert server.http.get("/health").status_code == 200
    state: Any = server.server.server_state
    assert len(state.connections) <= 6  # three quarters of eight, for one address
    assert [_read(one) for one in half_sent[:30]] == [b""] * 30


def test_a_server_that_closes_does_not_wait_for_the_rest(
    redis_url: str, tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    with run_server(Settings(data_dir=tmp_path, redis_url=redis_url)) as server:
        half = Clients(server, stack).send(HALF_BODY)
        state: Any = server.server.server_state
        eventually(lambda: len(state.tasks) == 1, "the request")
    assert _answered(_read(half)) == (503, "server_closing")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_where_all_wait_for_answers_a_new_one_is_refused(
    start_server: StartServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.server.bounds", lambda: Bounds(4, 8))
    server = start_server()
    clients = Clients(server, stack)
    path = f"/v1/jobs/{submit(prompt='x').id}?wait=60"
    waiting = [
        clients.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()) for _ in range(3)
    ]
    state: Any = server.server.server_state
    eventually(lambda: len(state.tasks) == 3, "the requests")
    refused = _read(clients.send(b""))
    assert _answered(refused) == (503, "overloaded")
    assert b"retry-after: 1\r\n" in refused
    waiting[0].close()
    eventually(lambda: len(state.connections) == 2, "its end")
    assert server.http.get("/health").status_code == 200


def test_an_address_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = connections.LimitedState(8)

    class One:
        """A connection of an address."""

        def __init__(self, address: str) -> None:
            self.address, self.transport, self.closed = address, self, False

        def close(self) -> None:
            self.closed = True

    greedy: Any = [One("a") for _ in range(7)]
    assert [state.admit(one) for one in greedy] == [True] * 6 + [False]
    others: Any = [One("b"), One("c")]
    assert all(state.admit(one) for one in others)
    late: Any = One("d")
    assert not state.admit(late)
    state.heard(greedy[1])
    state.heard(greedy[0])
    state.heard(others[0])
    assert state.admit(late)  # in the place of who has most, and was silent for longest
    assert [one.closed for one in greedy] == [False, True] + [False] * 5
    state.busy(greedy[0])
    assert state.admit(greedy[6])
    assert others[0].closed
    for one in (*greedy, *others, late):
        state.forget(one)
    assert all(state.admit(One("a")) for _ in range(6))  # type: ignore[arg-type]


def test_failing_to_accept_is_told_once_a_minute(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    class Loop:
        """What the server asks of an event loop."""

        now = 0.0
        others: ClassVar[list[Any]] = []

        def time(self) -> float:
            return self.now

        def default_exception_handler(self, context: Any) -> None:
            self.others.append(context)

    loop: Any = Loop()
    failed = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Full")}
    for loop.now in (0.0, 0.1, 59.9, 60.0, 61.0):
        server.server._loop_failed(loop, failed)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert told == ["no connection can be taken in for now: [Errno 24] Full"] * 2
    other = {"message": "something else"}
    server.server._loop_failed(loop, other)
    assert loop.others == [other]


def test_the_log_of_requests_has_no_queries(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    access = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(access, "handlers", [Keep()])
    monkeypatch.setattr(access, "level", logging.INFO)
    access.manager._clear_cache()  # type: ignore[attr-defined]
    server.http.get("/health?api_key=secret")
    server.http.get("/v1/jobs/a%20b%3Fc?webhook=https://example.org/secret")
    assert len(lines) == 2
    assert '"GET /health HTTP/1.1" 200' in lines[0]
    assert '"GET /v1/jobs/a%20b%3Fc HTTP/1.1" 400' in lines[1]


def test_the_bounds_are_below_the_limit_of_descriptors() -> None:
    found = connections.bounds()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found.open + found.backlog <= soft * 3 // 4
