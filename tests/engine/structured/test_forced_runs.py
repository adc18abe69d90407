"""What a grammar decides goes with the next step: fewer steps, and the answers of a masked walk."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import speaking
from asking import answers, chat, masked_walk, structured
from driving import AHEAD, finish, run, task
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import FAMILIES, SEQUENTIAL_FAMILIES, byte_tokenizer, tiny_model
from tokenizers import decoders

from mlx_rq.engine import engine as engine_module
from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.kv import ragged
from mlx_rq.engine.kv.ragged import ragged_step
from mlx_rq.engine.kv.trial import Batching, Verdict
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling import decode_batch
from mlx_rq.engine.scheduling.budget import measure_kv
from mlx_rq.engine.structured import llguidance_backend
from mlx_rq.engine.structured.matchers import forced as forced_tokens

MODEL = speaking.model()
ADDRESS = {
    "type": "object",
    "properties": {
        "street_and_number": {"type": "string", "maxLength": 6},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street_and_number", "postal_code"],
}
RECORD = structured(
    {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 8},
            "occupation": {"enum": ["doctor of medicine", "doctor of letters", "teacher"]},
            "home_address": ADDRESS,
            "work_address": {"anyOf": [ADDRESS, {"type": "null"}]},
        },
        "required": ["first_name", "occupation", "home_address", "work_address"],
    }
)
KINDS: list[dict[str, Any]] = [
    RECORD,
    {},
    {"temperature": 1.0, **RECORD},
    {"guided_regex": "[a-c]: some long text that is decided, [a-z]{3} and more of it; [0-9]"},
    {"stop": ["al_co"], **RECORD},
    {"frequency_penalty": 1.5, **RECORD},
    {"guided_grammar": 'start: a " is decided " b\na[capture]: /[a-z]{2,5}/\nb[capture]: /[0-9]+/'},
    {"logprobs": True, "top_logprobs": 2, **RECORD},
]


@pytest.fixture
def ragged_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The steps of batches whose sequences took in unequal numbers of tokens: how many of each."""
    seen = []

    def noted(caches: Any, counts: Any) -> Any:
        seen.append(tuple(counts))
        return ragged_step(caches, counts)

    monkeypatch.setattr(decode_batch, "ragged_step", noted)
    return seen


def bodies(count: int) -> list[dict[str, Any]]:
    dice = random.Random(count)
    return [
        chat(
            dice.choice(["A record of ", "Somebody else, by the name of "]) + str(index),
            **{"max_tokens": dice.choice([7, 30, 110]), "seed": index, **KINDS[index % len(KINDS)]},
        )
        for index in range(count)
    ]


def told(result: dict[str, Any]) -> Any:
    choices = result.get("choices", [])
    logprobs = [choice.get("logprobs") for choice in choices]
    if choices and "text" in choices[0]:
        return [choice["text"] for choice in choices]
    return answers(result), result.get("usage", {}).get("completion_tokens"), logprobs


def compared(
    monkeypatch: pytest.MonkeyPatch, model: LoadedModel, asked: list[dict[str, Any]], **options: Any
) -> tuple[MLXEngine, MLXEngine]:
    """Runs with runs and without; asserts that all answers are the same."""
    got, engine = run(model, asked, **options)
    with monkeypatch.context() as patch:
        masked_walk(patch)
        expected, stepwise = run(model, asked, **options)
    assert list(map(told, got)) == list(map(told, expected))
    assert engine.totals.decoded_tokens <= stepwise.totals.decoded_tokens
    return engine, stepwise


