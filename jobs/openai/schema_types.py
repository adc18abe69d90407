"""What a caller may give as `schema=`: a JSON schema, or any type that pydantic understands."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DecimalSchema, DictSchema, MultiHostUrlSchema, UrlSchema

from mlx_rq.jobs.openai.errors import RequestError

Schema: TypeAlias = Any
"""A JSON schema as a mapping; or a pydantic class, a dataclass, a TypedDict, `list[X]`, `X | None`,
whatever `pydantic.TypeAdapter` takes. (Python has no type for what is a type.)
"""

_LONGEST_NAME = 64


_INTEGER = "^(?:0|-?[1-9][0-9]{0,17})$"


class _Generator(GenerateJsonSchema):
    """Says of some types more than pydantic does, so that answers can be read as them."""

    def dict_schema(self, schema: DictSchema) -> JsonSchemaValue:
        """Says of keys that they are texts of integers: of integers, pydantic says nothing.

        Of an enum of integers it says that they are some, which the keys of JSON never are.
        """
        written = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {})
        if keys.get("type") == "int":
            written.setdefault("propertyNames", {"pattern": _INTEGER})
        elif keys.get("type") == "enum" and keys.get("sub_type") == "int":
            written["propertyNames"] = {"enum": [str(int(one.value)) for one in keys["members"]]}
        return written

    def decimal_schema(self, schema: DecimalSchema) -> JsonSchemaValue:
        """Describes a number, with its places; pydantic allows any text as well."""
        number: JsonSchemaValue = super().decimal_schema(schema)["anyOf"][0]
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if places is not None:
            number.setdefault("multipleOf", float(f"1e-{places}"))
        if digits is not None:
            most = 10 ** (digits - (places or 0))
            for bound, key in ((-most, "exclusiveMinimum"), (most, "exclusiveMaximum")):
                number.setdefault(key, bound)
        return number

    def url_schema(self, schema: UrlSchema) -> JsonSchemaValue:
        """Says which schemes a URL may have, and that it has a host then."""
        return _with_schemes(super().url_schema(schema), schema)

    def multi_host_url_schema(self, schema: MultiHostUrlSchema) -> JsonSchemaValue:
        return _with_schemes(super().multi_host_url_schema(schema), schema)


def _with_schemes(written: JsonSchemaValue, url: UrlSchema | MultiHostUrlSchema) -> JsonSchemaValue:
    """Adds a pattern of the schemes; then without the length, which takes too much with it."""
    if not (schemes := url.get("allowed_schemes")):
        return written
    host = "" if schemes == ["file"] else "[A-Za-z0-9]"
    rest = {key: value for key, value in written.items() if key not in ("maxLength", "minLength")}
    return {**rest, "pattern": f"^(?:{'|'.join(map(re.escape, schemes))})://{host}"}


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
