"""Names the beginning that a job shares with others, so that one worker gets them together.

Only a hint for routing: the producer has no tokenizer, so text stands for tokens. Jobs of one name
usually share a cached prefix; a wrong guess costs a second prefill, never a wrong answer.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from mlx_rq.jobs.openai.requests import asked_model

_LEAST_CHARACTERS = 200
"""A shorter beginning is prefilled in no time: not worth waiting for a certain worker."""

_MOST_CHARACTERS = 1000
"""Of a text that is not a system message only this much counts: what follows is the job's own."""


def affinity_of(body: Mapping[str, Any]) -> str:
    """Gives a short name of what the body begins with, empty where that is short.

    The same beginning has another name for each model, and each adapter: they share no prefix, and
    the worker that has it for one may not have the other loaded.
    """
    text = _beginning(body)
    if len(text) < _LEAST_CHARACTERS:
        return ""
    text = f"{asked_model(body.get('model'), body.get('adapters'))}\n{text}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _beginning(body: Mapping[str, Any]) -> str:
    if instructions := body.get("instructions"):
        return str(instructions)
    given = body.get("input")
    if messages := body.get("messages") or (given if isinstance(given, list) else None):
        first = messages[0]
        content = first.get("content") or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text", "")) for part in content)
        whole = first.get("role") in ("system", "developer")
        return content if whole else content[:_MOST_CHARACTERS]
    prompt = body.get("prompt") or given or ""
    if isinstance(prompt, list):
        first = prompt[0]
        prompt = first if isinstance(first, str) else repr(prompt)
    return str(prompt)[:_MOST_CHARACTERS]
