"""The forms in which a chat template may take a conversation.

Where a template refuses one (no system role, strict alternation of user and assistant), it is
folded as the model's users do: system text goes in front of the first user turn, and neighbouring
turns of one role are joined.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def forms_of(messages: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Yields the forms in which a template may take a conversation, the usual one first."""
    conversations = [messages, _folded(messages)]
    calls = any(message.get("tool_calls") for message in messages)
    if calls:
        # Mistral's know no other ids than their own.
        conversations += [[_with_short_ids(message) for message in one] for one in conversations]
    for conversation in conversations:
        yield conversation
        if calls:
            # Some parse the arguments themselves: that of DeepSeek V3.2 in mlx-lm. Others go
            # through them by name, and find none in a custom tool's text.
            yield [_with_arguments(_as_text, message) for message in conversation]
            yield [_with_arguments(_as_object, message) for message in conversation]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if "tool_calls" in message:
        calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message


def _short_id(call_id: str) -> str:
    """Makes nine letters and digits of an id, always the same."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_arguments(form: Callable[[Any], Any], message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        changed = {**function, "arguments": form(function["arguments"])}
        calls.append({**call, "function": changed})
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Mapping[str, Any]:
    return arguments if isinstance(arguments, Mapping) else {"input": arguments}


def _folded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves system text into the first user turn and joins neighbouring turns of one role."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        if turns and turns[-1]["role"] == message["role"] and message["role"] != "tool":
            joined = "\n\n".join(filter(None, [turns[-1]["content"], message["content"]]))
            turns[-1] = {**turns[-1], **message, "content": joined}
        else:
            turns.append(message)
    if system:
        if not turns or turns[0]["role"] != "user":
            turns.insert(0, {"role": "user", "content": ""})
        first = "\n\n".join(filter(None, [*system, turns[0]["content"]]))
        turns[0] = {**turns[0], "content": first}
    return turns
