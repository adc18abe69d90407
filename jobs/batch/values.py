"""Writes the values of tables as text: in prompts, in CSV, and in columns that hold JSON."""

import base64
import json
from collections.abc import Callable
from typing import Any

Binary = Callable[[bytes], str]


def utf8(value: bytes) -> str:
    """Reads text that was stored as bytes; raises UnicodeDecodeError where they are none."""
    return value.decode()


def utf8_or_base64(value: bytes) -> str:
    """Writes bytes as the text that they are, or in base64."""
    try:
        return utf8(value)
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def plain_text(value: Any, binary: Binary) -> str:
    """Writes a value without quotes around it: nothing for null, JSON for lists and objects.

    Raises ValueError, TypeError or RecursionError where that cannot be, as at a deep nesting.
    """
    match value:
        case str():
            return value
        case None:
            return ""
        case bytes():
            return binary(value)
        case bool() | list() | tuple() | dict():
            return json_of(value, binary)
        case _ if (python := _of_numpy(value)) is not value:
            return plain_text(python, binary)
        case _:
            return str(value)


def json_of(value: Any, binary: Binary) -> str:
    """Writes a value as JSON; what JSON has nothing for, a date for example, as a string."""

    def plain(other: Any) -> Any:
        python = _of_numpy(other)
        return plain_text(other, binary) if python is other else python

    return json.dumps(value, ensure_ascii=False, default=plain)


def _of_numpy(value: Any) -> Any:
    """Gives arrays, numbers and truths of numpy's, as pandas has them in cells, as Python's."""
    kind = getattr(value, "dtype", None)
    is_number = getattr(kind, "kind", None) in ("b", "i", "u", "f")
    is_exact = is_number and getattr(kind, "itemsize", None) in (1, 2, 4, 8)
    return value.tolist() if getattr(value, "ndim", 0) or is_exact else value
