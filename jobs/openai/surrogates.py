"""Halves of surrogate pairs: JSON can write them, models do, and UTF-8 has nothing for them."""

import json
from collections.abc import Mapping
from typing import Any


def writable(value: Any) -> Any:
    """Gives a JSON value with `?` for each half; the very same object where it holds none."""
    text = json.dumps(value, ensure_ascii=False)
    written = text.encode(errors="replace")
    return value if written.decode() == text else json.loads(written)


def is_writable(text: str) -> bool:
    """Tells whether a text holds none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def place_of_half(value: Any) -> str | None:
    """Says where a JSON value holds one, as `messages[0].content`; None where it holds none."""
    left = [("", value)]  # not by recursion: a body may be nested as deeply as JSON can be
    while left:
        place, here = left.pop()
        inside: list[tuple[str, Any]] = []
        if isinstance(here, Mapping):
            inside = [(f"{place}.{key}" if place else str(key), one) for key, one in here.items()]
        elif isinstance(here, list | tuple):
            inside = [(f"{place}[{at}]", one) for at, one in enumerate(here)]
        left += reversed(inside)
        if not is_writable(place) or (isinstance(here, str) and not is_writable(here)):
            return place
    return None
