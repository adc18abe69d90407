"""Writes the grammar of an answer: reasoning, then free text, tool calls or a shape.

    start: [reasoning] ( free text [calls] | calls | shape )

Which parts there are depends on the request (`tool_choice`, `response_format`, …) and on the model
(`ModelFormat`). What needs no grammar gets none: such sequences stay free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_rq.engine.formats.calls import Call
from mlx_rq.engine.formats.lark import Lark, quoted
from mlx_rq.engine.formats.model_format import ModelFormat
from mlx_rq.engine.formats.tool_formats import Format, can_write
from mlx_rq.engine.structured.closing import closed
from mlx_rq.engine.structured.enforceable import enforceable
from mlx_rq.engine.structured.json_schema import Check, SchemaFault
from mlx_rq.engine.structured.references import TooManySteps, parts_of
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import Request
from mlx_rq.jobs.openai.schemas import Schema
from mlx_rq.jobs.openai.structured import (
    AllowedToolsChoice,
    NamedTool,
    ReasoningLength,
    Shape,
    Tool,
    function_error,
)

_Error = Callable[[str], RequestError]


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A part of a grammar that compiles by itself, and the error that is due if it does not."""

    lark: str
    error: _Error
    schema: Schema | None = None
    enforced: Schema | None = None
    """The schema as the grammar has it."""
    unenforced: tuple[str, ...] = ()
    """What of the schema is only checked at the end, though it may be strict."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar with its parts, which tell whose fault it is when it does not compile.

    `lark` is None where the text is free, and only the arguments of its calls are validated.
    """

    lark: str | None
    parts: tuple[GrammarPart, ...]
    calls: tuple[Call, ...] = ()
    """What may be called."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may call, and how: as `tool_choice` says."""

    mode: str
    """none, auto, required, or named (exactly one call, of the one tool)."""
    usable: tuple[tuple[int, Tool], ...]
    """With the places that they have in the request."""
    several: bool


