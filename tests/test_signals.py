"""Signals that whoever started a process has it ignore."""

import signal
import threading
from pathlib import Path

from fakes import ignored
from uvicorn import Config

from mlx_rq.api_stub.connections import bounds
from mlx_rq.api_stub.server import StoppableServer
from mlx_rq.signals import handling
from mlx_rq.worker.cli.service.logged import run_logged


def test_a_block_hears_what_is_not_ignored_and_leaves_all_as_it_was() -> None:
    heard: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    with ignored(signal.SIGINT), handling(lambda signum, frame: heard.append(signum), *numbers):
        for number in numbers:
            signal.raise_signal(number)
    assert heard == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_thread_that_may_set_no_handlers_sets_none() -> None:
    heard: list[int] = []

    def run() -> None:
        with handling(lambda signum, frame: None, signal.SIGTERM):
            heard.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [1]


def test_the_http_server_leaves_ignored_what_is() -> None:
    server = StoppableServer(Config("nothing:runs"), bounds())
    with ignored(signal.SIGINT), server.capture_signals():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == server.handle_exit
    assert not server.should_exit


def test_a_service_leaves_to_its_program_what_is_ignored(tmp_path: Path) -> None:
    """A shell cannot trap what it was started to ignore."""
    script = "trap 'exit 7' INT; kill -INT $$; exit 5"
    with ignored(signal.SIGINT):
        assert run_logged(["/bin/sh", "-c", script], tmp_path / "log") == 5
