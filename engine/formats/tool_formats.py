"""How models write tool calls: a grammar for each format that mlx-lm can parse.

A format is known by the name of its parser in mlx-lm (`mlx_lm.tool_parsers`). Between the markers
that the tokenizer names stands the format's own writing: JSON, XML-like, or Python-like. Formats
that are not here (gemma's, kimi_k3) are not constrained; their calls are parsed, and their
arguments validated, all the same.
"""

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_rq.engine.formats.lark import Lark, quoted
from mlx_rq.jobs.openai.schemas import Schema
from mlx_rq.jobs.openai.structured import Function

JSON_STRING = r'"(?:[^"\\]|\\.)*(?:"|\Z)'
"""A string, or what has been written of one."""

_PLAIN_KEY = r"[^\s<>\"'&=]+"
_PYTHON_ESCAPES = '"\\bfnrt'
"""JSON's escapes that mean the same in Python: not the solidus, nor surrogates written as \\u."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function that may be called: its name, its closed or open schema, how strictly."""

    name: str
    schema: Schema
    lenient: bool


Writer = Callable[[Lark, Sequence[Call], bool], str]
"""Writes the piece between two markers, for one call or (where the flag is set) several."""


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written. `sections`: each call has markers of its own, `between` them this."""

    write: Writer
    sections: bool = True
    between: str = "\n"

    @property
    def argument(self) -> str:
        """A pattern of what may hold any text, marks of calls too: a string, a raw argument."""
        return self.write.argument if isinstance(self.write, _Xml) else JSON_STRING

    @property
    def argument_end(self) -> str:
        """What follows an argument that is raw text; empty where all arguments are JSON."""
        return self.write.parameter_end if isinstance(self.write, _Xml) else ""


def call_of(function: Function, schema: Schema) -> Call:
    return Call(function.name, schema, not function.strict)


def _json_call(lark: Lark, call: Call) -> str:
    head = quoted(f'{{"name": {json.dumps(call.name)}, "arguments": ')
    return f"{head} {lark.json(call.schema, lenient=call.lenient)} {quoted('}')}"


def _several(lark: Lark, one: str, between: str, several: bool) -> str:
    return f"{one} ({lark.literal(between)} {one})*" if several else one


def _json(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    one = lark.one_of(_json_call(lark, call) for call in calls)
    return f"{quoted(chr(10))} {one} {quoted(chr(10))}"


def _json_array(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    one = lark.one_of(_json_call(lark, call) for call in calls)
    return f"{quoted('[')} {_several(lark, one, ', ', several)} {quoted(']')}"


def _named_json(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    """Mistral's: `name[ARGS]{…}`."""
    return lark.one_of(
        f"{lark.literal(f'{call.name}[ARGS]')} {lark.json(call.schema, lenient=call.lenient)}"
        for call in calls
    )


