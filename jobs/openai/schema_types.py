"""What a caller may give as `schema=`: a JSON schema, or any type that pydantic understands."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DictSchema

from mlx_rq.jobs.openai.errors import RequestError

Schema: TypeAlias = Any
"""A JSON schema as a mapping; or a pydantic class, a dataclass, a TypedDict, `list[X]`, `X | None`,
whatever `pydantic.TypeAdapter` takes. (Python has no type for what is a type.)
"""

_LONGEST_NAME = 64


class _Generator(GenerateJsonSchema):
    """Says of a dict whose keys are integers that they are; pydantic says nothing of them."""

    def dict_schema(self, schema: DictSchema) -> JsonSchemaValue:
        written = super().dict_schema(schema)
        if schema.get("keys_schema", {}).get("type") == "int":
            written.setdefault("propertyNames", {"pattern": "^(?:0|-?[1-9][0-9]{0,17})$"})
        return written


def response_format(schema: Schema, *, strict: bool = True) -> dict[str, Any]:
    """Writes a schema as the `response_format` that OpenAI's client would send for it.

    The name is of the type, in the letters that the API allows. Raises RequestError where pydantic
    makes no JSON schema of a type.
    """
    if isinstance(schema, Mapping):
        name, json_schema = "answer", dict(schema)
    else:
        try:
            json_schema = _adapter(schema).json_schema(schema_generator=_Generator)
        except PydanticUserError as error:
            raise RequestError(
                f"Invalid 'schema': expected a JSON schema or a type that pydantic can describe, "
                f"got {schema!r}: {error.message}",
                code="invalid_value",
                param="schema",
            ) from None
        spelled = str(getattr(schema, "__name__", ""))
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", spelled).strip("_")[:_LONGEST_NAME] or "answer"
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": json_schema, "strict": strict},
    }


def read_value(text: str, schema: Schema) -> Any:
    """Reads an answer as what a schema asked for: a value of the type, or plain JSON.

    Raises ValueError (pydantic's ValidationError is one) where the text is no such value.
    """
    if schema is None or isinstance(schema, Mapping):
        return json.loads(text)
    return _adapter(schema).validate_json(text)


def _adapter(schema: Any) -> TypeAdapter[Any]:
    try:
        return _kept_adapter(schema)
    except TypeError:  # a type that cannot be hashed
        return TypeAdapter(schema)


@lru_cache(maxsize=64)
def _kept_adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
