"""What the engine does when things go wrong, and in which order it takes its sequences."""

from typing import Any

import mlx.core as mx
import pytest
from driving import AHEAD, finish, greedy_text, run, task, texts
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions


def completion(prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


class _Poisoned:
    """A model that raises when it is shown a certain token."""

    POISON = 200

    def __init__(self, network: Any) -> None:
        self._network = network

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        if (inputs == self.POISON).any().item():
            raise RuntimeError("bad kernel")
        return self._network(inputs, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def poisoned(model: LoadedModel) -> LoadedModel:
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    return LoadedModel(**{**fields, "model": _Poisoned(model.model)})


@pytest.mark.parametrize("shared", [0, 30], ids=["alone", "below a prefix"])
def test_a_request_that_makes_the_engine_raise_fails_alone(shared: int) -> None:
    model = tiny_model("llama")
    bodies = [completion([*range(shared), i, i + 1, i + 2]) for i in range(6)]
    bodies[3] = completion([*range(shared), 3, _Poisoned.POISON, 5])

    results, _ = run(poisoned(model), bodies)

    assert results[3]["error"] == {
        "message": "The engine failed on this request: RuntimeError: bad kernel",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    for index in (0, 1, 2, 4, 5):
        assert texts(results[index]) == [greedy_text(model, bodies[index])]


def test_what_was_counted_before_an_error_stays_counted() -> None:
    engine = MLXEngine(poisoned(tiny_model("llama")), EngineOptions(batch_size=4, chunk=32))
    engine.add([task("good", completion([1, 2, 3], max_tokens=9, min_tokens=9))])
    finish(engine, 1)
    before = engine.totals

    engine.add([task("bad", completion([1, _Poisoned.POISON, 3]))])
    finish(engine, 1)

    assert before.decode_steps >= 9
    assert engine.totals.decode_steps >= before.decode_steps
    assert engine.totals.decode_seconds >= before.decode_seconds > 0


def test_a_poisoned_prefix_fails_its_sequences_one_by_one() -> None:
    model = tiny_model("llama")
    bad = [*range(20), _Poisoned.POISON, *range(20)]
    bodies = [completion([*bad, i]) for i in range(3)] + [completion([9, 8, 7])]

    results, _ = run(poisoned(model), bodies)

    assert [result["error"]["code"] for result in results[:3]] == ["engine_error"] * 3
    assert texts(results[3]) == [greedy_text(model, bodies[3])]


def test_a_prompt_that_never_fits_the_memory_is_refused_and_others_go_on() -> None:
    model = tiny_model("llama")
    results, _ = run(model, [completion(list(range(200))), completion([1, 2])], kv_bytes=768 * 100)

    assert results[0]["error"]["code"] == "context_length_exceeded"
    assert "--kv-budget" in results[0]["error"]["message"]
    assert texts(results[1]) == [greedy_text(model, completion([1, 2]))]


def test_a_prompt_beyond_the_context_is_refused() -> None:
    (too_long, too_greedy), _ = run(
        tiny_model("llama"),
        [completion([1] * 2048), completion([1] * 2000, max_tokens=49)],
    )

    assert too_long["error"]["code"] == too_greedy["error"]["code"] == "context_length_exceeded"
    assert too_long["error"]["param"] == "prompt"
    assert (
        "requested 2049 tokens (2000 in the prompt, 49 in the completion)"
        in (too_greedy["error"]["message"])
    )


def test_cancelled_tasks_leave_the_batch_at_once_and_their_neighbours_alone() -> None:
    model = tiny_model("llama")
    bodies = {str(i): completion([i, i + 1, i + 2], max_tokens=12) for i in range(6)}
    _, engine = run(model, [])
    engine.add([task(name, body) for name, body in bodies.items()])
    engine.step()
    engine.step()
    engine.step()
    assert engine.running == 4

    engine.cancel("1")  # running
    engine.cancel("5")  # waiting
    engine.cancel("nobody")

    assert engine.running == 3
    results = finish(engine, 4)
    assert set(results) == {"0", "2", "3", "4"}
    for name, result in results.items():
        assert texts(result) == [greedy_text(model, bodies[name])]
    assert engine.step() == []


def test_a_cancelled_task_is_generated_for_its_duplicates() -> None:
    model = tiny_model("llama")
    body = completion([4, 5, 6])
    _, engine = run(model, [])
    engine.add([task("a", body), task("b", body)])
    engine.step()

    engine.cancel("a")

    assert texts(finish(engine, 1)["b"]) == [greedy_text(model, body)]


def test_a_sequence_put_back_takes_its_duplicates_back_with_it() -> None:
    model = tiny_model("llama")
    bodies = [completion([i, 7, i], max_tokens=40) for i in range(3)]
    duplicates = [bodies[0]] * 2 + [bodies[1]] * 2 + [bodies[2]] * 2

    put_back = 0
    for kv_tokens in (45, 55, 65):
        results, engine = run(model, duplicates, kv_bytes=768 * (kv_tokens + 3 * AHEAD), reserve=1)

        put_back += engine.totals.sequences_preempted
        assert [texts(result) for result in results] == [
            [greedy_text(model, b)] for b in duplicates
        ]
    assert put_back > 0


def order_of_ending(engine: MLXEngine, wanted: int) -> list[str]:
    ended: list[str] = []
    while len(ended) < wanted:
        ended += [outcome.id for outcome in engine.step()]
    return ended


def test_urgent_tasks_go_first() -> None:
    _, engine = run(tiny_model("llama"), [], batch_size=1)
    engine.add([task(f"low{i}", completion([i, 1]), rank=2) for i in range(3)])
    engine.add([task(f"high{i}", completion([i, 2]), rank=0) for i in range(3)])

    ended = order_of_ending(engine, 6)

    assert {name[:3] for name in ended[:3]} == {"hig"}


def test_a_lone_sequence_that_waited_too_long_goes_before_a_shared_prefix() -> None:
    now = 0.0
    engine = MLXEngine(
        tiny_model("llama"), EngineOptions(batch_size=1, chunk=32, max_wait=30), clock=lambda: now
    )
    crowd = [task(f"crowd{i}", completion([*range(40), i], max_tokens=16)) for i in range(6)]
    engine.add([*crowd, task("lone", completion([250, 251], max_tokens=2))])
    ended = order_of_ending(engine, 1)  # the longest answers go first, the lone sequence is last
    assert ended != ["lone"]

    now = 31.0
    late = [task(f"late{i}", completion([*range(40), 50 + i], max_tokens=16)) for i in range(6)]
    engine.add(late)  # they would go before it: they are more, and longer

    assert "lone" in order_of_ending(engine, 6)


def test_decoding_goes_on_while_a_prefix_is_built() -> None:
    model = tiny_model("llama")
    _, engine = run(model, [], batch_size=4, chunk=16)
    engine.add([task("first", completion([1, 2, 3], max_tokens=40, min_tokens=40))])
    for _ in range(4):
        engine.step()
    before = engine.totals.decoded_tokens

    engine.add([task(f"t{i}", completion([*range(160), i])) for i in range(4)])  # ten chunks
    for _ in range(5):
        engine.step()

    assert engine.totals.prefixes_held == 0
    assert engine.totals.decoded_tokens == before + 5
    assert len(finish(engine, 5)) == 5


def test_usage_says_what_was_not_computed() -> None:
    bodies = [completion([*range(100, 140), i, i], max_tokens=2) for i in range(6)]
    results, engine = run(tiny_model("llama"), bodies)

    sent = sum(result["usage"]["prompt_tokens"] for result in results)
    cached = sum(r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in results)
    assert sent == 6 * 42
    assert sent - cached == engine.totals.prefilled_tokens == engine.totals.distinct_tokens == 52


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    bodies = [completion([i] * 12, max_tokens=3) for i in range(1, 8)]
    bodies.insert(3, completion([9] * 400, max_tokens=3))

    _, engine = run(tiny_model("llama"), bodies, batch_size=8)

    assert engine.totals.positions_computed <= 1.15 * engine.totals.distinct_tokens
