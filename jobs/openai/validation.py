"""Turns a body into a request, or says in OpenAI's words what is wrong with it.

Run twice: by `submit()`, so that the producer learns at once, and again at the worker, because
anything may have been put into the queue by hand.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.sizes import max_body_bytes
from mlx_rq.jobs.openai.surrogates import place_of_half

Model = TypeVar("Model", bound=BaseModel)
RequestType = TypeVar("RequestType", bound=JobRequest)


def kind_of(body: Mapping[str, Any]) -> str:
    """Tells which kind of job a body is by the field that only that kind has.

    Raises RequestError where there is none, or more than one.
    """
    found = [kind for kind in KINDS.values() if body.get(kind.prompt_field) is not None]
    if len(found) > 1:
        *most, last = [f"'{kind.prompt_field}' ({name})" for name, kind in KINDS.items()]
        raise RequestError(
            f"A job has one of {', '.join(most)} and {last}, not {len(found)}.",
            code="invalid_value",
            param=found[1].prompt_field,
        )
    return found[0].kind if found else ChatRequest.kind


class RepeatedKey(ValueError):
    """A JSON object has a `key` twice."""

    def __init__(self, key: str) -> None:
        self.key = short(key)
        super().__init__(f"the key {self.key!r} occurs twice in one object")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object while JSON is read; raises RepeatedKey, because one value would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RepeatedKey(repeated)
    return made


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Writes a body as JSON, key order kept; raises RequestError where it is none or too big."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        encoded = text.encode()
    except UnicodeEncodeError:  # said here, and not by Redis
        raise _half_of_a_pair(body) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.", code="invalid_json") from None
    limit = max_body_bytes()
    if len(encoded) > limit:
        raise RequestError(
            f"The body has {len(encoded):,} bytes; the limit is {limit:,}.",
            code="request_too_large",
        )
    return encoded


def _half_of_a_pair(body: Mapping[str, Any]) -> RequestError:
    place = place_of_half(body)
    return RequestError(
        f"Invalid '{place}': expected a text, but got one with half of a surrogate pair in it "
        r'(as "\ud800" is, or a byte that is no UTF-8).',
        code="invalid_value",
        param=place,
    )


def validate(kind: str, body: Mapping[str, Any]) -> JobRequest:
    """Reads a body as the request of its kind; raises RequestError as `validate_as` does."""
    if kind not in KINDS:
        raise RequestError(
            f"Unknown kind of job: {kind!r}. Known kinds: {', '.join(KINDS)}.",
            code="invalid_value",
            param="kind",
        )
    return validate_as(KINDS[kind], body)


def validate_as(model: type[RequestType], body: Mapping[str, Any]) -> RequestType:
    """Reads a body as a certain kind of request.

    Raises RequestError with the first fault in the order of the fields, and nothing else: one bad
    body must never be the end of the worker, or of the file, that it came with.
    """
    try:
        request = read_as(model, body)
        request.check()
    except RequestError:
        raise
    except (ValueError, ArithmeticError, RecursionError) as error:
        # A value that no check foresaw: text that is none, an endless number, nested too deep.
        raise RequestError(
            f"The body cannot be read: {type(error).__name__}: {error}.", code="invalid_value"
        ) from None
    return request


def read_as(model: type[Model], body: Mapping[str, Any]) -> Model:
    """Reads a body as a pydantic model; raises RequestError with the first fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        # Unknown fields come last, as pydantic reports them.
        raise _request_error(error.errors()[0], body) from None


