"""Which models hold a prefix once, when sequences refer to it, and what memory that takes."""

import gc
from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from driving import AHEAD_SHARING, finish, greedy_text, run, task, texts
from families import tiny_family
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import base, qwen3, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from scripted_device import OUT_OF_MEMORY
from test_same_answers import branching
from tiny import FAMILIES, Nested, tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.prefix_cache import PrefixCache, no_use
from mlx_rq.engine.kv.prefix_key import key_of
from mlx_rq.engine.kv.shared_attention import shared_attention
from mlx_rq.engine.kv.sharing import (
    Sharing,
    SharingCost,
    built_on,
    frozen,
    quantized,
    referring,
    worth,
)
from mlx_rq.engine.kv.trial import Trial
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import measure_kv, referred_to

HELD_ONCE = {
    "llama": "3 of 3 layers",
    "qwen3": "3 of 3 layers",
    "qwen3_moe": "3 of 3 layers",
    "gpt_oss": "2 of 3 layers",
    "gemma3_text": "1 of 3 layers",
    "gemma4_text": "1 of 2 layers",
    "lfm2": "1 of 3 layers",
    "qwen3_next": "1 of 3 layers",
    "deepseek_v3": "3 of 3 layers",
}
COPIED = {
    "gemma2": "the model does not use mlx-lm's attention function",
    "llama4": "ValueError: <class 'mlx_lm.models.cache.ChunkedKVCache'> does not yet support",
}
TOKEN = 768
"""Bytes of KV for each token of the tiny llama."""


@pytest.mark.parametrize("family", [*HELD_ONCE, *COPIED])
def test_a_model_is_tried_when_it_is_loaded(family: str) -> None:
    sharing = Sharing(tiny_model(family).model)

    assert sharing.on == (family in HELD_ONCE)
    way, why = ("held once", HELD_ONCE) if sharing.on else ("copied into each sequence", COPIED)
    assert str(sharing).startswith(f"{way} ({why[family]}")
    sharing.remove()


def test_every_family_of_the_same_answer_tests_is_known() -> None:
    assert set(FAMILIES) <= {*HELD_ONCE, *COPIED}


def test_the_engine_says_which_way_is_in_use_and_why() -> None:
    def said(family: str, **options: Any) -> str:
        return MLXEngine(tiny_model(family), EngineOptions(**options)).prefix_sharing

    assert said("llama") == "held once (3 of 3 layers)"
    assert said("llama", share_prefixes=False) == "copied into each sequence (switched off)"
    assert said("llama4") == "copied into each sequence (sequences are not batched)"


def test_only_the_models_own_attention_is_exchanged_and_only_while_it_is_loaded() -> None:
    gc.collect()  # engines of other tests, which nobody uses any more
    stock = base.scaled_dot_product_attention

    first, second = (MLXEngine(tiny_model("qwen3_moe")) for _ in range(2))
    assert qwen3_moe.scaled_dot_product_attention is shared_attention
    assert qwen3.scaled_dot_product_attention is base.scaled_dot_product_attention is stock

    del first
    gc.collect()
    assert qwen3_moe.scaled_dot_product_attention is shared_attention  # the second goes on with it
    del second
    gc.collect()
    assert qwen3_moe.scaled_dot_product_attention is stock


def test_what_was_tried_in_vain_is_taken_out() -> None:
    sharing = Sharing(tiny_family("iquestloopcoder").model)

    assert not sharing.on
    assert sharing.why.startswith("it would change the logits, ")
    module = __import__("sys").modules["mlx_lm.models.iquestloopcoder"]
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention


