"""Drafts show in no answer: a sequence that runs alone only takes fewer steps by them.

A draft that is the model itself is right each time, one with other random weights hardly ever. The
engine's clock ticks once whenever it is asked: a step takes as long with drafts as without.
"""

from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import mlx.core as mx
import pytest
import speaking
from driving import Body, finish, greedy, greedy_text, run, task, texts
from scripted_device import ScriptedDevice, watched
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions

MODEL = tiny_model("llama")
GOOD, BAD = MODEL, tiny_model("llama", seed=1)
TOKENS = 45


def completion(start: int, prompt: int = 30, **more: Any) -> Body:
    fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
    return {"prompt": [start, *range(100, 99 + prompt)], **fields}


def drafted(draft: LoadedModel, model: LoadedModel = MODEL, **options: Any) -> MLXEngine:
    """An engine that has drafted before: it found that to be faster."""
    usual = {"batch_size": 4, "share_from": 1, **options}
    engine = MLXEngine(model, EngineOptions(**usual), draft=draft, clock=count().__next__)
    assert engine._running.drafting is not None
    engine._running.drafting._rate.drafts = True
    return engine


def said(model: LoadedModel, body: Body) -> str:
    """What the model says alone, step by step."""
    return greedy_text(replace(model, eos_token_ids=frozenset()), body)


