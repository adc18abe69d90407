"""Programs to break, on the server that all tests share or on one of their own."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from harness import Program, Server, StartProgram
from redis import Redis


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[StartProgram]:
    """Starts programs that end with the test; they use the shared server unless told otherwise."""
    with ExitStack() as stack:

        def start(role: str = "supervise", **config: Any) -> Program:
            config = {"url": redis_url, "data": str(tmp_path / "data"), **config}
            config = {"counter": str(tmp_path / "kills"), **config}
            config = {"hours": str(tmp_path / "hours"), **config}
            return stack.enter_context(closing(Program(role, **config)))

        yield start


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, with an append-only file that is written at once."""
    with closing(Server(tmp_path / "valkey")) as server:
        (tmp_path / "valkey").mkdir()
        server.start()
        yield server


@pytest.fixture
def own(server: Server) -> Iterator[Redis]:
    """A connection to the test's own server."""
    with Redis.from_url(server.url) as connection:
        yield connection
