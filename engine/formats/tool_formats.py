"""How models write tool calls: a grammar for each format that mlx-lm can parse.

A format is known by the name of its parser in mlx-lm (`mlx_lm.tool_parsers`). Between the markers
that the tokenizer names stands the format's own writing: JSON, XML-like, or Python-like. Formats
that are not here (gemma's, kimi_k3) are not constrained; their calls are parsed, and their
arguments validated, all the same.
"""

import json
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_rq.engine.formats.calls import Call
from mlx_rq.engine.formats.lark import Lark, quoted
from mlx_rq.engine.formats.xml_calls import XmlCalls

JSON_STRING = r'"(?:[^"\\]|\\.)*(?:"|\Z)'
"""A string, or what has been written of one."""

_PYTHON_ESCAPES = '"\\bfnrt'
"""JSON's escapes that mean the same in Python: not the solidus, nor surrogates written as \\u."""


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
        return self.write.argument if isinstance(self.write, XmlCalls) else JSON_STRING

    def read(self, body: str, calls: Sequence[Call]) -> list[dict[str, Any]] | None:
        """Reads calls as they were written here; None where that is left to mlx-lm's parser."""
        return self.write.read(body, calls) if isinstance(self.write, XmlCalls) else None

    def unenforced(self, call: Call) -> list[str]:
        """Says what of a call's schema cannot be said in the format."""
        if isinstance(self.write, XmlCalls):
            return self.write.unenforced(call)
        return call.notes if self.write is _pythonic else []

    @property
    def argument_end(self) -> str:
        """What follows an argument that is raw text; empty where all arguments are JSON."""
        return self.write.parameter_end if isinstance(self.write, XmlCalls) else ""


def _json_call(lark: Lark, call: Call) -> str:
    head = quoted(f'{{"name": {json.dumps(call.name)}, "arguments": ')
    return f"{head} {lark.json(call.schema, lenient=call.lenient)} {quoted('}')}"


def _json(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    one = lark.one_of(_json_call(lark, call) for call in calls)
    return f"{quoted(chr(10))} {one} {quoted(chr(10))}"


def _json_array(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    one = lark.one_of(_json_call(lark, call) for call in calls)
    body = lark.several(one, ", ") if several else one
    return f"{quoted('[')} {body} {quoted(']')}"


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


def _pythonic(lark: Lark, calls: Sequence[Call], several: bool) -> str:
    """LFM2's: `[name(key="value", other=1)]`."""
    one = lark.one_of(
        f"{quoted(f'{call.name}(')} {_keywords(lark, call)} {quoted(')')}" for call in calls
    )
    body = lark.several(one, ", ") if several else one
    return f"{quoted('[')} {body} {quoted(']')}"


def _keywords(lark: Lark, call: Call) -> str:
    """Keyword arguments: the required ones in order, then any of the others in order."""
    required: list[str] = []
    optional: list[str] = []
    for key, schema in call.properties.items():
        if schema is False:
            continue
        value = lark.json(
            call.within(schema), lenient=call.lenient, json_allowed_escapes=_PYTHON_ESCAPES
        )
        (required if key in call.required else optional).append(f"{quoted(f'{key}=')} {value}")
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


_GLM = XmlCalls("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", around="")
_FORMATS = {
    "json_tools": Format(_json),
    "qwen3_coder": Format(
        XmlCalls("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>")
    ),
    "glm47": Format(_GLM),
    "longcat": Format(
        XmlCalls(
            "{name}\n",
            "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
            around="",
        )
    ),
    "minimax_m2": Format(
        XmlCalls(
            '<invoke name="{name}">\n',
            '<parameter name="{key}">',
            "</parameter>\n",
            "</invoke>",
            inside=True,
        ),
        sections=False,
    ),
    "muse_spark": Format(
        XmlCalls(
            '<atem:invoke name="{name}">\n',
            '<atem:parameter name="{key}">',
            "</atem:parameter>\n",
            "</atem:invoke>",
            inside=True,
        ),
        sections=False,
    ),
    "minicpm5": Format(
        XmlCalls('"{name}">', '<param name="{key}">', "</param>", around=""), between=""
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
    """Says whether these calls can be written in the format, and their names as they are."""
    keys = [key for call in calls for key in call.properties]
    if isinstance(format.write, XmlCalls):
        names_can = all(map(format.write.can_write, keys))
    elif format.write is _pythonic:
        names = [*keys, *(call.name for call in calls)]
        names_can = all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    else:
        return True
    return names_can and not any(call.needs_unlisted for call in calls)
