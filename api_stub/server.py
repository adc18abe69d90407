"""Runs the server with uvicorn."""

from types import FrameType

import uvicorn
from fastapi import FastAPI

from mlx_rq.api_stub.app import create_app
from mlx_rq.api_stub.settings import Settings, check_binding

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open.

Longer than clients keep theirs, so that none sends into one that is just being closed.
"""

GRACE_SECONDS = 10
"""How long connections may take to finish once the server closes; who waits is told to go."""


class StoppableServer(uvicorn.Server):
    """A server that tells the clients that wait for jobs when it closes."""

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
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_level=log_level,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    return StoppableServer(config)
