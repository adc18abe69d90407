"""Reads what a Python program puts into a body as the JSON that it stands for."""

from typing import Any

from pydantic import BaseModel


def plain(value: Any) -> Any:
    """Gives objects of clients as OpenAI's client would send them, and numbers as keys as JSON has.

    What no JSON stands for, or is nested too deep, is left for the checks to refuse.
    """
    try:
        return _plain(value)
    except (ValueError, RecursionError):
        return value


def _plain(value: Any) -> Any:
    match value:
        case BaseModel():
            return value.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
        case dict():
            return {
                str(key) if type(key) is int else key: _plain(one) for key, one in value.items()
            }
        case list():
            return [_plain(one) for one in value]
        case _:
            return value