def tools_of(request: Request) -> Tools:
    """Reads tool_choice and parallel_tool_calls; mode is "none" where there are no tools."""
    tools = tuple(enumerate(request.tools or ()))
    if not tools:
        return Tools("none", (), False)
    several = request.parallel_tool_calls is not False
    match request.tool_choice:
        case NamedTool(function=chosen):
            named = tuple(item for item in tools if item[1].function.name == chosen.name)
            return Tools("named", named, False)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {tool.function.name for tool in allowed.tools}
            usable = tuple(item for item in tools if item[1].function.name in names)
            return Tools(allowed.mode, usable, several)
        case "none":
            return Tools("none", (), False)
        case mode:
            return Tools(mode or "auto", tools, several)


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: always an object; closed where the tool is strict."""
    return closed(_arguments(tool)) if tool.function.strict else _arguments(tool)


def _arguments(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {**({} if "type" in parameters else {"type": "object"}), **parameters}
    schema["type"] = "object"  # of several types, the only one that arguments can have
    return schema


_Enforced = tuple[dict[str, Any], list[str]]
"""A schema as it is enforced, and what of it is not, in words."""


def _enforced_shape(shape: Shape) -> _Enforced:
    return _enforced(shape.value, bool(shape.strict), shape.error)


def _enforced_tool(index: int, tool: Tool) -> _Enforced:
    return _enforced(_arguments(tool), bool(tool.function.strict), _error_of(index, tool))


def _enforced(schema: Schema, strict: bool, error: _Error) -> _Enforced:
    try:
        return enforceable(schema, close=strict)
    except (RecursionError, TooManySteps):
        raise error("it refers to its own parts too often; make it simpler.") from None
    except Exception:  # it is rewritten as if it were valid: say what is wrong with it
        try:
            Check(schema)
        except SchemaFault as fault:
            raise error(str(fault)) from None
        raise


def _call_of(index: int, tool: Tool) -> Call:
    """Describes the calls of a tool by what its schema comes to, once its parts are merged."""
    schema, _ = _enforced_tool(index, tool)
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for part in parts_of(schema, schema, sure=True):
        listed = part.get("properties")
        for name, one in listed.items() if isinstance(listed, dict) else ():
            known = [other for other in (properties.get(name, True), one) if other is not True]
            properties[name] = {"allOf": known} if len(known) > 1 else known[0] if known else True
        names = part.get("required")
        required.update(map(str, names) if isinstance(names, list) else ())
    properties = {**properties, **dict.fromkeys(sorted(required - properties.keys()), True)}
    strict = bool(tool.function.strict)
    return Call(tool.function.name, schema, not strict, properties, frozenset(required))


def _error_of(index: int, tool: Tool) -> _Error:
    return partial(function_error, index, tool.function.name)


def grammar_of(
    request: Request, model_format: ModelFormat, reasoning: bool | None
) -> Grammar | None:
    """Writes the grammar for a request's answers; None where there is nothing to say.

    `reasoning` as `reasoning_is_open` says. Raises RequestError where the model cannot do it.
    """
    shape, tools = request.shape, tools_of(request)
    given = bool(request.tools)
    length = request.reasoning_length
    if length is not None and (model_format.think_start is None or reasoning is False):
        raise RequestError(
            "Invalid 'reasoning_length': there is no reasoning to bound, because the model does "
            "not reason, or its reasoning is switched off.",
            code="invalid_value",
            param="reasoning_length",
        )
    lark = Lark(model_format.specials)
    calls = tuple(_call_of(*one) for one in tools.usable)
    format = (
        model_format.format
        if model_format.format and can_write(model_format.format, calls)
        else None
    )
    free = tools.mode == "auto" and format is None
    if shape is None and length is None and not given:
        return None
    if shape is None and length is None and free:
        return Grammar(None, _parts(model_format, shape, tools, calls, format), calls)
    body = _body(lark, model_format, shape, tools, calls, format)
    start = f"{_reasoning(lark, model_format, reasoning, length, shape or calls)} {body}"
    return Grammar(lark.grammar(start), _parts(model_format, shape, tools, calls, format), calls)


def _body(
    lark: Lark,
    model_format: ModelFormat,
    shape: Shape | None,
    tools: Tools,
    calls: Sequence[Call],
    format: Format | None,
) -> str:
    """What comes after the reasoning."""
    shaped = shape and _shaped(lark, shape)
    if tools.mode == "none":
        return shaped or lark.without(model_format.call_start)
    after_start = _calls(lark, model_format, format, calls, tools.several)
    whole = f"{lark.literal(model_format.call_start)} {after_start}"
    if tools.mode != "auto":
        return whole
    if shaped:
        return lark.one_of([whole, shaped])
    if format is None:
        return lark.anything()
    text_then_calls = f"{lark.until(model_format.call_start)} {after_start}"
    return lark.one_of([lark.without(model_format.call_start), text_then_calls])


def _calls(
    lark: Lark,
    model_format: ModelFormat,
    format: Format | None,
    calls: Sequence[Call],
    several: bool,
) -> str:
    """Tool calls, from after the first start mark to the last end mark."""
    if format is None:
        return lark.anything()
    end = lark.literal(model_format.call_end)
    one = lark.rule(f"{format.write(lark, calls, several)} {end}")
    if not several or not format.sections:
        return one
    return f"{one} ({lark.literal(format.between + model_format.call_start)} {one})*"


def _shaped(lark: Lark, shape: Shape) -> str:
    match shape.kind:
        case "json":
            return lark.json(_enforced_shape(shape)[0], lenient=not shape.strict)
        case "regex":
            return lark.regex(shape.value)
        case "choice":
            return lark.one_of(map(quoted, shape.value))
        case "grammar":
            return lark.nested(shape.value)


def _reasoning(
    lark: Lark,
    model_format: ModelFormat,
    is_open: bool | None,
    length: ReasoningLength | None,
    structured: object,
) -> str:
    """The reasoning, if the model does any; before a structure, a few line breaks may follow it."""
    if model_format.think_start is None or model_format.think_end is None or is_open is False:
        return ""
    least, most = (0, None) if length is None else (length.min, length.max)
    reasoning = lark.until(model_format.think_end, least, most)
    if structured:
        reasoning += " " + lark.rule(r"/[ \n]{0,4}/", terminal=True)
    if is_open:
        return reasoning
    whole = f"{lark.literal(model_format.think_start)} {reasoning}"
    return whole if least else f"({whole})?"


def _parts(
    model_format: ModelFormat,
    shape: Shape | None,
    tools: Tools,
    calls: Sequence[Call],
    format: Format | None,
) -> tuple[GrammarPart, ...]:
    parts = []
    if shape is not None:
        lark = Lark(model_format.specials)
        text = lark.grammar(_shaped(lark, shape))
        if shape.kind == "json":
            enforced, unenforced = _enforced_shape(shape)
            part = GrammarPart(text, shape.error, shape.value, enforced, tuple(unenforced))
        else:
            part = GrammarPart(text, shape.error)
        parts.append(part)
    for (index, tool), call in zip(tools.usable, calls, strict=True):
        lark = Lark(model_format.specials)
        text = lark.grammar(lark.json(call.schema, lenient=call.lenient))
        enforced, unenforced = _enforced_tool(index, tool)
        unenforced = [*unenforced, *(format.unenforced(call) if format else ())]
        error = _error_of(index, tool)
        parts.append(GrammarPart(text, error, schema_of(tool), enforced, tuple(unenforced)))
    return tuple(parts)
