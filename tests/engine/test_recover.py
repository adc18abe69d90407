"""Jobs that ask the very same, when one of them is cancelled or the engine raises."""

from typing import Any

import pytest
import speaking
from driving import finish, greedy_text, run, task, texts
from test_engine import _Poisoned, completion, poisoned
from tiny import tiny_model

from mlx_rq.engine import engine as generate
from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.structured.output_format import OutputFormat


def test_duplicates_of_a_request_that_makes_the_engine_raise_fail_with_it() -> None:
    model = tiny_model("llama")
    bad = completion([1, _Poisoned.POISON, 3])
    good = completion([4, 5, 6])

    results, engine = run(poisoned(model), [good, bad, good, bad, bad])

    assert [results[at]["error"]["code"] for at in (1, 3, 4)] == ["engine_error"] * 3
    assert [texts(results[at]) for at in (0, 2)] == [[greedy_text(model, good)]] * 2
    assert engine.step() == []


def test_duplicates_are_generated_after_an_error_of_somebody_else() -> None:
    model = tiny_model("llama")
    good = completion([4, 5, 6], max_tokens=30)
    engine = start(poisoned(model), {"a": good, "b": good})
    engine.step()

    engine.add([task("bad", completion([1, _Poisoned.POISON, 3]))])

    results = finish(engine, 3)
    assert results["bad"]["error"]["code"] == "engine_error"
    assert texts(results["a"]) == texts(results["b"]) == [greedy_text(model, good)]


def test_a_prefix_that_raises_for_a_cancelled_leader_ends_its_duplicate() -> None:
    bad = [*range(60), _Poisoned.POISON, 1]  # a chunk is built before it raises
    jobs = {"a": completion([*bad, 5]), "b": completion([*bad, 5]), "c": completion([*bad, 6])}
    engine = start(poisoned(tiny_model("llama")), jobs)
    assert engine.step() == []
    engine.cancel("c")
    engine.cancel("a")

    assert finish(engine, 1)["b"]["error"]["code"] == "engine_error"
    assert engine.step() == []


def test_who_is_in_flight_are_those_for_whom_something_is_computed() -> None:
    bodies = {str(i): completion([i, i + 1, i + 2], max_tokens=30) for i in range(6)}
    engine = start(tiny_model("llama"), {**bodies, "same": bodies["0"], "gone": bodies["1"]})
    engine.step()
    engine.cancel("gone")
    engine.cancel("1")
    running = {sequence.task_id for sequence in engine._sequences.running}

    assert "0" in running
    assert engine.in_flight >= running | {"same"}
    while engine.running < 4:
        engine.step()
    running = {sequence.task_id for sequence in engine._sequences.running}
    assert engine.in_flight == running | {"same"}
    assert "1" not in engine.in_flight


def test_who_runs_alone_is_not_to_blame_for_the_prefix_of_the_next_ones() -> None:
    model = tiny_model("llama")
    good = completion([4, 5, 6], max_tokens=30)
    prefix = [*range(40), _Poisoned.POISON]
    engine = start(poisoned(model), {"good": good})
    engine.step()

    engine.add([task(f"bad{i}", completion([*prefix, i, i])) for i in range(3)])

    results = finish(engine, 4)
    codes = {name: result["error"]["code"] for name, result in results.items() if name != "good"}
    assert codes == dict.fromkeys(("bad0", "bad1", "bad2"), "engine_error")
    assert texts(results["good"]) == [greedy_text(model, good)]


def test_what_cannot_be_begun_ends_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(format: OutputFormat, budget: int) -> None:
        if format.grammar is not None:
            raise ValueError("odd")

    monkeypatch.setattr(OutputFormat, "start", odd)
    model, good = speaking.model(), completion([4, 5, 6])

    results, _ = run(model, [good, completion([4, 5], guided_choice=["one"]), good])

    assert "ValueError: odd" in results[1]["error"]["message"]
    assert [texts(results[at]) for at in (0, 2)] == [[greedy_text(model, good)]] * 2


