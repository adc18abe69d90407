"""Models that cannot be batched give the same answers, one sequence at a time."""

from typing import Any

import pytest
import speaking
from driving import run

from mlx_rq.engine import engine as generate
from mlx_rq.engine.kv.trial import Batching, Verdict

MODEL = speaking.model()
CHOICE = {"guided_choice": ["alpha", "beta"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "X", "schema": SCHEMA, "strict": False},
    }
}


@pytest.mark.parametrize("fields", [CHOICE, JSON, {}], ids=["choice", "json", "free"])
@pytest.mark.parametrize("most", [1, 5, 40])
def test_a_sequence_by_itself_ends_as_in_a_batch(
    fields: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalised = {"frequency_penalty": 1.5, "repetition_penalty": 1.2}
    bodies = [
        {
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": most,
            "temperature": 0,
            **fields,
            **more,
        }
        for text in ("Say: ", "yes or no?")
        for more in ({}, penalised)
    ]
    batched, _ = run(MODEL, bodies)

    monkeypatch.setattr(generate, "verdict_on", lambda model: Verdict(Batching.ALONE))
    alone, engine = run(MODEL, bodies)

    assert engine.capacity == 1

    def answers(results: list[Any]) -> list[Any]:
        return [result.get("choices") or result["error"] for result in results]

    assert answers(alone) == answers(batched)
