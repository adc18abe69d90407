"""An engine with adapters: answers of the fused model, and KV that belongs to one adapter."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapting import fresh_model, fused, write_adapter
from driving import finish, run, task
from mlx import nn
from mlx_lm.tuner.dora import DoRALinear

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.models.adapters import check_adapter
from mlx_rq.engine.models.dora import FixedDoRALinear
from mlx_rq.engine.models.load import ModelError
from mlx_rq.engine.options import EngineOptions

SYSTEM = "You answer as a clerk of the old school would. "
BODIES = [
    {"prompt": f"{SYSTEM}{question}", "max_tokens": 12, "logprobs": 1, "temperature": 0}
    for question in ("Who goes there?", "What is it?", "Why?")
]


def answers(engine: MLXEngine, bodies: list[dict[str, Any]] = BODIES) -> list[Any]:
    assert not engine.add([task(str(number), body) for number, body in enumerate(bodies)])
    results = finish(engine, len(bodies))
    return [results[str(number)] for number in range(len(bodies))]


def said(results: list[Any]) -> list[str]:
    return [result["choices"][0]["text"] for result in results]


def logprobs(results: list[Any]) -> list[float]:
    return [one for r in results for one in r["choices"][0]["logprobs"]["token_logprobs"]]


def engine_of(**options: Any) -> MLXEngine:
    return MLXEngine(fresh_model(**options), EngineOptions(batch_size=4, chunk=32, share_from=1))


@pytest.mark.parametrize(
    ("kind", "bits"), [("lora", None), ("dora", None), ("lora", 4), ("dora", 8)]
)
def test_answers_are_those_of_the_fused_model(tmp_path: Path, kind: str, bits: int | None) -> None:
    folder = write_adapter(tmp_path / "a", kind, bits=bits)
    engine = engine_of(bits=bits)
    alone = said(answers(engine))
    engine.adapt(Adapter("tiny:a", folder))
    adapted = answers(engine)
    expected, _ = run(fused(folder, bits=bits), BODIES)

    assert said(adapted) == said(expected)
    assert said(adapted) != alone
    assert logprobs(adapted) == pytest.approx(logprobs(expected), abs=1e-3)
    assert {result["model"] for result in adapted} == {"tiny:a"}
    assert adapted[0]["system_fingerprint"].startswith("tiny:a_fp_tiny_")


@pytest.mark.parametrize("bits", [None, 4])
def test_a_layer_of_dora_computes_what_it_was_trained_to(bits: int | None) -> None:
    plain: Any = nn.Linear(64, 32, bias=True)
    if bits is not None:
        plain = nn.QuantizedLinear.from_linear(plain, 32, bits)
    trained: Any = DoRALinear.from_base(plain, r=4, scale=2.0)
    trained.lora_b, trained.m = mx.random.normal((4, 32)), mx.random.uniform(shape=(32,))
    rows = mx.random.normal((3, 64))
    assert mx.allclose(FixedDoRALinear(trained)(rows), trained(rows), atol=1e-5)


def test_what_was_computed_with_one_adapter_is_never_used_with_another(tmp_path: Path) -> None:
    one, two = (Adapter(f"tiny:{n}", write_adapter(tmp_path / str(n), seed=n)) for n in (1, 2))
    expected = {
        adapter: said(run(fresh_model() if adapter is None else fused(adapter.folder), BODIES)[0])
        for adapter in (None, one, two)
    }
    engine = engine_of()
    for adapter in (None, one, two, one, None):
        engine.adapt(adapter)
        assert engine.totals.prefixes_held == 0
        assert said(answers(engine)) == expected[adapter]
        assert engine.totals.prefixes_held > 0  # which the next is not to find
    distinct = engine.totals.distinct_tokens
    once = run(fresh_model(), BODIES)[1].totals.distinct_tokens
    assert distinct == 3 * once  # of three models


def test_an_adapter_leaves_nothing_behind(tmp_path: Path) -> None:
    adapters = [
        Adapter(f"tiny:{kind}", write_adapter(tmp_path / kind, kind, keys=keys))
        for kind, keys in (("lora", ["self_attn.q_proj", "model.embed_tokens"]), ("dora", None))
    ]
    engine = engine_of()
    plain = dict(engine._adapted.model.model.named_modules())
    held = []
    for _ in range(3):
        for adapter in adapters:
            engine.adapt(adapter)
            assert dict(engine._adapted.model.model.named_modules()) != plain
        engine.adapt(None)
        gc.collect()
        mx.clear_cache()
        held.append(mx.get_active_memory())
    assert {name: id(one) for name, one in engine._adapted.model.model.named_modules()} == {
        name: id(one) for name, one in plain.items()
    }
    assert held[-1] - held[0] < 1_000, "something stays with each change"


def test_an_adapter_that_is_trained_again_has_another_fingerprint(tmp_path: Path) -> None:
    first, again = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    sizes = [(folder / "adapters.safetensors").stat().st_size for folder in (first, again)]
    assert sizes[0] == sizes[1]
    engine, seen = engine_of(), []
    for folder in (first, again, first):
        engine.adapt(Adapter("tiny:a", folder))
        seen.append(engine.fingerprint)
    assert seen[0] == seen[2] != seen[1]


FITS = "model.layers.1.mlp.down_proj.lora_a"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda weights: {**weights, FITS: mx.zeros((96, 5))},
         f"{FITS} is [96, 5]; it must be [96, 4]"),
        (lambda weights: {**weights, "model.x.lora_a": mx.zeros(1)},
         "the model has no place for model.x.lora_a"),
        (lambda weights: {n: w for n, w in weights.items() if n != FITS}, f"{FITS} is missing"),
        (lambda weights: None, "cannot read adapters.safetensors: "),
    ],
)  # fmt: skip
def test_one_that_does_not_fit_says_why_and_the_model_goes_on(
    tmp_path: Path, edit: Callable[[dict[str, mx.array]], dict[str, mx.array] | None], why: str
) -> None:
    folder = write_adapter(tmp_path / "a")
    file = folder / "adapters.safetensors"
    weights = edit(dict(mx.load(str(file))))
    if weights is None:
        file.write_bytes(b"none")
    else:
        mx.save_safetensors(str(file), weights)
    engine = engine_of()
    expected = said(answers(engine, BODIES[:1]))
    distinct = engine.totals.distinct_tokens
    with pytest.raises(ModelError) as refused:
        engine.adapt(Adapter("tiny:a", folder))
    assert why in str(refused.value)
    assert engine.model_id == "tiny-llama"
    assert said(answers(engine, BODIES[:1])) == expected
    assert engine.totals.distinct_tokens == distinct  # the same model's, so nothing new


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full', which replaces the model's own"),
        ({"fine_tune_type": "ia3"}, "fine_tune_type is 'ia3'; it must be lora or dora"),
        ({"peft_type": "LORA"}, "is in the form of PEFT: train it with mlx_lm.lora, or merge it"),
        ({"num_layers": "4"}, "num_layers is '4'; it must be a number of layers, or -1 for all"),
        ({"lora_parameters": []}, "lora_parameters is []; it must be an object"),
        ({"lora_parameters": {"rank": 0}}, "lora_parameters.rank is 0; it must be 1 or more"),
        ({"lora_parameters": {"rank": 8, "alpha": 1}}, "lora_parameters.scale is None; it must be"),
        (None, "is no adapter's folder, it holds no adapter_config.json: check the path"),
        ({}, "holds no adapters.safetensors: check the path"),
    ],
)
def test_what_can_be_told_without_a_model(
    tmp_path: Path, changes: dict[str, Any] | None, why: str
) -> None:
    if changes is not None:
        config = {"num_layers": 4, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0}}
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError) as refused:
        check_adapter(Adapter("m:a", tmp_path))
    assert str(refused.value).startswith("adapter m:a: ")
    assert why in str(refused.value)