def test_a_job_is_said_in_flight_before_anything_is_computed_for_it() -> None:
    """Also one whose grammar was compiled meanwhile: else a crash would count no attempt of it."""
    choice = {"guided_choice": ["a choice that", "nobody asked for before"]}
    body = {"prompt": "Say: ", "max_tokens": 30, "temperature": 0, **choice}
    engine = start(speaking.model(), {"free": completion([5, 6], max_tokens=40), "late": body})

    ended: set[str] = set()
    while len(ended) < 2:
        in_flight = set(engine.in_flight)
        ended |= {outcome.id for outcome in engine.step()}
        assert {sequence.task_id for sequence in engine._sequences.running} <= in_flight


def test_nothing_is_generated_for_duplicates_that_were_all_cancelled() -> None:
    engine = start(tiny_model("llama"), dict.fromkeys("abc", completion([4, 5, 6], max_tokens=40)))
    engine.step()
    engine.cancel("a")
    engine.cancel("b")
    assert engine.running == 1

    engine.cancel("c")

    assert (engine.running, engine.waiting) == (0, 0)


def test_a_job_that_is_cancelled_and_comes_again_has_its_own_answer() -> None:
    model = tiny_model("llama")
    first, second = completion([4, 5, 6], max_tokens=20), completion([7, 8], max_tokens=5)
    engine = start(model, {"a": first, "b": first})
    engine.step()
    engine.cancel("a")
    engine.add([task("a", second)])

    results = finish(engine, 2)

    assert texts(results["a"]) == [greedy_text(model, second)]
    assert texts(results["b"]) == [greedy_text(model, first)]


def test_what_a_sequence_had_said_is_not_taken_for_another_sequences_prompt() -> None:
    """A preempted sequence is prefilled with what it had said, which may be another's prompt."""
    model = tiny_model("llama")
    first = completion([4, 5, 6], max_tokens=12)
    engine = start(model, {"a": first})
    (sequence,) = engine._sequences.tasks["a"].sequences
    while len(sequence.text.tokens) < 3:
        engine.step()
    said = list(sequence.text.tokens)
    engine._sequences.preempt(sequence)  # as where the memory is too small
    second = completion([4, 5, 6, *said], max_tokens=12)
    engine.add([task("b", second)])

    results = finish(engine, 2)

    assert texts(results["a"]) == [greedy_text(model, first)]
    assert texts(results["b"]) == [greedy_text(model, second)]


def test_an_answer_that_cannot_be_made_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    answer = generate.response_of

    def raises_at_bad(asked: Any, *rest: Any, **more: Any) -> Any:
        if asked.id == "bad":
            raise RecursionError("too deep")
        return answer(asked, *rest, **more)

    monkeypatch.setattr(generate, "response_of", raises_at_bad)
    good = completion([4, 5, 6])
    engine = start(model, {"bad": completion([1, 2]), "good": good})

    results = finish(engine, 2)

    assert results["bad"]["error"]["code"] == "engine_error"
    assert texts(results["good"]) == [greedy_text(model, good)]


@pytest.mark.parametrize("share_from", [1, 10**9], ids=["shared", "copied"])
def test_nested_prefixes_are_paid_for_once(share_from: int) -> None:
    system, documents = [*range(100, 140)], [[*range(20)], [*range(30, 50)]]
    bodies = [completion([*system, *documents[i % 2], i, i], max_tokens=2) for i in range(8)]

    results, engine = run(tiny_model("llama"), bodies, min_prefix_tokens=1, share_from=share_from)

    sent = sum(result["usage"]["prompt_tokens"] for result in results)
    cached = sum(r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in results)
    assert engine.totals.prefixes_held == 3
    assert sent - cached == engine.totals.prefilled_tokens == engine.totals.distinct_tokens


def start(model: LoadedModel, bodies: dict[str, Any]) -> MLXEngine:
    """An engine that was given tasks, and has not begun with them."""
    _, engine = run(model, [])
    assert engine.add([task(name, body) for name, body in bodies.items()]) == []
    return engine
