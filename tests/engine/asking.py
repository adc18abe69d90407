"""Chat requests for structured answers, and what came of them."""

from typing import Any

import pytest

from mlx_rq.engine.structured import llguidance_backend


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def structured(schema: Any, strict: bool = True) -> dict[str, Any]:
    wanted = {"name": "X", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def answers(result: dict[str, Any]) -> Any:
    """What of a result does not depend on the job's id."""
    if "error" in result:
        return result["error"]
    return [
        (
            choice["finish_reason"],
            choice["message"]["content"],
            choice["message"].get("reasoning"),
            [call["function"] for call in choice["message"].get("tool_calls", [])],
            choice.get("captures"),
        )
        for choice in result["choices"]
    ]


def masked_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every token of an answer be chosen by itself, as if no grammar ever decided one."""
    monkeypatch.setattr(llguidance_backend, "forced", lambda matcher: [])
