"""The shapes of answers, for the server's description. What is left open here is as in OpenAI's."""

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from mlx_rq.jobs.client.job import Status
from mlx_rq.jobs.queue.workers import ModelState

Item = TypeVar("Item")


def whole(shape: type[BaseModel], record: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a record with every field that its shape has: an unset one is null, not left out."""
    return {**dict.fromkeys(shape.model_fields), **record}


class Error(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: Error


class Page(BaseModel, Generic[Item]):
    """A part of a list; `after=<last_id>` gives the next one."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """Tells that something is no more."""

    id: str
    object: str
    deleted: Literal[True]


class JobView(BaseModel):
    """A job: where it is, and its result or error once it has ended.

    `note` says what it waits for that will not come by itself.
    """

    id: str
    object: Literal["job"]
    status: Status
    model: str
    priority: Literal["high", "default", "low"]
    created_at: str
    started_at: str | None
    ended_at: str | None
    worker: str | None
    note: str | None
    result: dict[str, Any] | None
    error: Error | None


class Completion(BaseModel):
    """The continuation of a text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class ChatCompletion(BaseModel):
    """The answer of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


class StoredMessage(BaseModel):
    """A message that a stored chat answered."""

    id: str
    role: str
    content: str | None


class ResponseObject(BaseModel):
    """A response, also one that has not ended."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None = None


class InputItem(BaseModel):
    """Something that a response was made from."""

    id: str
    type: str


class InputTokens(BaseModel):
    """How long a prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class File(BaseModel):
    """A file that was uploaded, or that a batch wrote."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output", "user_data"]
    status: str
    status_details: str | None
    expires_at: int | None


class RequestCounts(BaseModel):
    """How far a batch is."""

    total: int
    completed: int
    failed: int


class Batch(BaseModel):
    """A batch, also one that has not ended.

    Each status that it had has a time of its own. `note` says what it waits for that will not come
    by itself.
    """

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None
    metadata: dict[str, str] | None
    model: str | None
    usage: dict[str, Any] | None
    note: str | None


class Model(BaseModel):
    """A model that a live worker serves."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    shutdown_date: str | None
    state: ModelState
    """Ours: whether a worker has it in memory; a job for one that can be loaded has it loaded."""


class Models(BaseModel):
    """All models that live workers serve."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Whether the queue can be reached, and how much there is to do."""

    status: Literal["ok", "no_workers", "no_redis"]
    redis: bool
    workers: int | None = None
    queued: int | None = None
    in_progress: int | None = None
