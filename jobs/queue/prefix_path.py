"""Where a job stands in the prefix tree of the backlog, as text that sorts in the tree's order.

A path is a row of short hashes, each of all that comes before its point: the system message and the
tools; then the first 128, 256, 512 … characters of what follows; then all of it. Jobs that begin
alike have paths that begin alike, so the lexicographic order of paths is a depth-first walk of the
tree. The points are twice as far from each other each time: a shared text has one within it
wherever it begins and ends, if it is at least as long as what is before it.

Only an order to work in: the producer has no tokenizer, so text stands for tokens. A hash that two
texts share makes them neighbours that share nothing; it costs nothing but their place.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_FIRST_POINT = 128
"""Characters; what is shared of less text is prefilled in no time."""

_POINTS = 9
"""The last one is at 32,768 characters."""

LEVEL = 4
"""Characters of a path for each level: 16 bits, for siblings of one parent."""


def path_of(body: Mapping[str, Any]) -> str:
    """Gives the path of a body: one level for system and tools, one a point, one for the whole."""
    system, text = _parts(body)
    running = hashlib.blake2b(system.encode(errors="replace"), digest_size=LEVEL // 2)
    path = [running.hexdigest()]
    begin, point = 0, _FIRST_POINT
    for _ in range(_POINTS):
        if point >= len(text):
            break
        running.update(text[begin:point].encode(errors="replace"))
        path.append(running.hexdigest())
        begin, point = point, 2 * point
    running.update(text[begin:].encode(errors="replace"))
    return "".join((*path, running.hexdigest()))


def _parts(body: Mapping[str, Any]) -> tuple[str, str]:
    """Splits what a prompt is made of: system message and tools, and all that follows them."""
    tools = body.get("tools")
    system = [json.dumps(tools)] if tools else []
    if instructions := body.get("instructions"):
        system.append(str(instructions))
    given = body.get("input")
    messages = body.get("messages") or (given if isinstance(given, list) else None)
    if messages is None:
        return "".join(system), _prompt(body.get("prompt") or given or "")
    told = [(message.get("role"), "".join(_texts(message))) for message in messages]
    while told and told[0][0] in ("system", "developer"):
        system.append(told.pop(0)[1])
    return "".join(system), "\n".join(f"{role}:{text}" for role, text in told)


def _prompt(prompt: Any) -> str:
    """Writes a completion's prompt as text; of several, the first one stands for all."""
    if isinstance(prompt, str):
        return prompt
    first = prompt[0]
    if isinstance(first, str):
        return first
    return " ".join(map(str, first if isinstance(first, list) else prompt))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Gives all text of a message: its content, whole or in parts, and its calls."""
    content = message.get("content") or message.get("output") or ""
    if isinstance(content, str):
        yield content
    else:
        yield from (str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if calls := message.get("tool_calls") or message.get("arguments"):
        yield json.dumps(calls)
