"""Which live workers serve a model: read from what each worker says of itself."""

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from redis import Redis
from rq.worker import BaseWorker

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.reading import Unreadable

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0)]


class _Lenient(BaseModel):
    """A record of which a field that is missing, or makes no sense, has its default."""

    model_config = ConfigDict(extra="allow")

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_default(
        cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        try:
            return read(value)
        except ValidationError:
            return cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)


class WorkerTotals(_Lenient):
    """What a worker's engine has computed, as far as it is shown."""

    tasks: Count = 0
    prompt_tokens: Count = 0
    distinct_tokens: Count = 0
    prefilled_tokens: Count = 0
    decoded_tokens: Count = 0
    decode_steps: Count = 0
    prefill_seconds: Seconds = 0.0
    decode_seconds: Seconds = 0.0
    prefix_bytes: Count = 0


class WorkerMemory(_Lenient):
    """Bytes that a worker's MLX holds, keeps to use again, held at most, and may hold.

    Of those that it holds, `weights` are the model's.
    """

    active: Count | None = None
    cache: Count | None = None
    peak: Count | None = None
    ceiling: Count | None = None
    weights: Count | None = None


class WorkerSpeed(_Lenient):
    """Tokens and jobs in a second."""

    prompt_tokens: Seconds = 0.0
    generated_tokens: Seconds = 0.0
    jobs: Seconds = 0.0


class WorkerRates(_Lenient):
    """How fast a worker is `now` (10 s), was in `recent` (15 min), and while it had jobs."""

    now: WorkerSpeed = Field(default_factory=WorkerSpeed)
    recent: WorkerSpeed = Field(default_factory=WorkerSpeed)
    jobs_at_work: Seconds | None = None


class WorkerLive(_Lenient):
    """What a worker says every second (`LiveReport`).

    `rows` are tokens so far, by job; `waiting_since` is the Unix time at which the oldest job that
    waits in it was submitted, by queue.
    """

    running: Count | None = None
    waiting: Count | None = None
    ended: Count | None = None
    rates: WorkerRates = Field(default_factory=WorkerRates)
    rows: dict[str, Count] = Field(default_factory=dict)
    waiting_since: dict[str, Seconds] = Field(default_factory=dict)


ModelState = Literal["loaded", "loading", "can_be_loaded", "failed"]
"""How far a worker is with a model, the furthest first."""


class ServedModel(_Lenient):
    """A model that a worker can load, under the names by which jobs ask for it."""

    id: str = ""
    names: list[str] = Field(default_factory=list)
    state: ModelState = "can_be_loaded"
    why: str | None = None


class NextModel(_Lenient):
    """The model that a worker is to load next, and why."""

    model: str = ""
    why: str = ""


class WorkerRecord(_Lenient):
    """What a live worker says of itself (`MLXWorker.describe`)."""

    serves: list[str] | None = None
    model: str = ""
    models: list[ServedModel] = Field(default_factory=list)
    next: NextModel | None = None
    host: str = ""
    machine: str = ""
    chip: str = ""
    pid: Count = 0
    prefix_sharing: str = ""
    drafting: str = ""
    capacity: Count = 0
    running: Count = 0
    waiting: Count = 0
    ended: Count = 0
    paused: str | None = None
    totals: WorkerTotals = Field(default_factory=WorkerTotals)
    memory: WorkerMemory = Field(default_factory=WorkerMemory)


def live_workers(connection: Redis) -> list[dict[str, Any]]:
    """Lists the live workers: each with its name, birth, and what it last said of itself.

    A worker that died is gone when its record's time to live is over.
    """
    prefix = BaseWorker.redis_worker_namespace_prefix
    members = reading.texts(reading.ask(connection.smembers, BaseWorker.redis_workers_keys))
    names = sorted(member.removeprefix(prefix) for member in members)
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.get(keys.worker(name))
            pipe.hget(f"{prefix}{name}", "birth")
        found = reading.ask_all(pipe)
    return [
        {**said.model_dump(), "name": name, "born": reading.time(born)}
        for name, record, born in zip(names, found[::2], found[1::2], strict=True)
        if (said := _read(record)) is not None
    ]


def _read(record: Any) -> WorkerRecord | None:
    """Reads what a worker said of itself; None where it is gone, or said nothing that we know."""
    said = reading.json_object(record)
    if isinstance(said, Unreadable):
        return None
    worker = WorkerRecord.model_validate(said)
    return None if worker.serves is None else worker


def with_live(connection: Redis, workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to workers what each said within the last second or so: its rates and its rows."""
    with connection.pipeline(transaction=False) as pipe:
        for worker in workers:
            pipe.get(keys.live(worker["name"]))
        replies = reading.ask_all(pipe)
    known = []
    for worker, reply in zip(workers, replies, strict=True):
        said = reading.json_object(reply)
        read = WorkerLive.model_validate({} if isinstance(said, Unreadable) else said)
        rows = [{"id": job_id, "tokens": tokens} for job_id, tokens in read.rows.items()]
        fresh = read.model_dump(exclude={"rows"}, exclude_none=True)
        rates = read.rates.model_dump()
        known.append({**worker, **fresh, "rates": rates, "rows": rows})
    return known


def remember_served(connection: Redis, names: Iterable[str]) -> None:
    """Notes which models there are, also for the time when no worker lives that serves them."""
    scores = dict.fromkeys(names, time.time())
    if reading.ask(connection.zadd, keys.MODELS, scores) is reading.WRONG_TYPE:
        connection.delete(keys.MODELS)
        connection.zadd(keys.MODELS, scores)
    connection.zremrangebyrank(keys.MODELS, 0, -keys.MODELS_KEPT - 1)


def known_models(connection: Redis) -> list[str]:
    """Names the models that workers serve, or have served."""
    return sorted(reading.texts(reading.ask(connection.zrange, keys.MODELS, 0, -1)))


def workers_for(connection: Redis, model: str) -> list[dict[str, Any]]:
    """Lists the live workers that serve a model, as `live_workers` does."""
    return [worker for worker in live_workers(connection) if model in worker["serves"]]
