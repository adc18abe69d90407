"""The one way in which what lies in Redis is read: anybody may have put anything there.

A key of another type, bytes that are no text, text that is no JSON, JSON of another shape: none of
them ends more than the record that it stands in. Asking raises what Redis itself has to say (it is
away, it does not permit this); what a key holds raises nothing, but is `Unreadable`, which all
readers here take for nothing.
"""

import json
import math
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from redis.client import Pipeline
from redis.exceptions import ResponseError


class Unreadable(NamedTuple):
    """What a key holds that is none of ours, and why."""

    why: str


WRONG_TYPE = Unreadable("another type than ours")


PAUSE_SECONDS = 0.1
"""Until who waits for a key to change looks again, where it holds another type."""


def is_of_another_type(reply: object) -> bool:
    """Tells the error of a key that somebody has put something else into."""
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def ask(command: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Calls a command of a client; WRONG_TYPE where the key holds another type."""
    try:
        return command(*arguments, **options)
    except ResponseError as error:
        return _wrong_type(error)


async def asked(reply: Awaitable[Any]) -> Any:
    """Awaits a command of an asyncio client; WRONG_TYPE where the key holds another type."""
    try:
        return await reply
    except ResponseError as error:
        return _wrong_type(error)


def ask_all(pipe: Pipeline) -> list[Any]:
    """Sends a pipeline; gives WRONG_TYPE for each reply about a key of another type."""
    return sift(pipe.execute(raise_on_error=False))


def sift(replies: Iterable[Any]) -> list[Any]:
    """Puts WRONG_TYPE in the place of such errors among a pipeline's replies; raises others."""
    return [_wrong_type(reply) if isinstance(reply, Exception) else reply for reply in replies]


def _wrong_type(error: Exception) -> Unreadable:
    if not is_of_another_type(error):
        raise error
    return WRONG_TYPE


def text(reply: Any) -> str:
    """Reads a text, with signs in the place of bytes that are none; empty where there is none."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else ""


def texts(replies: Any) -> list[str]:
    """Reads the members of a list or a set; those that are no text are left out."""
    if isinstance(replies, Unreadable) or replies is None:
        return []
    return [read.decode() for read in replies if _is_text(read)]


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def count(reply: Any) -> int:
    """Reads a count, of Redis or written in decimal digits; 0 where there is none."""
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    return reply if isinstance(reply, int) else 0


MAX_UNIX_TIME = 2**36
"""Seconds; beyond it, a time can hardly be written as a date."""


def number(value: Any, least: float, most: float) -> float | None:
    """Reads a number within limits; None where there is none."""
    if isinstance(value, bytes) and len(value) > 400:
        return None
    try:
        read = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return read if least <= read <= most else None


def time(reply: Any) -> str:
    """Reads a time as RQ writes it; empty where there is none."""
    written = text(reply)
    try:
        datetime.fromisoformat(written).timestamp()
    except (ValueError, OverflowError):
        return ""
    return written


def unix_time(written: str | None) -> float:
    """Gives the Unix time of a time as RQ writes it; now, where there is none."""
    return datetime.fromisoformat(written).timestamp() if written else datetime.now().timestamp()


def json_object(reply: Any) -> dict[str, Any] | Unreadable:
    """Reads a JSON object that can be written again; the reply itself where it is Unreadable.

    So it holds no number that is not finite, and no half of a surrogate pair.
    """
    if isinstance(reply, Unreadable):
        return reply
    try:
        written = bytes(reply or b"").decode()
        value = json.loads(written, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in written.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return Unreadable(f"no JSON ({str(error)[:80]})")
    return value if isinstance(value, dict) else Unreadable("no JSON object")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def position(newest: Any) -> bytes:
    """Gives the id of the newest entry of a stream, from where to follow it."""
    found = None if isinstance(newest, Unreadable) else newest
    return found[0][0] if found else b"0-0"


def entries(streams: Any, name: str) -> tuple[Any, list[str]]:
    """Reads the `name` of each entry of the one stream that was asked for.

    Returns the id of the last entry, None where none came, and what has been read; entries that
    do not say it are passed by.
    """
    if isinstance(streams, Unreadable) or not streams:
        return None, []
    ((_, found),) = streams
    return found[-1][0], texts(_named(found, name.encode()))


def _named(found: Iterable[tuple[Any, dict[bytes, bytes]]], name: bytes) -> Iterable[bytes]:
    return (fields[name] for _, fields in found if name in fields)