@pytest.mark.parametrize("trial", ["_takes_ragged_steps", "quantized"])
def test_nothing_stays_installed_where_the_device_fails_at_a_later_trial(
    trial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(f"mlx_rq.engine.kv.sharing.{trial}", fails)
    gc.collect()  # engines of other tests, which nobody uses any more
    stock = qwen3.scaled_dot_product_attention
    with pytest.raises(RuntimeError):
        Sharing(tiny_model("qwen3").model, bits=8)

    assert qwen3.scaled_dot_product_attention is stock


@pytest.mark.parametrize("error", [AssertionError, KeyError])
def test_a_model_that_takes_no_ragged_steps_shares_prefixes_all_the_same(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise error("one token of each")

    monkeypatch.setattr(Trial, "ragged", refuses)
    sharing = Sharing(tiny_model("qwen3").model)

    assert sharing.on
    assert not sharing.ragged
    sharing.remove()


@pytest.mark.parametrize(
    ("chain", "parts"),
    [
        ([(100, 10)], 1),
        ([(100, 9)], 0),  # too short for so few sequences
        ([(5000, 1)], 0),  # nobody to share with
        ([(20, 10), (500, 10)], 2),  # a short system prompt above a long document
        ([(200, 10), (20, 10)], 1),
        ([(20, 10), (30, 10)], 0),
        ([(2000, 10), (2000, 1)], 1),
        (
            [(20, 1), (2000, 10)],
            0,
        ),  # never so in a batch: whoever refers to the second does to both
        ([(200, 10), (60, 10), (90, 10), (60, 10)], 1),
        ([(200, 10), (60, 10), (190, 10), (60, 10)], 3),
        ([], 0),
    ],
)
def test_sequences_refer_to_what_pays(chain: list[tuple[int, int]], parts: int) -> None:
    assert worth(chain, SharingCost(once=0, part=899)) == parts


@pytest.mark.parametrize(
    ("chain", "begun", "parts"),
    [
        ([(100, 11)], False, 1),
        ([(99, 11)], False, 0),
        ([(99, 11)], True, 1),  # what sharing costs whatever is shared, is spent already
        ([(40, 11)], True, 1),
        ([(39, 11)], True, 0),
        ([(100, 11), (40, 11)], False, 2),
    ],
)
def test_the_first_part_of_a_batch_costs_more_than_the_next(
    chain: list[tuple[int, int]], begun: bool, parts: int
) -> None:
    assert worth(chain, SharingCost(once=600, part=399), begun=begun) == parts


LAUNCH, READ = 5e-6, 10e-9
"""Seconds to launch a kernel, and to read a token's KV in a layer: 4 KB at 400 GB/s (an M3 Max)."""


def seconds(chain: list[tuple[int, int]], shared: int) -> float:
    """What a layer's attention takes, if sequences refer to so many parts of a chain."""
    sequences = chain[0][1]
    reads = sum(tokens * (1 if level < shared else sequences)
                for level, (tokens, _) in enumerate(chain))  # fmt: skip
    return reads * READ + (7 + 3 * shared if shared else 1) * LAUNCH


@pytest.mark.parametrize("sequences", [2, 4, 8, 32])
@pytest.mark.parametrize("lengths", [[60], [400], [2000], [9000], [60, 2000], [3000, 60, 60]])
def test_the_gate_holds_where_launches_cost_five_microseconds(
    lengths: list[int], sequences: int
) -> None:
    chain = [(tokens, sequences) for tokens in lengths]
    overhead = seconds([(0, 4)], 1) - seconds([(0, 4)], 0)  # what is measured

    parts = worth(chain, SharingCost.of(round(overhead / READ)))

    ways = [seconds(chain, shared) for shared in range(len(chain) + 1)]
    assert ways[parts] == min(ways)


@pytest.mark.parametrize(("times_rounding", "on"), [(0.4, True), (0.6, False)])
def test_sharing_may_change_logits_by_less_than_a_batch_may(
    monkeypatch: pytest.MonkeyPatch, times_rounding: float, on: bool
) -> None:
    monkeypatch.setattr("mlx_rq.engine.kv.sharing._disagreement", lambda *_: times_rounding)
    sharing = Sharing(tiny_model("llama").model)

    assert sharing.on == on
    sharing.remove()


def build(prefixes: PrefixCache, tokens: list[int]) -> CachedPrefix:
    prefix = None
    while prefix is None:
        prefix = prefixes.build(key_of(tokens))
    return prefix


def three_deep(share_from: int | None = 1) -> tuple[PrefixCache, list[CachedPrefix]]:
    """A system prompt of 40 tokens, below it a document of 30, below it a section of 10."""
    clock = count()
    prefixes = PrefixCache(
        tiny_model("llama").model, chunk=16, share_from=share_from, clock=lambda: next(clock)
    )
    tokens = list(range(80))
    return prefixes, [build(prefixes, tokens[:depth]) for depth in (40, 70, 80)]


def test_a_longer_prefix_holds_only_what_it_adds() -> None:
    prefixes, (system, document, section) = three_deep()

    assert [prefix.nbytes for prefix in (system, document, section)] == [
        tokens * TOKEN for tokens in (40, 30, 10)
    ]
    assert prefixes.nbytes == 80 * TOKEN
    assert section.chain == (system, document, section)
    for layer in range(3):
        assert section.caches[layer].chain[:2] == document.caches[layer].chain
    assert prefixes.prefilled_tokens == 80

    copies, _ = three_deep(share_from=None)
    assert copies.nbytes == (40 + 70 + 80) * TOKEN


def test_what_others_refer_to_is_evicted_last() -> None:
    prefixes, (system, _, section) = three_deep()
    other = build(prefixes, [99] * 20)

    assert not prefixes.evict(39 * TOKEN, in_use=[system])
    assert len(prefixes) == 4
    needed: Any = {"next_use": lambda: {other.key: 0}, "keep_needed": True}
    assert prefixes.evict(70 * TOKEN, in_use=[system], **needed)
    assert (prefixes.nbytes, prefixes.evicted) == (60 * TOKEN, 2)  # section, then document
    assert prefixes.evict(0)
    assert len(prefixes) == 0

    prefixes, (_, _, section) = three_deep()
    prefixes.use(section, 50)  # worth more than what it refers to
    assert prefixes.evict(79 * TOKEN)
    assert prefixes.nbytes == 70 * TOKEN

    prefixes, (_, _, section) = three_deep()
    assert not prefixes.evict(79 * TOKEN, next_use=lambda: {section.key: 0}, keep_needed=True)
    assert not prefixes.evict(79 * TOKEN, in_use=[section])
    prefixes.build(key_of([*range(70), 7, 8, *range(30)]))  # begun, on the document
    assert not prefixes.evict(69 * TOKEN)
    assert prefixes.evict(70 * TOKEN)
    prefixes.abandon()
    assert prefixes.evict(0)


@pytest.mark.parametrize("family", list(HELD_ONCE))
def test_a_prefix_below_another_is_what_it_would_be_alone(family: str) -> None:
    model = tiny_model(family).model
    system, document, asked = list(range(1, 30)), list(range(60, 40, -1)), mx.array([[3, 4, 5]])
    plain = make_prompt_cache(model)
    model(mx.array([[*system, *document]]), cache=plain)
    upper = make_prompt_cache(model)
    model(mx.array([system]), cache=upper)
    outer, _ = frozen(upper)

    lower = built_on(outer)
    model(mx.array([document]), cache=lower)
    prefix, _ = frozen(lower, outer)
    sharing = Sharing(model)
    sequence = [layer.merge([layer]) for layer in referring(prefix, 1)]
    merged = [layer.merge([layer]) for layer in referring(prefix, 2)]

    expected = model(asked, cache=plain)
    for caches in (sequence, merged):
        assert mx.abs(model(asked, cache=caches) - expected).max().item() < 1e-3
    sharing.remove()


def sharing_bodies(jobs: int, prefix: int = 60, answer: int = 24) -> list[dict[str, Any]]:
    """Completions that have a prefix in common and 3 tokens of their own."""
    system = [(7 * i + 3) % 250 for i in range(prefix)]
    more = {"max_tokens": answer, "min_tokens": answer, "temperature": 0}
    return [{"prompt": [*system, i, 251, i], **more} for i in range(jobs)]


def peak_kv(model: LoadedModel, bodies: list[Any], **options: Any) -> tuple[int, int, MLXEngine]:
    """The most KV bytes and the most sequences that an engine had at once."""
    _, engine = run(model, [], batch_size=8, **options)
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    results: dict[str, Any] = {}
    most = sequences = 0
    while len(results) < len(bodies):
        results.update((outcome.id, outcome.result) for outcome in engine.step())
        engine.check()
        most, sequences = max(most, engine.kv_in_use()[0]), max(sequences, engine.running)
    for index, body in enumerate(bodies):
        assert texts(results[str(index)]) == [greedy_text(model, body)]
    return most, sequences, engine


def test_a_prefix_is_held_once_however_many_sequences_stand_on_it() -> None:
    model, bodies = tiny_model("llama"), sharing_bodies(12)

    copied, _, engine = peak_kv(model, bodies, share_prefixes=False)
    assert engine.totals.sequences_sharing == 0
    shared, sequences, engine = peak_kv(model, bodies)

    assert engine.totals.sequences_sharing == 12
    assert sequences == 8
    assert shared <= (60 + 8 * 64) * TOKEN  # one prefix, and a block of slots for each sequence
    assert copied >= (60 + 8 * 64) * TOKEN + 7 * 60 * TOKEN
    assert engine.totals.prefix_bytes == 60 * TOKEN


def test_attention_beside_a_state_holds_a_prefix_once() -> None:
    model, bodies = tiny_family("falcon_h1"), sharing_bodies(6, answer=8)  # a list in each layer

    copied, _, engine = peak_kv(model, bodies, share_prefixes=False)
    token = engine._running.memory.cost.per_token
    shared, sequences, engine = peak_kv(model, bodies)

    assert engine.prefix_sharing == "held once (3 of 3 layers)"
    assert engine._running.memory.cost.shareable == token > 0
    assert (sequences, engine.totals.sequences_sharing) == (6, 6)
    assert copied - shared >= 5 * 60 * token


def test_more_sequences_fit_where_they_share() -> None:
    model, bodies = tiny_model("llama"), sharing_bodies(12)
    room = {"kv_bytes": TOKEN * (60 + 5 * (3 + 24 + AHEAD_SHARING)), "reserve": 24}

    _, copies, engine = peak_kv(model, bodies, share_prefixes=False, **room)
    assert engine.totals.sequences_sharing == 0
    _, sequences, _ = peak_kv(model, bodies, **room)

    assert (copies, sequences) == (1, 5)


def test_short_of_memory_sequences_share_what_would_else_not_pay() -> None:
    model, bodies = tiny_model("llama"), sharing_bodies(12)
    room = {"kv_bytes": TOKEN * (60 + 5 * (3 + 24 + AHEAD_SHARING)), "reserve": 24}

    _, sequences, engine = peak_kv(model, bodies, share_from=10**9)
    assert (sequences, engine.totals.sequences_sharing) == (8, 0)
    _, sequences, engine = peak_kv(model, bodies, share_from=10**9, **room)

    assert (sequences, engine.totals.sequences_sharing) == (5, 12)


def test_sequences_with_windows_reserve_what_they_hold_themselves() -> None:
    model = tiny_model("gemma3_text")
    _, engine = run(model, [])
    cost = engine._running.memory.cost

    assert 3 * cost.shareable == cost.per_token  # one layer of three
    windows = 16 * (cost.per_token - cost.shareable)
    assert cost.bytes(2, 100) == 2 * (100 * cost.shareable + windows)
    assert cost.bytes(2, 100, own=10) == 2 * (10 * cost.shareable + windows)
    assert cost.bytes(2, 9) == 2 * 9 * cost.per_token


def test_of_two_kinds_of_caches_in_a_layer_each_is_its_sequences_own() -> None:
    cost = measure_kv(Nested())  # type: ignore[arg-type]

    assert (cost.per_token, cost.shareable) == (3 * 32, 32)


def test_what_running_sequences_refer_to_is_not_evicted_for_others() -> None:
    model, bodies = tiny_model("llama"), sharing_bodies(4, prefix=60, answer=40)
    _, engine = run(model, [], reserve=8)
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    while engine.running < 4:
        engine.step()
    running = engine._running
    sequences, prefixes, memory = list(running), running.prefix_cache, running.memory
    (prefix,) = set(referred_to(sequences))

    def fitting(tokens: int) -> int:
        memory.nbytes = tokens * TOKEN
        return memory.fitting(sequences, sequences[:1], prefixes, no_use, prefix)

    own = AHEAD_SHARING + max(len(sequence.tokens) - 60 + 8 for sequence in sequences)
    assert fitting(60 + 5 * own) == 1
    assert fitting(59 + 5 * own) == 0
    assert not memory.outgrown(sequences, prefixes)
    memory.nbytes = 59 * TOKEN
    assert memory.outgrown(sequences, prefixes)
    assert len(prefixes) == 1

    put_back = engine._sequences.make_room()
    assert put_back == sequences[:0:-1]  # the newest first; one goes on
    assert referred_to(sequences) == [prefix]
    memory.nbytes = 2**30
    assert len(finish(engine, 4)) == 4
    assert referred_to(sequences) == []
    memory.nbytes = 59 * TOKEN
    assert prefixes.evict(memory.nbytes)
    assert len(prefixes) == 0


@pytest.mark.parametrize("family", list(HELD_ONCE))
def test_answers_and_logprobs_are_those_of_copies(family: str) -> None:
    model = tiny_model(family)
    bodies = [{**body, "logprobs": 2, "n": 1 + i % 2} for i, body in enumerate(branching(5, 30))]

    copied, _ = run(model, bodies, batch_size=8, min_prefix_tokens=1, share_prefixes=False)
    shared, engine = run(model, bodies, batch_size=8, min_prefix_tokens=1)

    assert engine.totals.sequences_sharing > 15
    for one, other in zip(copied, shared, strict=True):
        assert texts(one) == texts(other)
        for ours, theirs in zip(one["choices"], other["choices"], strict=True):
            pair = (ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"])
            assert all(abs(a - b) < 2e-4 for a, b in zip(*pair, strict=True))


@given(
    chain=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 32)), max_size=6),
    share_from=st.integers(1, 5000),
    begun=st.booleans(),
)
def test_more_sequences_never_share_less(
    chain: list[tuple[int, int]], share_from: int, begun: bool
) -> None:
    more = [(tokens, sequences + 1) for tokens, sequences in chain]
    cost = SharingCost.of(share_from)
    few, many = (worth(one, cost, begun=begun) for one in (chain, more))
    assert few <= many <= len(chain)


