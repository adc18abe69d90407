"""A real door on a free port, and OpenAI's unmodified clients in strict validation."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fakes import PATIENCE, RunningWorker, eventually
from mlx_rq.api_stub.server import DoorServer, make_server
from mlx_rq.api_stub.settings import Settings
from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True)
class OpenDoor:
    """A door that is open, and the clients that tests use on it."""

    server: DoorServer
    url: str

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def client(self, **options: Any) -> OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return OpenAI(base_url=f"{self.url}/v1", _strict_response_validation=True, **options)

    def async_client(self, **options: Any) -> AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return AsyncOpenAI(base_url=f"{self.url}/v1", _strict_response_validation=True, **options)


@contextmanager
def open_door(settings: Settings) -> Iterator[OpenDoor]:
    """Runs a door in a thread while the block runs."""
    server = make_server(settings, "127.0.0.1", 0, "warning")
    thread = threading.Thread(target=server.run, name="door", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "the door")
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield OpenDoor(server, f"http://127.0.0.1:{port}")
    finally:
        server.handle_exit(15, None)
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the door did not close"


StartDoor = Callable[..., OpenDoor]
StartWorker = Callable[..., RunningWorker]
