"""Batched means the same: whatever stands beside a job, its answer is the one it has alone.

The oracle is a plain greedy loop over one prompt (`driving.greedy`), which shares no code with the
engine. Tiny random models show every slip of a mask, an offset or a cache as another token.
"""

import random
from typing import Any

import pytest
from driving import AHEAD_SHARING, finish, greedy_text, run, task, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, SEQUENTIAL_FAMILIES, tiny_model


def branching(seed: int, jobs: int) -> list[dict[str, Any]]:
    """Completions over a random prefix tree three levels deep, answers of 1 to 20 tokens."""
    dice = random.Random(seed)

    def some(length: int) -> list[int]:
        return [dice.randrange(256) for _ in range(length)]

    systems = [some(dice.randrange(20, 50)) for _ in range(3)]
    documents = [some(dice.randrange(1, 30)) for _ in range(3)]
    return [
        {
            "prompt": [
                *dice.choice(systems),
                *(dice.choice(documents) if dice.random() < 0.7 else ()),
                *some(dice.randrange(1, 12)),
            ],
            "max_tokens": dice.randrange(1, 21),
            "temperature": 0,
        }
        for _ in range(jobs)
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *SEQUENTIAL_FAMILIES])
def test_every_family_answers_as_alone(family: str) -> None:
    model = tiny_model(family)
    bodies = branching(seed=1, jobs=40)

    results, engine = run(model, bodies, min_prefix_tokens=1)

    assert [texts(result)[0] for result in results] == [greedy_text(model, b) for b in bodies]
    totals = engine.totals
    # A sequence whose prompt others share to the end still has to compute its last token itself.
    assert totals.distinct_tokens <= totals.prefilled_tokens <= totals.distinct_tokens + len(bodies)
    assert totals.prompt_tokens == sum(len(body["prompt"]) for body in bodies)
    assert totals.prefilled_tokens < 0.5 * totals.prompt_tokens


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    jobs=st.integers(1, 24),
    sequences=st.integers(1, 6),
    min_prefix_tokens=st.integers(1, 40),
    windows=st.integers(1, 3),
    share_from=st.sampled_from([1, 100, 10**9]),
)
def test_any_tree_batch_and_windows(
    seed: int, jobs: int, sequences: int, min_prefix_tokens: int, windows: int, share_from: int
) -> None:
    model = tiny_model("llama")
    bodies = branching(seed, jobs)
    shape = {
        "batch_size": sequences,
        "min_prefix_tokens": min_prefix_tokens,
        "share_from": share_from,
    }
    _, engine = run(model, [], **shape)

    results: dict[str, Any] = {}
    for window in range(windows):
        engine.add([task(str(i), bodies[i]) for i in range(window, jobs, windows)])
        for _ in range(3):  # the next window comes in while this one runs
            results.update((outcome.id, outcome.result) for outcome in engine.step())
    results.update(finish(engine, jobs - len(results)))

    for index, body in enumerate(bodies):
        assert texts(results[str(index)]) == [greedy_text(model, body)], index


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_sequences_that_outgrow_the_memory_are_put_back_and_go_on(family: str) -> None:
    model = tiny_model(family)
    bodies = [{**body, "max_tokens": 60} for body in branching(seed=2, jobs=10)]
    _, engine = run(model, [])
    longest = max(len(body["prompt"]) for body in bodies) + 60
    cost = engine._running.memory.cost
    ahead = 3 * AHEAD_SHARING * cost.shareable
    kv_bytes = cost.bytes(1, longest + 30) + ahead  # never four sequences at their longest

    results, engine = run(model, bodies, kv_bytes=kv_bytes, reserve=1)

    assert engine.totals.sequences_preempted > 0
    assert [texts(result)[0] for result in results] == [greedy_text(model, b) for b in bodies]