def _kimi(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    begin, middle, end = (
        lark.literal(f"<|tool_call{name}|>") for name in ("_begin", "_argument_begin", "_end")
    )
    number = lark.rule("/[0-9]{1,3}/", terminal=True)
    one = lark.one_of(
        f"{begin} {quoted(f'functions.{call.name}:')} {number} {middle} "
        f"{lark.json(call.schema, lenient=call.lenient)} {end}"
        for call in calls
    )
    return f"{one}+" if several else one


@dataclass(frozen=True, slots=True)
class _Xml:
    """A call as elements, one a parameter: strings stand in them raw, all else as JSON."""

    head: str
    parameter: str
    parameter_end: str
    end: str = ""
    around: str = "\n"
    inside: bool = False
    """Whether several calls share one pair of markers."""

    @property
    def argument(self) -> str:
        """A pattern of one parameter: what stands in it raw ends where the parameter does."""
        begin = re.escape(self.parameter).replace(re.escape("{key}"), _PLAIN_KEY)
        return f"{begin}.*?(?:{re.escape(self.parameter_end)}|\\Z)"

    def __call__(self, lark: Lark, calls: Sequence[Call], several: bool) -> str:
        one = lark.one_of(self._call(lark, call) for call in calls)
        body = _several(lark, one, "\n", several and self.inside)
        around = quoted(self.around) if self.around else ""
        return f"{around} {body} {around}"

    def _call(self, lark: Lark, call: Call) -> str:
        required = call.schema.get("required", ())
        pieces = [lark.literal(self.head.format(name=call.name))]
        for key, schema in _properties(call).items():
            head = lark.literal(self.parameter.format(key=key))
            piece = f"{head} {self._value(lark, schema, call)}"
            pieces.append(piece if key in required else f"({piece})?")
        return " ".join([*pieces, lark.literal(self.end)])

    def _value(self, lark: Lark, schema: Any, call: Call) -> str:
        end = lark.literal(self.parameter_end)
        texts = _texts(schema)
        if texts:
            return f"{lark.one_of(map(quoted, texts))} {end}"
        if _may_be_text(schema):
            return lark.until(self.parameter_end)
        return f"{lark.json(_within(schema, call.schema), lenient=call.lenient)} {end}"


def _pythonic(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    """LFM2's: `[name(key="value", other=1)]`."""
    one = lark.one_of(
        f"{quoted(f'{call.name}(')} {_keywords(lark, call)} {quoted(')')}" for call in calls
    )
    return f"{quoted('[')} {_several(lark, one, ', ', several)} {quoted(']')}"


def _keywords(lark: Lark, call: Call) -> str:
    """Keyword arguments: the required ones in order, then any of the others in order."""
    required: list[str] = []
    optional: list[str] = []
    for key, schema in _properties(call).items():
        value = lark.json(
            _within(schema, call.schema), lenient=call.lenient, json_allowed_escapes=_PYTHON_ESCAPES
        )
        wanted = key in call.schema.get("required", ())
        (required if wanted else optional).append(f"{quoted(f'{key}=')} {value}")
    comma = quoted(", ")
    if required:
        more = [f"({comma} {piece})?" for piece in optional]
        return " ".join([f" {comma} ".join(required), *more])
    head = tail = ""  # from the last argument to the first: with it, or without
    for piece in reversed(optional):
        first = f"{piece} {tail}"
        head = lark.rule(f"{first} | {head}" if head else first)
        tail = lark.rule(f"({comma} {piece})? {tail}")
    return f"({head})?" if head else ""


def mended(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Reads arguments that a parser left as text, though their schema wants no text.

    The parsers of the XML-like formats know plain types only, no references to definitions.
    """
    properties = schema.get("properties", {})
    read = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, str) and key in properties and not _may_be_text(properties[key]):
            with suppress(ValueError):
                read[key] = json.loads(value)
    return read


def _properties(call: Call) -> Mapping[str, Any]:
    properties = call.schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _within(schema: Any, root: Schema) -> dict[str, Any]:
    """Makes a part of a schema stand alone: the definitions that it refers to come along."""
    part = schema if isinstance(schema, dict) else {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root} | part


def _texts(schema: Any) -> list[str]:
    """Lists the texts that a parameter may be, where its schema lists texts."""
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, dict) else []
    return values if values and all(isinstance(value, str) for value in values) else []


def _may_be_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        return "string" in kinds
    return any(_may_be_text(one) for one in schema.get("anyOf", ()))


_GLM = _Xml("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", around="")
_FORMATS = {
    "json_tools": Format(_json),
    "qwen3_coder": Format(
        _Xml("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>")
    ),
    "glm47": Format(_GLM),
    "longcat": Format(
        _Xml(
            "{name}\n",
            "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
            around="",
        )
    ),
    "minimax_m2": Format(
        _Xml(
            '<invoke name="{name}">\n',
            '<parameter name="{key}">',
            "</parameter>\n",
            "</invoke>",
            inside=True,
        ),
        sections=False,
    ),
    "muse_spark": Format(
        _Xml(
            '<atem:invoke name="{name}">\n',
            '<atem:parameter name="{key}">',
            "</atem:parameter>\n",
            "</atem:invoke>",
            inside=True,
        ),
        sections=False,
    ),
    "minicpm5": Format(
        _Xml('"{name}">', '<param name="{key}">', "</param>", around=""), between=""
    ),
    "kimi_k2": Format(_kimi, sections=False),
    "pythonic": Format(_pythonic, sections=False),
}


def format_of(parser: str, specials: Mapping[str, int]) -> Format | None:
    """Finds the format of a parser by name; None where its calls cannot be constrained."""
    if parser == "mistral":
        # The older models write an array, the newer ones, which have this token, a name and JSON.
        newer = "[ARGS]" in specials
        return Format(_named_json, between="") if newer else Format(_json_array, sections=False)
    return _FORMATS.get(parser)


def can_write(format: Format, calls: Sequence[Call]) -> bool:
    """Says whether the names in these calls can stand in the format as they are."""
    keys = [key for call in calls for key in _properties(call)]
    if format.write is _pythonic:
        names = [*keys, *(call.name for call in calls)]
        return all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    if isinstance(format.write, _Xml):
        return all(re.fullmatch(_PLAIN_KEY, key) for key in keys)
    return True