def test_prefixes_in_few_bits_take_less_and_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, bodies = tiny_model("llama", head_dim=64), sharing_bodies(6)
    whole, engine = run(model, bodies)
    held = engine.totals.prefix_bytes

    results, engine = run(model, bodies, kv_bits=8)

    assert engine.totals.sequences_sharing == 6
    assert engine.totals.prefix_bytes == held * 9 // 32  # float32, and scales for 64 numbers
    said = engine.prefix_sharing
    assert said.startswith("held once (3 of 3 layers); in 8 bits: 28% of the bytes, and ")
    assert caplog.messages == [f"prefixes are {said}"]
    drift = float(said.split("drift by ")[1].split()[0])
    assert 0 < drift < 0.1 < quantized(model.model, 4)[1]
    # A random model goes other ways soon; it begins as with the prefix whole.
    for one, other in zip(whole, results, strict=True):
        assert texts(one)[0][0] == texts(other)[0][0]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama4", "copied into each sequence (sequences are not batched); not in 8 bits"),
        ("llama", "held once (3 of 3 layers); not in 8 bits (no layer can be)"),  # heads of 16
        ("deepseek_v3", "held once (3 of 3 layers); in 8 bits: 45% of the bytes, and "),  # latents
    ],
)
def test_few_bits_that_have_little_effect_are_told_too(family: str, said: str) -> None:
    engine = MLXEngine(tiny_model(family), EngineOptions(kv_bits=8))

    assert engine.prefix_sharing.startswith(said)
