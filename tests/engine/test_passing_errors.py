"""Errors of the device that pass, wherever they come: all is answered as if there had been none."""

import random
from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from driving import Body, finish, greedy_text, run, task, texts
from scripted_device import FailingMLX, ScriptedDevice
from test_engine import completion
from test_memory_errors import start
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.options import EngineOptions

MODEL = tiny_model("llama")


def test_what_is_alone_in_the_smallest_step_meets_an_error_that_passes() -> None:
    body = completion([*range(30)], max_tokens=60)
    engine, _, _ = start(MODEL, lambda *now: now[2] in (7, 12, 17, 22, 27), [body])

    result = finish(engine, 1)["0"]

    assert texts(result) == [greedy_text(MODEL, body)]
    assert engine._step_size.smallest


def test_another_error_of_the_device_that_passes_ends_no_worker() -> None:
    """As where the system resets a GPU because of another program."""
    body = completion([*range(30)], max_tokens=60)
    engine, network, _ = start(MODEL, lambda *_: False, [body])
    victim = "[METAL] Command buffer execution failed: Innocent Victim"

    def fails(rows: int, held: int, before: int) -> bool:
        if before in (7, 12, 17, 22, 27, 32):
            raise RuntimeError(victim)
        return False

    network.fails = fails
    assert texts(finish(engine, 1)["0"]) == [greedy_text(MODEL, body)]
    assert engine._step_size.smallest


def test_logits_that_are_no_numbers_now_and_then_end_no_job() -> None:
    """Each time elsewhere: it is not the model that cannot say it."""
    body = completion([*range(30)], max_tokens=30, ignore_eos=True)
    engine, network, _ = start(MODEL, lambda *_: False, [body])
    network.garbles = lambda inputs: mx.full(len(inputs), len(network.passes) in (9, 20, 40))

    assert texts(finish(engine, 1)["0"])[0].startswith(greedy_text(MODEL, body))
    assert len(network.passes) > 40


def test_prompts_whose_score_is_no_number_now_and_then_are_scored() -> None:
    body = completion([*range(200)], max_tokens=0, echo=True, logprobs=1)
    engine, _, _ = start(MODEL, lambda *_: False, [body], chunk=64)
    undisturbed = finish(engine, 1)["0"]["choices"]
    engine, network, _ = start(MODEL, lambda *_: False, [body], chunk=64)
    network.garbles = lambda inputs: mx.full(len(inputs), len(network.passes) in (2, 5))

    assert finish(engine, 1)["0"]["choices"] == undisturbed
    assert len(network.passes) > 5


def test_errors_long_apart_do_not_add_up() -> None:
    """The fourth and later ones come in the smallest step: it had no time to grow."""
    body = completion([*range(30)], max_tokens=400, ignore_eos=True)
    fails = {2, 4, 6, *range(10, 400, 60)}
    engine, _, _ = start(MODEL, lambda *now: now[2] in fails, [body])
    engine._step_size._patience = 10_000

    assert texts(finish(engine, 1)["0"])[0].startswith(greedy_text(MODEL, body))


def test_a_device_on_which_no_prompt_can_be_scored_fails_no_job() -> None:
    """Nor does a step without work count for one that went well."""
    body = completion([5] * 100, max_tokens=0, echo=True, logprobs=1)
    engine, _, _ = start(MODEL, lambda *_: True, [body])

    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        finish(engine, 1, limit=50)
    assert engine.task_ids == {"0"}


def test_a_prompt_that_is_too_long_to_be_scored_is_refused() -> None:
    body = completion([5] * 300, max_tokens=0, echo=True, logprobs=1)
    engine, _, _ = start(MODEL, lambda _, held, __: held > 200, [body])

    assert finish(engine, 1)["0"]["error"]["code"] == "context_length_exceeded"


PREFIX = [*range(60)]
MANY: list[Body] = [
    *({"prompt": [*PREFIX, i, 7], "max_tokens": 4, "temperature": 0} for i in range(3)),
    {"prompt": [*PREFIX, 70], "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1},
    {"prompt": PREFIX[:50], "max_tokens": 0, "echo": True, "logprobs": 2},
    {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.8, "seed": 4, "n": 2},
]
ONE: list[Body] = [{"prompt": PREFIX, "max_tokens": 20, "temperature": 0, "ignore_eos": True}]


@pytest.mark.parametrize("bodies", [MANY, ONE], ids=["prefix, scores, rows", "drafts"])
def test_an_error_wherever_mlx_is_waited_for_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, bodies: list[Body]
) -> None:
    mlx = FailingMLX(monkeypatch)
    draft = tiny_model("llama", seed=1) if bodies is ONE else None

    def answers(place: int) -> list[Any]:
        mlx.fail_at(-1)
        options = EngineOptions(batch_size=4, share_from=1)
        device = ScriptedDevice()
        engine = MLXEngine(MODEL, options, draft=draft, device=device, clock=count().__next__)
        if (drafting := engine._running.drafting) is not None:
            drafting._rate.drafts = True
        mlx.fail_at(place)
        assert engine.add([task(str(i), body) for i, body in enumerate(bodies)]) == []
        results = finish(engine, len(bodies))
        engine.close()
        return [[one["text"] for one in results[str(i)]["choices"]] for i in range(len(bodies))]

    undisturbed = answers(-1)
    places = mlx.times
    assert places > 50
    for place in range(0, places, 6):
        assert answers(place) == undisturbed, place


@pytest.mark.parametrize("seed", range(3))
def test_errors_that_never_cease_end_no_job(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """One in fifty of all times that MLX is waited for: what comes further is not too large."""
    bodies = [
        *(completion([*PREFIX, i, 7], max_tokens=16, ignore_eos=True) for i in range(3)),
        *(completion([i, 7, 9], max_tokens=30, ignore_eos=True) for i in range(6)),
        completion([9] * 400, max_tokens=8, ignore_eos=True),
    ]
    mlx = FailingMLX(monkeypatch)
    mlx.fail_at(-1)
    expected, _ = run(MODEL, bodies)
    engine = MLXEngine(MODEL, EngineOptions(batch_size=4, share_from=1), device=ScriptedDevice())
    assert engine.add([task(str(i), body) for i, body in enumerate(bodies)]) == []
    dice = random.Random(seed)
    mlx.fail_at(*(time for time in range(20_000) if dice.random() < 0.02))

    results = finish(engine, len(bodies))

    assert [texts(results[str(i)]) for i in range(len(bodies))] == [*map(texts, expected)]
    assert mlx.times > 400
