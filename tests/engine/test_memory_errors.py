"""A device that runs out of memory, or gives no numbers, costs nobody an answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
import speaking
from driving import Body, finish, greedy, greedy_text, task, texts
from scripted_device import OUT_OF_MEMORY, ScriptedDevice, WatchedNetwork, watched
from test_engine import completion
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import DeviceExhausted
from mlx_rq.engine.models.device import NotFinite
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.sampling import logprobs
from mlx_rq.engine.scheduling import decode_batch

Fails = Callable[[int, int, int], bool]
JOBS = [completion([i, i + 1, i % 7], max_tokens=24) for i in range(64)]


def start(
    model: LoadedModel, fails: Fails, bodies: list[Body], **options: Any
) -> tuple[MLXEngine, WatchedNetwork, ScriptedDevice]:
    """An engine on a scripted device, which was given tasks, and has not begun."""
    device = ScriptedDevice()
    scripted, network = watched(model, device)
    engine = MLXEngine(scripted, EngineOptions(**{"batch_size": 16, **options}), device=device)
    network.passes.clear()  # the trials of the start
    network.fails = fails
    assert engine.add([task(str(i), body) for i, body in enumerate(bodies)]) == []
    return engine, network, device


def answers(engine: MLXEngine, jobs: int) -> list[Any]:
    results = finish(engine, jobs)
    return [results[str(i)] for i in range(jobs)]


@cache
def with_room(rows: int) -> tuple[list[list[str]], int]:
    """What an engine with room for so many rows says to all jobs, and in how many passes."""
    engine, network, _ = start(tiny_model("llama"), lambda *_: False, JOBS, batch_size=rows)
    return [texts(result) for result in answers(engine, len(JOBS))], len(network.passes)


def test_with_memory_for_half_the_rows_all_is_answered_at_little_cost() -> None:
    engine, network, device = start(tiny_model("llama"), lambda rows, *_: rows > 8, JOBS)

    results = answers(engine, len(JOBS))

    expected, passes = with_room(8)
    assert [texts(result) for result in results] == expected
    assert max(rows for rows, _ in network.passes) == 16  # it was tried
    assert len(network.passes) <= 1.5 * passes
    assert device.cleared > 0


def test_the_batch_is_halved_and_grown_again_once_there_is_room() -> None:
    engine, network, _ = start(
        tiny_model("llama"), lambda rows, _, before: rows > 8 and before < 40, JOBS
    )
    capacities = [engine.capacity]
    results: dict[str, Any] = {}
    failed = 0
    while len(results) < len(JOBS):
        ended = engine.step()
        results.update((outcome.id, outcome.result) for outcome in ended)
        failed += sum(outcome.steps.failed for outcome in ended if outcome.steps is not None)
        if engine.capacity != capacities[-1]:
            capacities.append(engine.capacity)

    expected, passes = with_room(16)
    assert capacities == [16, 8, 16]
    assert failed == 16
    assert len(network.passes) <= 1.5 * passes
    assert [texts(results[str(i)]) for i in range(len(JOBS))] == expected
    assert expected[:5] == [[greedy_text(tiny_model("llama"), body)] for body in JOBS[:5]]


def test_what_fails_once_while_it_is_alone_is_answered() -> None:
    model = tiny_model("llama")
    body = completion([*range(30)], max_tokens=20)
    engine, _, _ = start(model, lambda *now: now[2] == 7, [body])

    (result,) = answers(engine, 1)

    assert texts(result) == [greedy_text(model, body)]
    assert engine.totals.sequences_preempted == 1


@pytest.mark.parametrize("others", [0, 5])
def test_what_never_fits_is_refused_with_figures_and_its_neighbours_are_answered(
    others: int,
) -> None:
    model = tiny_model("llama")
    bodies = [completion([i, 7, 9], max_tokens=12) for i in range(others)]
    bodies.append(completion([5] * 300, max_tokens=12))
    engine, _, device = start(model, lambda _, held, __: held > 200, bodies)
    device.ceiling, device.active = 1_000_000_000, 987_654_321

    *answered, refused = answers(engine, others + 1)

    assert [texts(result) for result in answered] == [[greedy_text(model, b)] for b in bodies[:-1]]
    assert refused["error"]["code"] == "context_length_exceeded"
    assert refused["error"]["message"] == (
        "The memory does not suffice for this request, even by itself: at 300 tokens (300 of the "
        "prompt), whose KV takes 230,400 bytes, the device ran out of memory, with 987,654,321 "
        "bytes held of the 1,000,000,000 that it may hold (--memory). Reduce the prompt."
    )


def test_a_prefix_that_never_fits_is_refused_to_each_who_stands_on_it() -> None:
    model = tiny_model("llama")
    bodies = [completion([*[5] * 300, i], max_tokens=4) for i in range(3)]
    bodies.append(completion([1, 2, 3], max_tokens=12))
    engine, _, _ = start(model, lambda _, held, __: held > 200, bodies)

    *refused, answered = answers(engine, 4)

    assert [result["error"]["code"] for result in refused] == ["context_length_exceeded"] * 3
    assert texts(answered) == [greedy_text(model, bodies[3])]


def test_who_runs_beside_a_prefix_that_never_fits_is_not_blamed_for_it() -> None:
    model = tiny_model("llama")
    innocent = completion([1, 2, 3], max_tokens=90)
    engine, _, _ = start(model, lambda _, held, __: held > 200, [innocent])
    while not engine.running:
        engine.step()
    late = [completion([*[5] * 300, i], max_tokens=4) for i in range(2)]
    engine.add([task(f"late{i}", body) for i, body in enumerate(late)])

    results = finish(engine, 3, limit=500)

    assert texts(results["0"]) == [greedy_text(model, innocent)]
    assert results["late0"]["error"]["code"] == "context_length_exceeded"


def test_a_device_that_is_interrupted_is_asked_for_less() -> None:
    model = tiny_model("llama")
    body = completion([5] * 300, max_tokens=4)
    engine, network, _ = start(model, lambda *_: False, [body])
    interrupted = RuntimeError(
        "[METAL] Command buffer execution failed: Impacting Interactivity "
        "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
    )

    def fails(rows: int, held: int, before: int) -> bool:
        if network.passes[-1][1] > 100:
            raise interrupted
        return False

    network.fails = fails
    assert texts(answers(engine, 1)[0]) == [greedy_text(model, body)]


@pytest.mark.parametrize("late", [False, True], ids=["in the pass", "when it is read"])
def test_errors_at_any_pass_change_no_answer_however_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also of sequences whose constraint had taken in a token that was never handed out."""
    model = speaking.model()
    choice = {"guided_regex": "[ab]{3}c[de]{2,6}"}
    bodies: list[Body] = [
        {"prompt": "Say: ", "max_tokens": 12, "temperature": 0.9, "seed": 3, **choice},
        {"prompt": "Say: ", "max_tokens": 12, "temperature": 0, **choice},
        {"prompt": "and", "max_tokens": 9, "temperature": 0.9, "seed": 5, "presence_penalty": 1},
        {"prompt": "Say: ", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 1},
    ]
    engine, network, _ = start(model, lambda *_: False, bodies)
    undisturbed = answers(engine, len(bodies))
    for failing in range(0, len(network.passes), 3):
        engine, network, _ = start(model, lambda *now, at=failing: now[2] == at, bodies)
        if late:  # the next tokens are chosen by then, and constraints have taken in the last ones
            fails, network.fails = network.fails, lambda *_: False
            monkeypatch.setattr(decode_batch, "measure", _failing_once(fails, network))
        disturbed = answers(engine, len(bodies))
        assert [one["choices"] for one in disturbed] == [one["choices"] for one in undisturbed]