def answer(engine: MLXEngine, body: Body) -> Any:
    engine.add([task("one", body)])
    return finish(engine, 1)["one"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma2"])
def test_a_good_draft_spares_steps_and_a_bad_one_costs_nothing(family: str) -> None:
    model, body = tiny_model(family), completion(1)  # gemma2 runs one at a time

    good, bad = drafted(model, model), drafted(BAD, model)

    expected = said(model, body)
    assert texts(answer(good, body)) == texts(answer(bad, body)) == [expected]
    totals = good.totals
    # The first step waits for nothing yet; then 4 + 1 tokens, 6 + 1, 8 + 1 at most.
    assert totals.decode_steps <= 8
    assert totals.accepted_tokens == totals.drafted_tokens >= TOKENS - totals.decode_steps
    assert bad.totals.decode_steps >= TOKENS - bad.totals.accepted_tokens
    assert bad.totals.accepted_tokens < 4 < bad.totals.drafted_tokens
    assert good.totals.decoded_tokens == bad.totals.decoded_tokens == TOKENS


@pytest.mark.parametrize("draft", [GOOD, BAD], ids=["good", "bad"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}],
    ids=["plain", "filtered"],
)
def test_a_seeded_sequence_draws_the_same_tokens(
    draft: LoadedModel, sampling: dict[str, Any]
) -> None:
    body = completion(2, **{"temperature": 1.0, "seed": 7, **sampling})
    (plain,), _ = run(MODEL, [body])

    engine = drafted(draft)

    assert texts(answer(engine, body)) == texts(plain)
    accepted = engine.totals.accepted_tokens
    assert accepted == engine.totals.drafted_tokens > 30 if draft is GOOD else accepted < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.0},
        {"logprobs": 2},
        {"guided_choice": ["alpha", "gamma"], "ignore_eos": False},
        {"max_tokens": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_not_chosen_ahead_goes_step_by_step(fields: dict[str, Any]) -> None:
    model = speaking.model() if "guided_choice" in fields else MODEL
    body = completion(3, **fields)
    (plain,), _ = run(model, [body])

    engine = drafted(model, model)

    assert answer(engine, body)["choices"] == plain["choices"]
    assert engine.totals.drafted_tokens == 0


@pytest.mark.parametrize("share_from", [1, 10**9], ids=["shared", "copied"])
def test_who_is_joined_goes_on_step_by_step_and_then_alone_again(share_from: int) -> None:
    engine = drafted(GOOD, share_from=share_from, min_prefix_tokens=8)
    bodies = [completion(4, max_tokens=90), completion(4, prompt=40, max_tokens=12)]
    bodies.append(completion(4, prompt=35, max_tokens=14))  # two that share a prefix
    engine.add([task("0", bodies[0])])
    for _ in range(5):
        engine.step()
    alone = engine.totals
    assert 0 < alone.accepted_tokens == alone.drafted_tokens

    engine.add([task("1", bodies[1]), task("2", bodies[2])])
    results, joined = {}, engine.totals
    while len(results) < 2:
        results.update((outcome.id, outcome.result) for outcome in engine.step())
        joined = engine.totals if engine.running > 1 else joined
    assert joined.drafted_tokens == alone.drafted_tokens  # while they waited and while they ran
    results.update(finish(engine, 1))

    for index, body in enumerate(bodies):
        assert texts(results[str(index)]) == [said(MODEL, body)]
    totals = engine.totals
    assert totals.drafted_tokens > joined.drafted_tokens
    assert totals.accepted_tokens == totals.drafted_tokens
    # Nothing was computed again: the first prompt, then the shared prefix and what follows it.
    assert totals.prefilled_tokens == alone.prefilled_tokens + 35 + 5 + 1
    assert totals.sequences_preempted == 0


def test_with_a_batch_of_one_others_may_wait() -> None:
    engine = drafted(GOOD, batch_size=1)
    bodies = [completion(start) for start in (5, 6, 7)]
    engine.add([task(str(number), body) for number, body in enumerate(bodies)])

    results = finish(engine, 3)

    assert [texts(results[str(n)]) for n in range(3)] == [[said(MODEL, b)] for b in bodies]
    assert engine.totals.accepted_tokens == engine.totals.drafted_tokens > 90


@pytest.mark.parametrize("draft", [GOOD, BAD], ids=["good", "bad"])
def test_an_answer_ends_where_it_would_among_drafted_tokens(draft: LoadedModel) -> None:
    body = completion(8)
    tokens, text = greedy(MODEL, body["prompt"], TOKENS), said(MODEL, body)
    last = next(token for token in tokens[23:] if token not in tokens[:23])
    end = tokens.index(last)
    ending = replace(MODEL, eos_token_ids=frozenset([last]))
    ends = [
        (MODEL, {"max_tokens": 23}, text[:23], "length", 23),
        (MODEL, {"stop": text[end - 1 : end + 1]}, text[: end - 1], "stop", end + 1),
        (ending, {"ignore_eos": False}, text[:end], "stop", end + 1),
    ]
    assert len(text) == TOKENS  # a character for each token
    for model, fields, expected, reason, generated in ends:
        engine = drafted(draft, model)
        result = answer(engine, {**body, **fields})
        assert texts(result) == [expected]
        assert result["choices"][0]["finish_reason"] == reason
        plain = MLXEngine(model, EngineOptions(batch_size=4))
        assert result["usage"] == answer(plain, {**body, **fields})["usage"]
        assert engine.totals.decoded_tokens == plain.totals.decoded_tokens == generated


def test_what_is_told_in_between_grows_by_what_was_accepted() -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    engine = drafted(GOOD)
    engine.add([task("one", body)])
    told, results = [""], {}
    while not results:
        results = {outcome.id: outcome.result for outcome in engine.step()}
        for said in engine.partial(["one"]).get("one", ()):
            told.append(said.content)

    (text,) = texts(results["one"])
    assert all(later.startswith(before) for before, later in pairwise(told))
    assert text.startswith(told[-1])
    assert max(len(b) - len(a) for a, b in pairwise(told)) == 9


def test_a_window_is_drafted_for_until_it_is_full() -> None:
    model = tiny_model("gemma3_text")  # 16 tokens
    body = completion(9, prompt=4)
    for draft in (model, BAD):
        engine = drafted(draft, model)
        assert texts(answer(engine, body)) == [said(model, body)]
        assert 0 < engine.totals.drafted_tokens < 25

    engine = drafted(model, MODEL)  # the draft's window
    assert texts(answer(engine, body)) == [said(MODEL, body)]
    assert 0 < engine.totals.drafted_tokens < 25


def test_a_long_prompt_is_caught_up_with_beside_plain_steps() -> None:
    device = ScriptedDevice()
    draft, network = watched(BAD, device)
    engine, body = drafted(draft), completion(10, prompt=150)
    body["prompt"] = body["prompt"] * 4
    network.passes.clear()

    assert texts(answer(engine, body)) == [said(MODEL, body)]
    assert network.passes[:3] == [(1, 256), (1, 256), (1, 600 - 2 * 256 + 2 + 1)]  # and what is due
    assert engine.totals.prefilled_tokens == 600


def test_there_is_no_drafting_without_memory_for_it() -> None:
    body = completion(11)
    room = drafted(GOOD)._running.memory.cost.bytes(1, 30 + TOKENS)

    for nbytes, drafts in ((room // 2, False), (3 * room, True)):
        engine = drafted(GOOD, kv_bytes=nbytes)
        assert texts(answer(engine, body)) == [said(MODEL, body)]
        assert (engine.totals.drafted_tokens > 0) == drafts


@pytest.mark.parametrize("garbled", [False, True], ids=["out of memory", "no numbers"])
def test_a_drafted_pass_that_fails_is_done_again(garbled: bool) -> None:
    device = ScriptedDevice()
    model, network = watched(MODEL, device)
    body, failed = completion(12), []

    def drafts(rows: int, held: int, before: int) -> bool:
        """Fails at the third pass of more tokens than the prompt."""
        failed.extend([before] if network.passes[-1][1] > 1 and held > 30 else [])
        return not garbled and len(failed) == 3

    def garbles(inputs: mx.array) -> mx.array:
        return mx.full(len(inputs), garbled and len(failed) == 3 and inputs.shape[1] > 1)

    engine = MLXEngine(
        model, EngineOptions(batch_size=4), draft=GOOD, device=device, clock=count().__next__
    )
    assert engine._running.drafting is not None
    engine._running.drafting._rate.drafts = True
    network.fails, network.garbles = drafts, garbles
    result = answer(engine, {**body, "temperature": 1.0, "seed": 3})

    (plain,), _ = run(MODEL, [{**body, "temperature": 1.0, "seed": 3}])
    assert len(failed) > 3
    assert texts(result) == texts(plain)
    assert engine.totals.sequences_preempted == 1
    refused = engine.totals.drafted_tokens - engine.totals.accepted_tokens
    assert refused == (8 if garbled else 0)  # those of the pass


def test_a_draft_goes_on_behind_what_it_got_wrong() -> None:
    class Sloppy:
        """Says something else every seventh time."""

        def __init__(self) -> None:
            self._passes = 0

        def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
            self._passes += 1
            logits = MODEL.model(inputs, cache=cache)
            return logits if self._passes % 7 else -logits

        def __getattr__(self, name: str) -> Any:
            return getattr(MODEL.model, name)

    network: Any = Sloppy()
    engine, body = drafted(replace(MODEL, model=network)), completion(14)

    assert texts(answer(engine, body)) == [said(MODEL, body)]
    drafts, accepted = engine.totals.drafted_tokens, engine.totals.accepted_tokens
    assert 0.4 * drafts < accepted < drafts


def test_a_narrow_draft_is_shown_no_token_that_it_does_not_know() -> None:
    narrow = replace(BAD, vocab_size=90)
    seen: list[int] = []

    class Network:
        def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
            seen.extend(inputs[0].tolist())  # type: ignore[arg-type]
            return BAD.model(inputs, cache=cache)[..., :90]

        def __getattr__(self, name: str) -> Any:
            return getattr(BAD.model, name)

    engine = drafted(replace(narrow, model=Network()), MODEL)  # type: ignore[arg-type]
    body = completion(13)

    assert texts(answer(engine, body)) == [said(MODEL, body)]
    assert engine.totals.drafted_tokens > 10
    assert max(seen) == 89


def test_it_is_told_and_measured_anew_where_the_model_changes() -> None:
    engine = drafted(GOOD)
    before = engine.drafting
    answer(engine, completion(15, max_tokens=300))

    assert before == "by tiny-llama (not measured yet)"
    # 9 tokens in a step, but for some at the beginning.
    assert engine.drafting == "by tiny-llama (100% accepted, 8.9 times as fast)"
    engine.adapt(None)
    assert engine.drafting == before
    assert MLXEngine(MODEL, EngineOptions()).drafting == ""
