"""What a whole batch has used, added up from its answers."""

import json
from pathlib import Path
from typing import Any


def usage_of_all(answers: Path) -> dict[str, Any] | None:
    """Adds up the tokens of all answers, in the words of the Batch object; None without any."""
    prompt = cached = completion = reasoning = 0
    with answers.open("rb") as file:
        for raw in file:
            usage = json.loads(raw)["response"]["body"].get("usage") or {}
            inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            outputs = (
                usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
            )
            prompt += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            completion += usage.get("completion_tokens", usage.get("output_tokens", 0))
            cached += inputs.get("cached_tokens", 0)
            reasoning += outputs.get("reasoning_tokens", 0)
    if not prompt + completion:
        return None
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }
