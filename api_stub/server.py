"""Runs the server with uvicorn."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import HANDLED_SIGNALS

from mlx_rq.api_stub.app import create_app
from mlx_rq.api_stub.connections import Bounds, LimitedProtocol, LimitedState, bounds
from mlx_rq.api_stub.settings import Settings, check_binding
from mlx_rq.signals import handling, heeded

logger = logging.getLogger("mlx_rq.api_stub")

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open.

Longer than clients keep theirs, so that none sends into one that is just being closed.
"""

GRACE_SECONDS = 10
"""How long connections may take to finish once the server closes; who waits is told to go."""


_ACCEPT_FAILED = "socket.accept() out of system resource"
"""What asyncio says where no connection can be taken in: thousands of times, with a traceback."""

_TOLD_SECONDS = 60.0


class PathsOnly(logging.Filter):
    """Leaves the queries of URLs out of the log of requests: they may hold secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Called with each request that is logged; shortens its path."""
        if isinstance(record.args, tuple) and len(record.args) == _ACCESS_ARGUMENTS:
            client, method, path, *rest = record.args
            record.args = (client, method, str(path).partition("?")[0], *rest)
        return True


_ACCESS_ARGUMENTS = 5
_PATHS_ONLY = PathsOnly()


class StoppableServer(uvicorn.Server):
    """A server that tells the clients that wait for jobs when it closes."""

    def __init__(self, config: uvicorn.Config, bounds: Bounds) -> None:
        super().__init__(config)
        self.server_state = LimitedState(bounds.open)
        self._silent_until = float("-inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called before anything comes in."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await super().startup(sockets)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Called with what goes wrong in the event loop; tells failed connections once a minute."""
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
        elif (now := loop.time()) >= self._silent_until:
            self._silent_until = now + _TOLD_SECONDS
            logger.error("no connection can be taken in for now: %s", context.get("exception"))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called around the run. uvicorn would also hear what this process is to ignore."""
        heard = heeded(*HANDLED_SIGNALS)
        with handling(self.handle_exit, *heard):
            yield
        for captured in reversed(self._captured_signals):
            if captured in heard:  # none in a thread, where somebody calls `handle_exit`
                signal.raise_signal(captured)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal: stops listening, and lets go who waits."""
        self._app.state.closing.set()
        super().handle_exit(sig, frame)

    @property
    def _app(self) -> FastAPI:
        app = self.config.app
        assert isinstance(app, FastAPI)
        return app


def make_server(
    settings: Settings, host: str, port: int, log_level: str = "info"
) -> StoppableServer:
    """Makes a server that `run()` runs until a signal; port 0 takes a free one.

    Raises RequestError where strangers could reach a server without keys.
    """
    check_binding(host, settings.keys)
    limits = bounds()
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_level=log_level,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        http=LimitedProtocol,
        ws="none",
        backlog=limits.backlog,
    )
    logging.getLogger("uvicorn.access").addFilter(_PATHS_ONLY)
    return StoppableServer(config, limits)
