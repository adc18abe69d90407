"""Writes the tool calls of an answer as OpenAI does."""

import hashlib
import json
from typing import Any

from mlx_rq.engine.structured.output_format import Reading


def _call_id(task_id: str, sequence: int, call: int) -> str:
    """Names a tool call; a job that is run again gives its calls the same ids."""
    return "call_" + hashlib.sha256(f"{task_id}/{sequence}/{call}".encode()).hexdigest()[:24]


def tool_calls(reading: Reading, task_id: str, sequence: int) -> list[dict[str, Any]]:
    """Writes the calls of a reading as OpenAI does: the arguments are a string of JSON."""
    return [
        {
            "id": call.id or _call_id(task_id, sequence, index),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for index, call in enumerate(reading.calls)
    ]
