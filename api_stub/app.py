"""Puts the door together: endpoints, manners, errors."""

import asyncio
from importlib.metadata import version

from fastapi import FastAPI
from mlx_rq.api_stub import completions, errors, health, plain
from mlx_rq.api_stub.door import Door
from mlx_rq.api_stub.manners import BodyLimit, Guard, RequestIds, cors_settings
from mlx_rq.api_stub.settings import Settings
from starlette.middleware.cors import CORSMiddleware

_DESCRIPTION = """
A door to the queue of mlx-rq: it enqueues jobs and lets clients wait or poll for their results.
OpenAI's clients work with the base URL `http://localhost:8000/v1`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Makes the app. It connects to Redis when the first request needs it."""
    app = FastAPI(
        title="mlx-rq",
        version=version("mlx-rq"),
        description=_DESCRIPTION,
        redoc_url=None,
        redirect_slashes=False,
    )
    door = Door(settings)
    app.state.door = door
    app.state.closing = asyncio.Event()
    errors.install(app)
    for module in (plain, completions, health):
        app.include_router(module.router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_settings(settings))
    app.add_middleware(RequestIds, requests=door.requests)
    return app