def _failing_once(fails: Fails, network: WatchedNetwork) -> Callable[..., Any]:
    """Measures logprobs, but for the pass that fails."""

    def measure(*args: Any) -> Any:
        if fails(0, 0, len(network.passes) - 1):
            raise RuntimeError(OUT_OF_MEMORY)
        return logprobs.measure(*args)

    return measure


def test_logits_that_are_no_numbers_once_end_no_job_with_garbage() -> None:
    model = tiny_model("llama")
    bodies = JOBS[:6]
    engine, network, _ = start(model, lambda *_: False, bodies)
    network.garbles = lambda inputs: (mx.arange(len(inputs)) == 1) & (len(network.passes) == 9)

    results = answers(engine, len(bodies))

    assert [texts(result) for result in results] == [[greedy_text(model, b)] for b in bodies]
    assert engine.capacity == 16


def test_a_prompt_that_is_scored_for_its_own_sake_is_scored_again() -> None:
    model = tiny_model("llama")
    bodies = [completion([5, 6, 7], max_tokens=0, echo=True, logprobs=1), JOBS[0]]
    engine, _, _ = start(model, lambda *_: False, bodies)
    undisturbed = answers(engine, 2)
    engine, network, _ = start(model, lambda *_: False, bodies)
    network.garbles = lambda inputs: mx.full(len(inputs), len(network.passes) == 1)

    assert [one["choices"] for one in answers(engine, 2)] == [one["choices"] for one in undisturbed]


