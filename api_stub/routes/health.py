"""/health, /metrics and /v1/models: what is there, as the live workers say it themselves."""

from typing import Any, get_args

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from mlx_rq.api_stub.answers import Health, Model, Models
from mlx_rq.api_stub.errors import away, never_known
from mlx_rq.api_stub.metrics import exposition
from mlx_rq.api_stub.openapi import REFUSED, answers
from mlx_rq.api_stub.service import Service, TheService
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.openai.requests import is_any
from mlx_rq.jobs.queue import reading
from mlx_rq.jobs.queue.connection import reachable
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.workers import ModelState, live_workers

router = APIRouter(tags=["state"])
open_router = APIRouter(tags=["state"])
"""Asks for no key."""


def _overview(service: Service) -> dict[str, Any]:
    with reachable(service.connection):
        return overview(service.connection)


@open_router.get("/health", responses={**answers(Health), **answers(Health, status=503)})
async def health(service: TheService) -> JSONResponse:
    """Say whether the queue can be reached (503 where not), who works, and how much waits."""
    try:
        state = await run_in_threadpool(_overview, service)
    except RedisUnavailable:
        return JSONResponse({"status": "no_redis", "redis": False}, 503)
    workers, queues = state["workers"], state["queues"]
    return JSONResponse(
        {
            "status": "ok" if workers else "no_workers",
            "redis": True,
            "workers": len(workers),
            "queued": sum(queue["queued"] for queue in queues),
            "in_progress": sum(queue["in_progress"] for queue in queues),
        }
    )


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: TheService) -> PlainTextResponse:
    """Give the counts of the server, the queues and the workers to Prometheus."""
    state = await run_in_threadpool(_overview, service)
    return PlainTextResponse(exposition(state, service.requests), media_type=CONTENT_TYPE_LATEST)


_STATES: tuple[ModelState, ...] = get_args(ModelState)
"""The best first: a model is loaded where one worker has it loaded."""


def _models(service: Service) -> dict[str, dict[str, Any]]:
    """Lists what live workers serve, by id; a model is as old as its oldest worker."""
    with reachable(service.connection):
        workers = live_workers(service.connection)
    models: dict[str, dict[str, Any]] = {}
    for worker in sorted(workers, key=lambda worker: str(worker["born"])):
        states = {name: model["state"] for model in worker["models"] for name in model["names"]}
        for name in worker["serves"]:
            model = models.setdefault(
                name,
                {
                    "id": name,
                    "object": "model",
                    "created": _unix(worker["born"]),
                    "owned_by": "local",
                    "shutdown_date": None,
                    "state": _STATES[-1],
                },
            )
            state = states.get(name, model["state"])
            model["state"] = min(model["state"], state, key=_STATES.index)
    return models


def _unix(born: str) -> int:
    """Reads RQ's time of birth; a worker that did not leave one is new."""
    return int(reading.unix_time(born))


@router.get("/v1/models", responses={**answers(Models), **REFUSED})
async def list_models(service: TheService) -> JSONResponse:
    """List the models and adapters that live workers serve, but not `default`, which all serve."""
    models = await run_in_threadpool(_models, service)
    data = [model for name, model in sorted(models.items()) if not is_any(name)]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{model:path}", responses={**answers(Model), **REFUSED})
async def get_model(service: TheService, model: str) -> JSONResponse:
    """Describe one model. Its id may hold slashes."""
    if not model:
        raise HTTPException(404)
    return JSONResponse(await run_in_threadpool(_model, service, model))


def _model(service: Service, name: str) -> dict[str, Any]:
    """Finds a model that live workers serve; raises ApiError where they do not."""
    models = _models(service)
    if name in models:
        return models[name]
    with reachable(service.connection):
        is_away = name in service.known()
    raise away(name) if is_away else never_known(name, models.keys(), set())