def test_prefixes_are_evicted_for_sequences_and_built_again() -> None:
    model = tiny_model("llama")
    first, second = branching(seed=3, jobs=12), branching(seed=4, jobs=12)
    _, engine = run(model, [], kv_bytes=768 * 500)
    results = {}
    for number, bodies in enumerate((first, second, first)):
        engine.add([task(f"{number}/{i}", body) for i, body in enumerate(bodies)])
        results.update(finish(engine, len(bodies)))

    assert engine.totals.prefixes_evicted > 0
    assert engine.totals.prefix_bytes <= 768 * 500
    for number, bodies in enumerate((first, second, first)):
        for index, body in enumerate(bodies):
            assert texts(results[f"{number}/{index}"]) == [greedy_text(model, body)]


def test_a_prefix_serves_a_later_window() -> None:
    model = tiny_model("llama")
    system = list(range(100, 140))
    bodies = [{"prompt": [*system, i, 7, i], "max_tokens": 4, "temperature": 0} for i in range(6)]
    _, engine = run(model, [])
    engine.add([task(f"a{i}", body) for i, body in enumerate(bodies)])
    finish(engine, 6)
    before = engine.totals.prefilled_tokens
    lone = {**bodies[0], "prompt": [*system, 9, 9, 9, 9]}

    engine.add([task("b", lone)])
    result = finish(engine, 1)["b"]

    prefilled = engine.totals.prefilled_tokens - before
    assert prefilled == 4
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == (
        len(lone["prompt"]) - prefilled
    )
    assert texts(result) == [greedy_text(model, lone)]


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "presence_penalty": 1.5},
    {"temperature": 0.9, "frequency_penalty": -0.7},
    {"temperature": 0.9, "repetition_penalty": 1.4},
    {"temperature": 0.9, "logit_bias": {"65": 3, "66": -100}},
    {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"temperature": 0, "min_tokens": 10},
    {"temperature": 1.0, "n": 3},
]


def test_seeded_and_penalised_sequences_answer_as_alone() -> None:
    model = tiny_model("llama")
    prompts = [body["prompt"] for body in branching(seed=6, jobs=len(SAMPLING))]
    bodies = [
        {"prompt": prompt, "max_tokens": 16, "seed": number, **sampling}
        for number, (prompt, sampling) in enumerate(zip(prompts, SAMPLING, strict=True))
    ]

    together, _ = run(model, bodies, batch_size=5)

    for body, result in zip(bodies, together, strict=True):
        (alone,), _ = run(model, [body])
        assert texts(result) == texts(alone), body


def test_a_sequence_put_back_draws_on_where_it_was() -> None:
    model = tiny_model("llama")
    bodies = [
        {**body, "max_tokens": 60, "temperature": 0.9, "seed": 1, "presence_penalty": 0.5}
        for body in branching(seed=7, jobs=8)
    ]
    longest = max(len(body["prompt"]) for body in bodies) + 60
    kv_bytes = 768 * (longest + 30 + 3 * AHEAD_SHARING)

    squeezed, engine = run(model, bodies, kv_bytes=kv_bytes, reserve=1)

    assert engine.totals.sequences_preempted > 0
    for body, result in zip(bodies, squeezed, strict=True):
        (alone,), _ = run(model, [body])
        assert texts(result) == texts(alone)


def test_equal_greedy_requests_are_generated_once() -> None:
    model = tiny_model("llama")
    body = {"prompt": list(range(40)), "max_tokens": 10, "temperature": 0}

    results, engine = run(model, [body] * 9 + [{**body, "max_tokens": 4}])

    assert engine.totals.decoded_tokens <= 10 + 4 + 2  # and perhaps two stop tokens
    expected = greedy_text(model, body)
    assert [texts(result)[0] for result in results[:9]] == [expected] * 9
    assert texts(results[9])[0] == expected[:4]
    cached = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in results[:9]]
    assert sorted(cached)[1:] == [40] * 8


def test_unseeded_samples_differ() -> None:
    body = {"prompt": list(range(20)), "max_tokens": 12, "temperature": 1.5, "n": 6}
    (result,), _ = run(tiny_model("llama"), [body])
    assert len(set(texts(result))) > 3
