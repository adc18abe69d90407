"""A real server on a free port, and OpenAI's unmodified clients in strict validation."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fakes import PATIENCE, USAGE, answer, eventually
from openai import AsyncOpenAI, OpenAI

from mlx_rq.api_stub.server import StoppableServer, make_server
from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.openai.response_object import response_object
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.token_count import TokenCountRequest


@dataclass(frozen=True)
class RunningServer:
    """A server that is open, and the clients that tests use on it."""

    server: StoppableServer
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
def run_server(settings: Settings) -> Iterator[RunningServer]:
    """Runs a server in a thread while the block runs."""
    server = make_server(settings, "127.0.0.1", 0, "warning")
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "the server")
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield RunningServer(server, f"http://127.0.0.1:{port}")
    finally:
        server.handle_exit(15, None)
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not close"


StartServer = Callable[..., RunningServer]


def as_client(server: RunningServer, key: str) -> httpx.Client:
    """Gives what a client asks with: its key, and as from the page."""
    http = server.http
    http.headers["authorization"] = f"Bearer {key}"
    http.headers["x-mlx-rq-page"] = "1"
    return http


def answer_any(task: Task) -> dict[str, Any]:
    """Answers tasks of every kind, responses too."""
    if isinstance(task.request, TokenCountRequest):
        return {"object": "response.input_tokens", "input_tokens": 3}
    if not isinstance(task.request, ResponsesRequest):
        return answer(task)
    content = {
        "type": "output_text",
        "text": f"response for {task.id}",
        "annotations": [],
        "logprobs": [],
    }
    message = {
        "id": f"msg_{task.id}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [content],
    }
    usage = {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    return response_object(
        task.request,
        task.id,
        status="completed",
        model="fake",
        created_at=time.time(),
        completed_at=time.time(),
        output=[message],
        usage=usage,
    )
