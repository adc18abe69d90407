"""What the description of the door (`/openapi.json`, `/docs`) says about bodies, with examples."""

from collections.abc import Mapping
from typing import Any

from mlx_rq.jobs.requests import REQUESTS, Kind

_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_completion_tokens": 20,
    },
    "completion": {"prompt": "Once upon a time", "max_tokens": 20},
    "responses": {"input": "Name a colour.", "background": True},
}


def body_of(kind: Kind) -> dict[str, Any]:
    """Describes the body of an endpoint that takes one kind of job."""
    return _json_body(_schema(kind), {kind: {"value": _EXAMPLES[kind]}})


def any_body() -> dict[str, Any]:
    """Describes a body that may be any kind of job."""
    schemas = [_schema(kind) for kind in REQUESTS]
    return _json_body({"anyOf": schemas}, {kind: {"value": _EXAMPLES[kind]} for kind in REQUESTS})


def _schema(kind: Kind) -> dict[str, Any]:
    """Gives the JSON schema of a body, its definitions inside, under OpenAPI's roof."""
    schema = REQUESTS[kind].model_json_schema(mode="validation")
    return inline(schema, schema.pop("$defs", {}))


def inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Puts definitions where they are referred to: in OpenAPI, `#/$defs` lies somewhere else."""
    if isinstance(schema, list):
        return [inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        name: inline(value, definitions) for name, value in schema.items() if name != "discriminator"
    }


def _json_body(schema: Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}
