"""Servers for the tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, RunningWorker, StartWorker, eventually
from redis import Redis
from servers import RunningServer, StartServer, run_server

from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.queue import keys


@pytest.fixture
def start_server(redis_url: str, tmp_path: Path) -> Iterator[StartServer]:
    """Opens servers that stay open until the end of the test; takes the fields of Settings."""
    number = count(1)
    with ExitStack() as stack:

        def start(**fields: Any) -> RunningServer:
            folder = tmp_path / f"server {next(number)}"
            fields = {"data_dir": folder, "redis_url": redis_url, **fields}
            return stack.enter_context(run_server(Settings(**fields)))

        yield start


@pytest.fixture
def server(start_server: StartServer) -> RunningServer:
    """A server as it is without any options."""
    return start_server()


@pytest.fixture
def start_worker(start_worker: StartWorker, connection: Redis) -> StartWorker:
    """Starts workers, and waits until a server can see that they live."""

    def start(engine: FakeEngine | None = None, **options: Any) -> RunningWorker:
        worker = start_worker(engine, **options)
        eventually(lambda: bool(connection.exists(keys.worker(worker.name))), "the worker")
        return worker

    return start
