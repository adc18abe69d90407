"""Models that cannot be batched give the same answers, one sequence at a time."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
import speaking
from driving import greedy_text, run, texts
from tiny import tiny_model

from mlx_rq.engine import engine as generate
from mlx_rq.engine.kv.trial import Batching, Verdict
from mlx_rq.engine.scheduling import sequential

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


def test_the_next_step_is_launched_before_the_last_token_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama4")
    body = {"prompt": list(range(20)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    done: list[str] = []
    launch, cleared = sequential.SequentialGenerator._launch, mx.clear_cache

    class Token:
        """Notes when it is read."""

        def __init__(self, number: int, token: mx.array) -> None:
            self.number, self.token = number, token

        def item(self) -> Any:
            done.append(f"read {self.number}")
            return self.token.item()

    def launched(self: Any, one: Any, last: Any, *ahead: Any) -> Any:
        number = sum(entry.startswith("launch") for entry in done)
        done.append(f"launch {number}")
        found = launch(self, one, last.token if isinstance(last, Token) else last, *ahead)
        return replace(found, token=Token(number, found.token))

    monkeypatch.setattr(sequential.SequentialGenerator, "_launch", launched)
    monkeypatch.setattr(mx, "clear_cache", lambda: (done.append("clear"), cleared()))

    (result,), _ = run(model, [body], chunk=16)

    assert texts(result) == [greedy_text(model, body)]
    assert done[:2] == ["clear", "clear"]  # after each chunk of the prompt
    assert done[2:] == [
        *("launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3")
    ]