@pytest.mark.parametrize("close_json", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_sequences_that_come_and_go_answer_as_by_a_masked_walk(
    rows: int,
    close_json: bool,
    ragged_steps: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, stepwise = compared(
        monkeypatch, MODEL, bodies(24), batch_size=rows, close_json=close_json
    )
    if rows == 1:
        assert engine.totals.decode_steps < 0.8 * stepwise.totals.decode_steps
    else:
        assert any(max(counts) > 1 and len(counts) > 1 for counts in ragged_steps)


def test_sequences_that_share_no_prefix_do_so_where_they_run_alone(
    ragged_steps: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bodies(12)
    compared(monkeypatch, MODEL, asked, batch_size=4, share_prefixes=False)
    engine, stepwise = compared(monkeypatch, MODEL, asked, batch_size=1, share_prefixes=False)
    assert ragged_steps == []
    assert engine.totals.decode_steps < 0.8 * stepwise.totals.decode_steps


def test_a_model_that_runs_one_at_a_time_takes_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "verdict_on", lambda model: Verdict(Batching.ALONE, "so"))
    engine, stepwise = compared(monkeypatch, MODEL, bodies(12))
    assert engine.totals.decode_steps < 0.8 * stepwise.totals.decode_steps


def test_who_joins_makes_the_runs_shorter_that_one_alone_would_take_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = []

    def seen(caches: Any, counts: Sequence[int]) -> Any:
        positions.append(max(counts) * len(counts))
        return ragged_step(caches, counts)

    monkeypatch.setattr(decode_batch, "ragged_step", seen)
    pattern = f"[a-c]{'some long text that is decided; ' * 9}[0-9]"
    one, *others = [
        {"prompt": str(job), "max_tokens": 400, "temperature": 0, "guided_regex": pattern}
        for job in range(4)
    ]
    engine = MLXEngine(MODEL, EngineOptions(batch_size=4))
    engine.add([task("first", one)])
    while engine.totals.decoded_tokens < 2:
        engine.step()
    engine.add([task(str(job), body) for job, body in enumerate(others)])
    finish(engine, 4)

    assert positions
    assert max(positions) <= ragged._MOST_POSITIONS


def test_a_long_run_is_found_once_however_many_steps_take_it_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def forced(matcher: LLMatcher) -> list[int]:
        found.append(tokens := forced_tokens(matcher))
        return tokens

    monkeypatch.setattr(llguidance_backend, "forced", forced)
    pattern = f"[a-c]{'some long text that is decided; ' * 9}[0-9]"
    asked = [
        {"prompt": str(job), "max_tokens": 400, "temperature": 0, "guided_regex": pattern}
        for job in range(8)
    ]

    _, engine = run(MODEL, asked, batch_size=8)

    assert engine.totals.decode_steps > 10
    assert len([tokens for tokens in found if tokens]) == 8


def test_who_is_put_back_amid_runs_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [chat(f"Record {index}", max_tokens=110, **RECORD) for index in range(6)]
    kv_bytes = 180_000 + 6 * AHEAD * measure_kv(MODEL.model).per_token
    engine, _ = compared(monkeypatch, MODEL, asked, batch_size=6, kv_bytes=kv_bytes, reserve=1)
    assert engine.totals.sequences_preempted > 0


@cache
def tokenizer_of_bytes() -> TokenizerWrapper:
    """The tiny models' tokenizer, with a decoder that can be constrained."""
    wrapper = copy.deepcopy(byte_tokenizer())
    wrapper._tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return wrapper


@pytest.mark.parametrize("family", [*FAMILIES, *SEQUENTIAL_FAMILIES])
def test_all_architectures_take_runs_in_alone_and_in_a_batch(
    family: str, ragged_steps: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(tiny_model(family), tokenizer=tokenizer_of_bytes())
    pattern = "[a-c]: some long text that is decided, [a-z]{3} and more of it; [0-9]"
    asked = [
        {"prompt": [7] * (4 + 3 * job), "max_tokens": 80, "temperature": 0, "guided_regex": pattern}
        for job in range(3)
    ]
    engine, stepwise = compared(monkeypatch, model, asked, batch_size=1)
    assert engine.totals.decode_steps < 0.5 * stepwise.totals.decode_steps
    compared(monkeypatch, model, asked, batch_size=3)
    assert bool(ragged_steps) == (family in ("llama", "qwen3", "qwen3_moe"))
