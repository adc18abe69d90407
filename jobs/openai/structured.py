"""The fields of a body that say what shape the answer must have: formats, tools, constraints.

Source: OpenAI's API reference for chat completions (response_format, tools, tool_choice); vLLM's
for `structured_outputs` and the older `guided_*` names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import Name, Strict
from mlx_rq.jobs.openai.schemas import MAX_ENUM_VALUES, why_refused

MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Regex = Annotated[str, StringConstraints(min_length=1, max_length=MAX_REGEX_CHARACTERS)]
Grammar = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choice = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]],
    Field(min_length=1, max_length=MAX_ENUM_VALUES),
]
SchemaOrText = Annotated[
    Annotated[str, Tag("string")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(lambda value: "string" if isinstance(value, str) else "object"),
]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Strict):
    """One of the four: a JSON schema, a regular expression, a list of texts, a Lark grammar."""

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Choice | None = None
    grammar: Grammar | None = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_shape(value: Any) -> str:
    """Names the form that a `tool_choice` has: of a chat or of a response."""
    if isinstance(value, dict):
        return "allowed" if value.get("type") == "allowed_tools" else "named"
    return "mode"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(choice_shape),
]


class ReasoningLength(Strict):
    """The least and the most characters that a thinking model may reason before it answers."""

    min: Annotated[int, Field(ge=0, le=100_000)] = 0
    max: Annotated[int, Field(ge=0, le=100_000)] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer must be, whichever field asked for it.

    `value` is the schema of a "json" shape, else the regular expression, the texts, the grammar.
    Not `strict`: schema keywords that cannot be enforced are only checked at the end. `what` names
    the shape in errors, `param` the field.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    strict: bool
    what: str
    param: str

    def error(self, fault: str) -> RequestError:
        """Says in OpenAI's words what is wrong with the shape."""
        noun = "schema" if self.kind == "json" else self.kind
        return RequestError(f"Invalid {noun} for {self.what}: {fault}", code=None, param=self.param)


def function_error(index: int, name: str, fault: str) -> RequestError:
    """Says in OpenAI's words what is wrong with a function's parameters."""
    return RequestError(
        f"Invalid schema for function '{name}': {fault}",
        code="invalid_function_parameters",
        param=f"tools[{index}].function.parameters",
    )


def shape_of(
    response_format: ResponseFormat | None,
    outputs: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> Shape | None:
    """Finds the one shape that a body asks for; `guided` holds the `guided_*` fields by name.

    Raises RequestError where there is more than one.
    """
    shapes = []
    match response_format:
        case JsonObjectFormat():
            what = "response_format 'json_object'"
            shapes.append(Shape("json", {"type": "object"}, True, what, "response_format"))
        case JsonSchemaFormat(json_schema=wanted):
            schema = {"type": "object"} if wanted.schema_ is None else wanted.schema_
            what = f"response_format '{wanted.name}'"
            shapes.append(Shape("json", schema, bool(wanted.strict), what, "response_format"))
    given = {} if outputs is None else outputs.model_dump(by_alias=True)
    fields = {f"structured_outputs.{kind}": value for kind, value in given.items()}
    for name, value in {**fields, **guided}.items():
        if value is not None:
            kind: Any = name.removeprefix("structured_outputs.").removeprefix("guided_")
            schema = _read(value, name) if kind == "json" else value
            shapes.append(Shape(kind, schema, True, name, name))
    if len(shapes) > 1:
        raise RequestError(
            f"An answer can have one shape only, but {' and '.join(s.what for s in shapes)} ask "
            "for different ones.",
            code="invalid_value",
            param=shapes[1].param,
        )
    if outputs is not None and not shapes:
        raise RequestError(
            "Invalid 'structured_outputs': expected one of 'json', 'regex', 'choice', 'grammar'.",
            code="invalid_value",
            param="structured_outputs",
        )
    return shapes[0] if shapes else None


def _read(schema: Any, param: str) -> Any:
    """Reads a schema that was sent as a string, as vLLM allows."""
    if not isinstance(schema, str):
        return schema
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"Invalid '{param}': the string is not JSON: {error}.",
            code="invalid_value",
            param=param,
        ) from None
    if not isinstance(read, dict):
        raise RequestError(
            f"Invalid '{param}': expected a JSON schema, an object.",
            code="invalid_value",
            param=param,
        )
    return read


def check_shape(shape: Shape) -> None:
    """Raises RequestError where a schema in a shape is refused."""
    if shape.kind == "json" and (fault := why_refused(shape.value)):
        raise shape.error(fault)
    if shape.kind == "grammar":
        for schema in _embedded_schemas(shape):
            if fault := why_refused(schema):
                raise shape.error(f"of a schema in it: {fault}")


def _embedded_schemas(shape: Shape) -> list[Any]:
    """Reads the schemas that a Lark grammar embeds with `%json`."""
    schemas = []
    for place in str(shape.value).split("%json")[1:]:
        try:
            schemas.append(json.JSONDecoder().raw_decode(place.lstrip())[0])
        except (ValueError, RecursionError):
            raise shape.error("a '%json' in it is not followed by a JSON schema.") from None
    return schemas


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises RequestError where a tool's schema is refused, or the choice names none of them."""
    names = [tool.function.name for tool in tools]
    for index, tool in enumerate(tools):
        if tool.function.name in names[:index]:
            raise RequestError(
                f"Invalid 'tools': the function name '{tool.function.name}' is used twice.",
                code="invalid_value",
                param=f"tools[{index}].function.name",
            )
        parameters = tool.function.parameters or {}
        if fault := why_refused(parameters):
            raise function_error(index, tool.function.name, fault)
        kinds = parameters.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            fault = f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {kinds!r}'."
            raise function_error(index, tool.function.name, fault)
    match choice:
        case "required" if not tools:
            raise RequestError(
                "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
                "specified.",
                code=None,
                param="tool_choice",
            )
        case NamedTool():
            chosen = [choice.function.name]
        case AllowedToolsChoice():
            chosen = [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            chosen = []
    for name in chosen:
        if name not in names:
            raise RequestError(
                f"Tool choice '{name}' not found in 'tools' parameter.",
                code=None,
                param="tool_choice",
            )
