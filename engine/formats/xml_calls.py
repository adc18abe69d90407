"""Calls that look like XML: elements, one a parameter. Strings stand in them raw, all else as JSON.

What is written so is read here, too: mlx-lm's parsers guess at the types, by the text (a string
"null" is None to them), and by plain types in schemas (they follow no references).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_rq.engine.formats.calls import Call
from mlx_rq.engine.formats.lark import Lark, quoted

_KEY = r"[^\s<>\"'&=]+"
_OF_TEXTS = ("format", "maxLength", "minLength", "pattern")


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Writes a grammar for such calls, and reads what was written by it."""

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
        begin = re.escape(self.parameter).replace(re.escape("{key}"), f"(?:{_KEY})")
        return f"{begin}.*?(?:{re.escape(self.parameter_end)}|\\Z)"

    def can_write(self, key: str) -> bool:
        """Says whether the name of an argument can stand in a call as it is."""
        return re.fullmatch(_KEY, key) is not None

    def unenforced(self, call: Call) -> list[str]:
        """Says what of a call's schema its grammar does not say."""
        texts = [schema for schema in call.properties.values() if _is_raw(schema)]
        if any(key in text for text in texts if isinstance(text, dict) for key in _OF_TEXTS):
            return [
                *call.notes,
                "how texts look, in this model's calls ('pattern', 'maxLength', …)",
            ]
        return call.notes

    def __call__(self, lark: Lark, calls: Sequence[Call], several: bool) -> str:
        one = lark.one_of(self._call(lark, call) for call in calls)
        body = lark.several(one, "\n") if several and self.inside else one
        around = quoted(self.around) if self.around else ""
        return f"{around} {body} {around}"

    def _call(self, lark: Lark, call: Call) -> str:
        pieces = [lark.literal(self.head.format(name=call.name))]
        for key, schema in call.properties.items():
            if schema is False:
                continue
            head = lark.literal(self.parameter.format(key=key))
            piece = f"{head} {self._value(lark, schema, call)}"
            pieces.append(piece if key in call.required else f"({piece})?")
        return " ".join([*pieces, lark.literal(self.end)])

    def _value(self, lark: Lark, schema: Any, call: Call) -> str:
        end = lark.literal(self.parameter_end)
        if texts := _texts(schema):
            return f"{lark.one_of(map(quoted, texts))} {end}"
        if _is_raw(schema):
            return lark.until(self.parameter_end)
        return f"{lark.json(call.within(schema), lenient=call.lenient)} {end}"

    def read(self, body: str, calls: Sequence[Call]) -> list[dict[str, Any]] | None:
        """Reads what stands between two marks; None where the grammar would not have it so."""
        by_head = {self.head.format(name=call.name): call for call in calls}
        heads = re.compile("|".join(map(re.escape, sorted(by_head, key=len, reverse=True))))
        begin = re.escape(self.parameter).replace(re.escape("{key}"), f"(?P<key>{_KEY})")
        parameter = re.compile(f"{begin}(?P<value>.*?){re.escape(self.parameter_end)}", re.DOTALL)
        found = []
        rest = body.lstrip()
        while rest:
            head = heads.match(rest)
            if head is None:
                return None
            call, rest = by_head[head[0]], rest[head.end() :]
            arguments: dict[str, Any] = {}
            while argument := parameter.match(rest):
                key, rest = argument["key"], rest[argument.end() :]
                try:
                    arguments[key] = _read(argument["value"], call.properties.get(key))
                except ValueError:
                    return None
            if not rest.startswith(self.end):
                return None
            rest = rest[len(self.end) :].lstrip()
            found.append({"name": call.name, "arguments": arguments})
        return found


def _read(text: str, schema: Any) -> Any:
    return text if _is_raw(schema) else json.loads(text)


def _is_raw(schema: Any) -> bool:
    """Says whether a parameter is written as the text that it is, and not as JSON."""
    return bool(_texts(schema)) or may_be_text(schema)


def _texts(schema: Any) -> list[str]:
    """Lists the texts that a parameter may be, where its schema lists texts."""
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, Mapping) else []
    return values if values and all(isinstance(value, str) for value in values) else []


def may_be_text(schema: Any) -> bool:
    """Says whether a schema says that a value may be a text; of references it is not looked for."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        return "string" in kinds
    return any(map(may_be_text, schema.get("anyOf", ())))
