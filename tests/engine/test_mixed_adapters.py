"""Rows of different adapters in one step: the answers that each has alone, and KV of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapting import KEYS, fresh_model, write_adapter
from driving import finish, task
from mlx import nn
from mlx.utils import tree_flatten

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.kv.prefix_key import adapter_of, key_of, tokens_of
from mlx_rq.engine.models import mixed
from mlx_rq.engine.models.load import ModelError
from mlx_rq.engine.models.mixed import MixedLinear, Part, pays, tried_in_one_step
from mlx_rq.engine.options import EngineOptions

SYSTEM = "You answer as a clerk of the old school would. "
QUESTIONS = ("Who goes there?", "What is it?", "Why?")
ALL_LAYERS = [*KEYS, "self_attn.k_proj", "mlp.up_proj"]


def engine_of(bits: int | None = None, **options: Any) -> MLXEngine:
    usual = {"batch_size": 6, "chunk": 32, "share_from": 1, "mix_adapters": True}
    return MLXEngine(fresh_model(bits=bits), EngineOptions(**{**usual, **options}))


def adapters_in(folder: Path, bits: int | None = None) -> dict[str, Adapter]:
    """Of two kinds, three ranks, and other layers each."""
    made = {
        "one": write_adapter(folder / "one", seed=1, bits=bits),
        "wide": write_adapter(folder / "wide", seed=2, rank=7, keys=ALL_LAYERS, bits=bits),
        "dora": write_adapter(folder / "dora", "dora", seed=3, rank=2, keys=KEYS[:1], bits=bits),
    }
    return {f"tiny:{name}": Adapter(f"tiny:{name}", path) for name, path in made.items()}


def body(question: str, model: str = "", **options: Any) -> dict[str, Any]:
    asked = {"model": model} if model else {}
    usual = {"prompt": f"{SYSTEM}{question}", "max_tokens": 12, "logprobs": 1, "temperature": 0}
    return {**usual, **asked, **options}


def answers(engine: MLXEngine, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert not engine.add([task(str(number), one) for number, one in enumerate(bodies)])
    results = finish(engine, len(bodies))
    return [results[str(number)] for number in range(len(bodies))]


def said(results: list[dict[str, Any]]) -> list[str]:
    return [result["choices"][0]["text"] for result in results]


def logprobs(results: list[dict[str, Any]]) -> list[float]:
    return [one for r in results for one in r["choices"][0]["logprobs"]["token_logprobs"]]


def alone(adapters: Mapping[str, Adapter], bits: int | None = None) -> dict[str, list[Any]]:
    """What each adapter, and the model without one, says to the questions by itself."""
    engine, results = engine_of(bits), {}
    for name in ("", *adapters):
        engine.adapt(adapters.get(name))
        results[name] = answers(engine, [body(question) for question in QUESTIONS])
    return results


@pytest.mark.parametrize("bits", [None, 4])
def test_answers_are_those_of_each_adapter_alone(tmp_path: Path, bits: int | None) -> None:
    adapters = adapters_in(tmp_path, bits)
    expected = alone(adapters, bits)
    assert len({tuple(said(results)) for results in expected.values()}) == 4
    engine = engine_of(bits)
    assert list(engine.mix(adapters)) == list(adapters)
    asked = [(name, number) for number in range(3) for name in ("", *adapters)]
    results = answers(engine, [body(QUESTIONS[number], name) for name, number in asked])
    alike = [expected[name][number] for name, number in asked]
    assert said(results) == said(alike)
    assert logprobs(results) == pytest.approx(logprobs(alike), abs=1e-3)
    for (name, _), result, other in zip(asked, results, alike, strict=True):
        assert result["model"] == (name or "tiny-llama")
        assert result["system_fingerprint"] == other["system_fingerprint"]
    # Rows of all of them in a step, else it would have taken as many as alone.
    assert engine.totals.decode_steps < 3 * 12


def test_prefixes_are_shared_within_an_adapter_and_never_beyond_it(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    engine = engine_of()
    engine.mix(adapters)
    prefixes = engine._running.prefix_cache
    shared = len(SYSTEM + "Wh")  # of a tokenizer of bytes
    answers(engine, [body(question, name) for question in QUESTIONS for name in ("", *adapters)])
    held = [(adapter_of(prefix.key), prefix.depth) for prefix in prefixes]
    assert sorted(held) == [(number, shared) for number in range(4)]
    tokens = engine._adapted.model.tokenizer.encode(f"{SYSTEM}Wh")
    assert [tokens_of(prefix.key) for prefix in prefixes] == [tokens] * 4
    once = shared + sum(len(question) - 2 for question in QUESTIONS)
    assert engine.totals.distinct_tokens == 4 * once
    assert engine.totals.prefilled_tokens <= 1.05 * 4 * once


def test_what_is_drafted_is_verified_with_the_adapter_of_its_sequence(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    expected = alone(adapters)
    options = EngineOptions(batch_size=6, mix_adapters=True)
    engine = MLXEngine(fresh_model(), options, draft=fresh_model())
    engine.mix(adapters)
    assert engine._running.drafting is not None
    for name in ("", *adapters):
        engine._running.drafting._rate.drafts = True
        (result,) = answers(engine, [body(QUESTIONS[0], name, logprobs=None)])
        assert said([result]) == said(expected[name][:1])
    assert engine.totals.accepted_tokens > 0


def test_a_sequence_that_makes_room_goes_on_with_its_adapter(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    names = ["", *adapters]
    results = alone(adapters)
    engine = engine_of()
    engine.mix(adapters)
    engine.add([task(str(n), body(QUESTIONS[0], name)) for n, name in enumerate(names)])
    while engine.running < 4 or min(engine.generated().values()) < 3:
        engine.step()
    for sequence in list(engine._running):
        engine._sequences.preempt(sequence)
        assert len(sequence.tokens) > len(sequence.prompt)
        assert sequence.key == key_of(sequence.tokens, adapter_of(sequence.prompt_key))
    ended = finish(engine, 4)
    assert engine.totals.sequences_preempted == 4
    assert said([ended[str(n)] for n in range(4)]) == [said(results[name])[0] for name in names]


def test_logprobs_of_prompts_are_those_of_the_adapter(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    prompt: dict[str, Any] = {"echo": True, "max_tokens": 0}
    engine = engine_of()
    engine.adapt(adapters["tiny:one"])
    (expected,) = answers(engine, [body("Why?", **prompt)])
    engine = engine_of()
    engine.mix(adapters)
    plain, adapted = answers(engine, [body("Why?", name, **prompt) for name in ("", "tiny:one")])
    first, *others = adapted["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    assert others == pytest.approx(logprobs([expected])[1:], abs=1e-3)
    assert others != pytest.approx(logprobs([plain])[1:], abs=0.1)


def test_what_cannot_be_mixed_is_put_on_by_itself_and_taken_off_again(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    other = write_adapter(tmp_path / "other", keys=["self_attn.q_proj", "model.embed_tokens"])
    unfit = write_adapter(tmp_path / "unfit", model={"hidden_size": 32})
    others = {
        name: Adapter(name, folder) for name, folder in (("t:other", other), ("t:unfit", unfit))
    }
    expected = alone({**adapters, "t:other": others["t:other"]})
    engine = engine_of()
    assert list(engine.mix({**others, **adapters})) == list(adapters)
    questions = [body(question) for question in QUESTIONS]
    for _ in range(2):
        mixed_ones = answers(engine, [body(QUESTIONS[0], name) for name in ("", *adapters)])
        assert said(mixed_ones) == [said(expected[name])[0] for name in ("", *adapters)]
        engine.adapt(others["t:other"])
        assert said(answers(engine, questions)) == said(expected["t:other"])
        with pytest.raises(ModelError):
            engine.adapt(others["t:unfit"])


def test_who_is_throttled_for_a_while_mixes_all_the_same(tmp_path: Path) -> None:
    engine = engine_of()
    engine.throttle(0.1)
    assert engine.capacity == 1
    assert list(engine.mix(adapters_in(tmp_path))) == ["tiny:one", "tiny:wide", "tiny:dora"]


def weight_bytes(engine: MLXEngine) -> int:
    """Counts the arrays themselves: MLX puts a new one into a freed buffer up to twice its size."""
    weights: Any = tree_flatten(engine._adapted.model.model.parameters())
    return sum(weight.nbytes for _, weight in weights)


def test_their_memory_counts(tmp_path: Path) -> None:
    adapters = adapters_in(tmp_path)
    engine = engine_of(kv_bytes=4_000_000)
    before = weight_bytes(engine)
    engine.mix(adapters)
    took = 4_000_000 - engine._running.memory.nbytes
    assert took == weight_bytes(engine) - before > 100_000
    assert list(engine_of(kv_bytes=4 * took).mix(adapters)) == list(adapters)
    assert list(engine_of(kv_bytes=4 * took - 4).mix(adapters)) == ["tiny:one", "tiny:wide"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mix_adapters": False}, "it is switched off"),
        ({"batch_size": 1}, "there is one row"),
        ({"mix_adapters": None}, "it is slower"),
        ({"kv_bytes": 1000}, "there is no memory"),
    ],
)
def test_where_it_does_not_pay_all_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    """A step of mixed rows takes three seconds, one of an adapter's own a fifth of one."""
    steps: list[int] = []

    def seconds(network: Any, adapters: Sequence[int]) -> float:
        steps.append(len(adapters))
        return 3.0 if len({*adapters}) > 1 else 0.2

    monkeypatch.setattr(mixed, "_seconds", seconds)
    engine = engine_of(**options)
    plain = dict(engine._adapted.model.model.named_modules())
    budget = engine._running.memory.nbytes
    assert not engine.mix(adapters_in(tmp_path))
    assert dict(engine._adapted.model.model.named_modules()) == plain
    assert engine._running.memory.nbytes == budget
    assert steps == ([6, 2, 2, 1, 1] if why == "it is slower" else [])
    monkeypatch.setattr(mixed, "_seconds", lambda _, adapters: 1.0)
    assert pays(engine._adapted.model.model, adapters=1, rows=6)