def _request_error(fault: ErrorDetails, body: Mapping[str, Any]) -> RequestError:
    """Translates one of pydantic's faults into OpenAI's code, param and wording."""
    param = _param(fault, body)
    value = fault["input"]
    context = fault.get("ctx", {})
    if isinstance(error := context.get("error"), RequestError):
        return error
    match fault["type"]:
        case "string_unicode":
            return _half_of_a_pair(body)
        case "missing" | "union_tag_not_found":
            if fault["type"] == "union_tag_not_found":
                param = f"{param}.{_tag_field(context)}"
            message, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
        case "extra_forbidden":
            message = f"Unrecognized request argument supplied: {param}"
            code = "unknown_parameter"
        case "less_than_equal" | "greater_than_equal" | "greater_than" | "less_than":
            message, code = _out_of_range(fault["type"], param, value, context)
        case "too_long" if isinstance(value, Mapping):
            message = (
                f"Invalid '{param}': too many properties. Expected an object with at most "
                f"{context['max_length']} properties, but got an object with {len(value)} "
                "properties instead."
            )
            code = "object_above_max_properties"
        case "too_long":
            most, length = context["max_length"], context["actual_length"]
            message = (
                f"Invalid '{param}': array too long. Expected an array with maximum length {most}, "
                f"but got an array with length {length} instead."
            )
            code = "array_above_max_length"
        case "too_short":
            message = (
                f"Invalid '{param}': empty array. Expected an array with minimum length "
                f"{context['min_length']}, but got an empty array instead."
            )
            code = "empty_array"
        case "string_too_long":
            message = (
                f"Invalid '{param}': string too long. Expected a string with maximum length "
                f"{context['max_length']}, but got a string with length {len(value)} instead."
            )
            code = "string_above_max_length"
        case "literal_error" | "union_tag_invalid":
            if fault["type"] == "union_tag_invalid":
                param, value = f"{param}.{_tag_field(context)}", context["tag"]
            message, code = _not_one_of(param, value, context)
        case kind if kind.endswith(("_type", "_parsing")) or kind == "is_instance_of":
            message = (
                f"Invalid type for '{param}': expected {_EXPECTED.get(kind, 'another type')}, "
                f"but got {_name_of(value)} instead."
            )
            code = "invalid_type"
        case _:
            message, code = f"Invalid '{param}': {fault['msg']}.", "invalid_value"
    return RequestError(message, code=code, param=param)


def _param(fault: ErrorDetails, body: Any) -> str:
    """Writes a fault's place as `messages[0].content[1].type`.

    Pydantic puts the tags of unions between the real steps; a step that the body does not have is
    one of those, unless it is the last one of a missing field.
    """
    path = ""
    here = body
    missing = len(fault["loc"]) - 1 if fault["type"] == "missing" else None
    for position, step in enumerate(fault["loc"]):
        if isinstance(step, int) and isinstance(here, list):
            path += f"[{step}]"
            here = here[step] if step < len(here) else None
        elif isinstance(here, Mapping) and (step in here or position == missing):
            path += f".{step}" if path else str(step)
            here = here.get(step)
    return path


def _tag_field(context: Mapping[str, Any]) -> str:
    """Names the field by which the members of a union are told apart."""
    return str(context["discriminator"]).strip("'")


def _out_of_range(kind: str, param: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    above = kind.startswith("less")
    sign, limit = next(
        (sign, context[name])
        for name, sign in (("le", "<="), ("ge", ">="), ("gt", ">"), ("lt", "<"))
        if name in context
    )
    number = "decimal" if isinstance(limit, float) else "integer"
    side, bound = ("above", "maximum") if above else ("below", "minimum")
    limit = f"{limit:g}" if isinstance(limit, float) else limit
    message = (
        f"Invalid '{param}': {number} {side} {bound} value. "
        f"Expected a value {sign} {limit}, but got {short(value)} instead."
    )
    return message, f"{number}_{side}_{bound[:3]}_value"


def _not_one_of(param: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    if ".content[" in param and param.endswith(".type") and isinstance(value, str):
        return (
            f"Invalid content type: '{short(value)}' at '{param}'. "
            "This is a text model: only 'text' parts are supported."
        ), "invalid_value"
    allowed = context.get("expected_tags") or context.get("expected", "")
    message = f"Invalid value: {short(value)!r} at '{param}'. Supported values are: {allowed}."
    return message + _instead(param, value), "invalid_value"


def _instead(param: str, value: Any) -> str:
    """Says what to send for a kind of tool that there is not."""
    if not (param.startswith("tool") and param.endswith(".type")):
        return ""
    if value == "custom":
        return " For a tool that takes any text, send a function with one parameter, a string."
    return " OpenAI's own tools run at OpenAI; here, the caller runs every tool, as a function."


_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _name_of(value: Any) -> str:
    """Names a JSON value's type as OpenAI's messages do."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def short(value: Any, most: int = 80) -> str:
    """Shows a value in an error, cut off where it is long."""
    try:
        text = str(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        text = "a number with too many digits"
    except RecursionError:
        text = "a value nested too deep"
    return text if len(text) <= most else text[: most - 1] + "…"
