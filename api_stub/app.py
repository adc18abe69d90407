"""Puts the server together: endpoints, middleware, errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from mlx_rq.api_stub import errors
from mlx_rq.api_stub.bodies import BodyLimit
from mlx_rq.api_stub.middleware import (
    ASSETS,
    AccessCheck,
    RequestIds,
    cors_settings,
    refuse_unknown_query,
)
from mlx_rq.api_stub.openapi import REFUSED
from mlx_rq.api_stub.routes import (
    batches,
    completions,
    files,
    health,
    input_tokens,
    jobs,
    page,
    responses,
    stored_completions,
)
from mlx_rq.api_stub.service import Service
from mlx_rq.api_stub.settings import Settings

_DESCRIPTION = """
The HTTP server of an mlx-rq queue: it enqueues jobs and lets clients wait or poll for results.
OpenAI's clients work with the base URL `http://localhost:8000/v1`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Makes the app. It connects to Redis when the first request needs it.

    Raises RequestError where another server uses the same data folder.
    """
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    app = FastAPIOffline(
        title="mlx-rq",
        version=version("mlx-rq"),
        description=_DESCRIPTION,
        redoc_url=None,
        static_url=ASSETS,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.closing = asyncio.Event()
    errors.install(app)
    # For the description alone: `AccessCheck` looks at keys.
    bearer = [Depends(HTTPBearer(auto_error=False))] if settings.keys else []
    for module in (
        *(jobs, completions, stored_completions, responses, input_tokens, files, batches, page),
    ):
        guards = [Depends(refuse_unknown_query), *bearer]
        app.include_router(module.router, dependencies=guards, responses=REFUSED)
    app.include_router(health.router, dependencies=bearer)
    app.include_router(health.open_router)
    app.include_router(page.open_router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit)
    app.add_middleware(AccessCheck, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_settings(settings))
    app.add_middleware(RequestIds, requests=service.requests)
    return app