def test_what_follows_an_end_may_be_no_numbers() -> None:
    """Nobody is told it, and nobody else is to blame."""
    model = tiny_model("llama")
    short, *others = (completion([start, 1, 2], max_tokens=20) for start in range(3))
    end = greedy(model, short["prompt"], 3)[2]
    model = replace(model, eos_token_ids=frozenset([end]))
    bodies = [short, *others]
    expected = [[greedy_text(model, body)] for body in bodies]
    engine, network, _ = start(model, lambda *_: False, bodies)
    network.garbles = lambda inputs: inputs[:, -1] == end

    results = answers(engine, len(bodies))

    assert [texts(result) for result in results] == expected
    assert engine.totals.sequences_preempted == 0


@pytest.mark.parametrize("others", [0, 3])
def test_logits_that_are_never_numbers_end_in_an_error(others: int) -> None:
    model = tiny_model("llama")
    bodies = [*JOBS[:others], completion([9, 9, 200], max_tokens=5)]
    engine, network, _ = start(model, lambda *_: False, bodies)
    network.garbles = lambda inputs: (inputs == 200).any(axis=1)

    *answered, failed = answers(engine, others + 1)

    assert [texts(result) for result in answered] == [[greedy_text(model, b)] for b in bodies[:-1]]
    assert failed["error"]["code"] == "engine_error"
    assert "logits that are not finite" in failed["error"]["message"]


def test_a_prefix_of_no_numbers_is_computed_again() -> None:
    model = tiny_model("llama")
    bodies = [completion([*range(40), i, 7], max_tokens=6) for i in range(4)]
    engine, _, _ = start(model, lambda *_: False, bodies, share_from=1)
    prefixes = engine._running.prefix_cache
    while not len(prefixes):
        engine.step()
    for prefix in prefixes:  # the memory error that raised nothing
        for layer in prefix.caches:
            for part in layer.chain:
                part._keys = part.keys + mx.nan

    results = answers(engine, len(bodies))

    assert [texts(result) for result in results] == [[greedy_text(model, b)] for b in bodies]
    assert engine.totals.prefixes_evicted == 1  # nobody comes to stand on it any more


@pytest.mark.parametrize("said", [OUT_OF_MEMORY, "[METAL] Invalid Resource"])
def test_a_device_on_which_nothing_works_fails_no_job(said: str) -> None:
    """The worker ends, and is started again: another program may have taken the memory."""
    engine, network, _ = start(tiny_model("llama"), lambda *_: False, JOBS[:20])

    def fails(rows: int, held: int, before: int) -> bool:
        raise RuntimeError(said)

    network.fails = fails
    with pytest.raises(RuntimeError, match=re.escape(said)) as caught:
        finish(engine, 1)
    assert isinstance(caught.value, DeviceExhausted) == (said is OUT_OF_MEMORY)
    assert engine.task_ids == {str(i) for i in range(20)}
    assert len(engine.in_flight) == 1


def test_a_model_that_never_gives_numbers_fails_few_jobs() -> None:
    engine, network, _ = start(tiny_model("llama"), lambda *_: False, JOBS[:20])
    network.garbles = lambda inputs: mx.ones(len(inputs)) > 0
    failed: list[str] = []

    def work() -> None:
        while True:
            failed.extend(outcome.id for outcome in engine.step())

    with pytest.raises(NotFinite):
        work()
    assert len(failed) == 3