class Flat(nn.Module):
    """A model that takes rows apart into single tokens."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layer = layer

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        return self.layer(x.reshape(-1, 16)).reshape(*tokens.shape, -1)


def test_a_model_that_takes_rows_apart_is_found_out() -> None:
    draw = mx.random.normal
    parts = [Part(draw((16, 2)), draw((2, 32))) for _ in range(3)]
    flat: Any = Flat(MixedLinear(nn.Linear(16, 32), parts))
    assert tried_in_one_step(flat, 3)


@pytest.mark.parametrize("shape", [(4, 1), (4, 5), (4, 2, 3)])
def test_a_layer_takes_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    draw = mx.random.normal
    parts = [Part(draw((16, 2)), draw((2, 8)), draw((8,))), Part(draw((16, 3)), draw((3, 8)))]
    plain = nn.Linear(16, 8, bias=True)
    layer, x = MixedLinear(plain, parts), draw((*shape, 16))
    with adapter_rows([1, 0, 2, 1]):
        together = layer(x)
    for row, number in enumerate((1, 0, 2, 1)):
        with adapter_rows([number]):
            assert mx.allclose(layer(x[row : row + 1]), together[row : row + 1], atol=1e-5)
    expected = plain(x[2]) + x[2] @ parts[1].a @ parts[1].b
    assert mx.allclose(together[2], expected, atol=1e-5)
    assert mx.allclose(together[1], plain(x[1]), atol=1e-5)
