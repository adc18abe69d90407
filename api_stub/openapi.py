"""What the server's description (`/openapi.json`, `/docs`) says about bodies, with examples."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlx_rq.api_stub.answers import ErrorAnswer
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.requests import ANY_MODEL

_STREAM_FIELDS: Mapping[str, Any] = {
    "stream": {"type": ["boolean", "null"], "description": "Answer with server-sent events."},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": {"type": ["boolean", "null"]}},
        "additionalProperties": False,
    },
}
Answers = dict[int | str, dict[str, Any]]

REFUSED: Answers = {
    400: {"model": ErrorAnswer, "description": "Something in the request is wrong."},
    "default": {"model": ErrorAnswer, "description": "Any other refusal or failure."},
}
"""What any endpoint may answer with."""


def answers(model: Any, *, status: int = 200, streams: bool = False) -> Answers:
    """Describes what an endpoint answers with; one that `streams` also sends events."""
    described: dict[str, Any] = {"model": model}
    if streams:
        described["content"] = {"text/event-stream": {}}
    return {status: described}


def body_of(request: type[JobRequest], *, streams: bool = True) -> dict[str, Any]:
    """Describes the body of an endpoint that takes one kind of job, and may stream."""
    schema, example = _inlined(request), {"model": ANY_MODEL, **request.example}
    if not streams:
        return _json_body(schema, {request.kind: {"value": example}})
    schema["properties"] = {**schema["properties"], **_STREAM_FIELDS}
    streamed = {"value": {**example, "stream": True}}
    return _json_body(schema, {request.kind: {"value": example}, "streamed": streamed})


def any_body() -> dict[str, Any]:
    """Describes a body that may be any kind of job."""
    schemas = [_inlined(request) for request in KINDS.values()]
    examples = {kind: {"value": request.example} for kind, request in KINDS.items()}
    return _json_body({"anyOf": schemas}, examples)


def model_body(model: type[BaseModel], example: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a body that a pydantic model reads."""
    return _json_body(_inlined(model), {"example": {"value": example}})


def upload_form() -> dict[str, Any]:
    """Describes the form that uploads a file."""
    properties = {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "user_data"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    }
    schema = {"type": "object", "properties": properties, "required": ["file", "purpose"]}
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    """Gives the JSON schema of a model without definitions beside it."""
    schema = model.model_json_schema()
    inlined: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
    return inlined


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Puts definitions where they are referred to: in OpenAPI, `#/$defs` lies somewhere else."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        name: _inline(value, definitions)
        for name, value in schema.items()
        if name != "discriminator"
    }


def _json_body(schema: Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}
