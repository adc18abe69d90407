"""Which models can draft for which: what is wrong is said in a sentence."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
import speaking
from scripted_device import ScriptedDevice
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.device import weight_bytes
from mlx_rq.engine.models.draft import check_draft
from mlx_rq.engine.models.load import LoadedModel, ModelError
from mlx_rq.engine.options import EngineOptions

MODEL = replace(tiny_model("llama"), model_id="large")


class Tokenizer:
    """Has the pieces that it is given, by their ids."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def get_vocab(self) -> dict[str, int]:
        return {piece: token for token, piece in enumerate(self._pieces)}


class Forgetful:
    """A network that counts what it was shown, also what was taken back."""

    def __init__(self, network: Any) -> None:
        self._network, self._shown = network, 0

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        self._shown += inputs.shape[1]
        return self._network(inputs, cache=cache) * self._shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def of(*pieces: str) -> LoadedModel:
    tokenizer: Any = Tokenizer(*pieces)
    return replace(MODEL, tokenizer=tokenizer)


def refused(model: LoadedModel, draft: LoadedModel) -> str:
    with pytest.raises(ModelError) as error:
        check_draft(model, replace(draft, model_id="small"))
    return str(error.value)


def test_one_of_the_same_tokens_can_draft() -> None:
    check_draft(MODEL, MODEL)
    check_draft(MODEL, tiny_model("gemma3_text"))
    check_draft(of("a", "b", "<added>"), of("a", "b"))


def test_other_tokens_are_refused() -> None:
    assert refused(of("a", "b", "c"), of("a", "x", "y")) == (
        "draft model small: its tokenizer is not that of large: 2 of 3 tokens differ, the first is "
        "1 ('x' instead of 'b'): choose a small model of the same family"
    )
    assert refused(MODEL, speaking.model()).startswith("draft model small: its tokenizer ")
    assert refused(of("a", "b"), of("b", "a")) == (
        "draft model small: its tokenizer has no token in common with that of large: "
        "choose a small model of the same family"
    )


@pytest.mark.parametrize(
    ("family", "kept"), [("lfm2", "ArraysCache"), ("llama4", "ChunkedKVCache")]
)
def test_what_cannot_take_back_tokens_is_refused(family: str, kept: str) -> None:
    other = tiny_model(family)
    assert refused(other, MODEL) == (
        f"draft model small: tiny-{family} cannot take back tokens, as the drafted ones that are "
        f"not accepted (it keeps {kept}): do without --draft-model"
    )
    assert "small cannot take back tokens, as the drafted ones" in refused(MODEL, other)


def test_a_model_that_goes_on_otherwise_after_that_is_refused() -> None:
    network: Any = Forgetful(MODEL.model)
    assert refused(replace(MODEL, model=network), MODEL).startswith(
        "draft model small: large does not go on as before where tokens were taken back "
        "(it would change the logits, "
    )


def test_its_weights_count_as_weights_and_are_none_of_the_memory_for_kv() -> None:
    weights = weight_bytes(MODEL.model)
    device = ScriptedDevice(2 * weights + 10**9)
    engine = MLXEngine(MODEL, EngineOptions(), draft=MODEL, device=device)
    assert engine._running.memory.nbytes == 8 * 10**8
    assert engine.memory()["weights"] == 2 * weights
