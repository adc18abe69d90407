"""Logprobs: the model's own, told exactly, alone or beside others, for whoever asks only."""

import math
from typing import Any

import mlx.core as mx
import pytest
import speaking
from driving import Body, run, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, SEQUENTIAL_FAMILIES, tiny_model

from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.sampling import logprobs as measuring
from mlx_rq.engine.text.token_bytes import TokenBytes

TOLERANCE = 5e-5
"""How far float32 logprobs may differ in a batch: the largest seen in any family was 1.5e-5."""


def oracle(model: LoadedModel, tokens: list[int]) -> list[list[float]]:
    """The logprobs of every token of the vocabulary after each prefix, by one plain pass."""
    logits = model.model(mx.array([tokens]))[0].astype(mx.float32)
    values: Any = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return list(values)


def ids_of(model: LoadedModel, legacy: dict[str, Any]) -> list[int]:
    """The ids of a byte model's tokens, which are one character each."""
    return [int(model.tokenizer.convert_tokens_to_ids(name)) for name in legacy["tokens"]]


def logprobs_of(result: Any, choice: int = 0) -> dict[str, Any]:
    assert "error" not in result, result
    return dict(result["choices"][choice]["logprobs"])


PROMPTS = [[7 * i % 256 for i in range(n)] for n in (3, 40, 41, 90, 12, 57, 5, 64)]
TRICKS: list[Body] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1, "presence_penalty": 2, "frequency_penalty": -1},
    {"temperature": 1, "repetition_penalty": 1.7},
    {"temperature": 1, "logit_bias": {"65": 6, "66": -100}},
    {"temperature": 0, "min_tokens": 6},
    {"temperature": 2, "min_p": 0.2},
]


@pytest.mark.parametrize("family", [*FAMILIES, *SEQUENTIAL_FAMILIES])
def test_they_are_the_models_own_whatever_is_done_to_choose(family: str) -> None:
    model = tiny_model(family)
    bodies = [
        {"prompt": prompt, "max_tokens": 8, "seed": 1, "logprobs": 4, "ignore_eos": True, **tricks}
        for prompt, tricks in zip(PROMPTS, TRICKS, strict=True)
    ]
    beside = [{"prompt": [9, 8, 7], "max_tokens": 12, "temperature": 0}] * 2

    results, _ = run(model, [*bodies, *beside], batch_size=5)

    for body, result in zip(bodies, results, strict=False):
        told = logprobs_of(result)
        tokens = ids_of(model, told)
        expected = oracle(model, [*body["prompt"], *tokens])[len(body["prompt"]) - 1 :]
        for place, token in enumerate(tokens):
            assert told["token_logprobs"][place] == pytest.approx(
                expected[place][token], abs=TOLERANCE
            )
            top = sorted(expected[place], reverse=True)[:4]
            shown = sorted(told["top_logprobs"][place].values(), reverse=True)
            assert shown[:4] == pytest.approx(top, abs=TOLERANCE)
            assert told["tokens"][place] in told["top_logprobs"][place]
    assert [logprobs for r in results[8:] for logprobs in (r["choices"][0]["logprobs"],)] == [
        None,
        None,
    ]


def test_beside_others_they_are_as_alone_also_for_rows_put_back_and_duplicates() -> None:
    model = tiny_model("llama")
    body = {"max_tokens": 60, "temperature": 0.9, "seed": 1, "logprobs": 2}
    bodies: list[Body] = [{"prompt": prompt, **body} for prompt in PROMPTS]
    bodies += [{"prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0, "logprobs": n}
               for n in (1, 1, 3)]  # fmt: skip

    squeezed, engine = run(model, bodies, kv_bytes=768 * 180, reserve=1)

    assert engine.totals.sequences_preempted > 0
    for asked, result in zip(bodies, squeezed, strict=True):
        (alone,), _ = run(model, [asked])
        assert texts(result) == texts(alone)
        told, own = logprobs_of(result), logprobs_of(alone)
        assert told["tokens"] == own["tokens"]
        assert told["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=TOLERANCE)
        assert [len(t) for t in told["top_logprobs"]] == [len(t) for t in own["top_logprobs"]]


def test_nobody_asks_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, "Measured", never)
    (result,), _ = run(tiny_model("llama"), [{"prompt": [1, 2], "max_tokens": 4}])
    assert "error" not in result


def test_the_likeliest_of_a_large_vocabulary_are_found_without_sorting_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mx.random.seed(1)
    logits = mx.random.normal((3, 50_000))
    logits[1, 777:780] = 9.0  # equally likely: those that come first are told first
    searched, argpartition = [], mx.argpartition

    def watched(values: mx.array, *rest: Any, **more: Any) -> mx.array:
        searched.append(values.shape[-1])
        return argpartition(values, *rest, **more)

    monkeypatch.setattr(mx, "argpartition", watched)

    measured = measuring.Measured(logits, mx.array([5, 777, 2]), 20)

    assert max(searched) <= 20 * 64
    for row in range(3):
        expected: Any = (logits[row] - mx.logsumexp(logits[row])).tolist()
        told = measured.read(row, 7)
        assert told.logprob == pytest.approx(expected[[5, 777, 2][row]], abs=1e-5)
        best = sorted(range(50_000), key=lambda token: (-expected[token], token))[:7]
        assert [token for token, _ in told.top] == best
        assert [value for _, value in told.top] == pytest.approx(
            [expected[token] for token in best], abs=1e-5
        )


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 200])
def test_echo_tells_the_prompts_own(length: int) -> None:
    model = tiny_model("qwen3")
    prompt = [5 * i % 250 for i in range(length)]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "seed": 1}
    only = {**body, "max_tokens": 0, "n": 1}

    (result, alone), engine = run(model, [body, only])

    expected = oracle(model, prompt)
    for told in (logprobs_of(result), logprobs_of(result, 1), logprobs_of(alone)):
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert ids_of(model, told)[:length] == prompt
        values = [expected[i][token] for i, token in enumerate(prompt[1:])]
        assert told["token_logprobs"][1:length] == pytest.approx(values, abs=TOLERANCE)
        assert told["text_offset"] == list(range(len(told["tokens"])))
    assert len(logprobs_of(alone)["tokens"]) == length
    assert len(logprobs_of(result)["tokens"]) == length + 3
    assert not engine.waiting


def test_a_prompt_that_cannot_be_scored_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> int:
        raise RuntimeError("bad kernel")

    monkeypatch.setattr(measuring.PromptScore, "advance", broken)
    bad = {"prompt": [1, 2, 3], "echo": True, "logprobs": 0, "max_tokens": 3}
    results, _ = run(tiny_model("llama"), [bad, {"prompt": [4, 5], "max_tokens": 3}])
    assert results[0]["error"]["code"] == "engine_error"
    assert len(texts(results[1])[0]) == 3


def test_what_the_stop_cuts_off_is_not_told() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "logprobs": 0}
    model = tiny_model("llama")
    (whole,), _ = run(model, [body])
    stop = texts(whole)[0][4:7]

    (cut,), _ = run(model, [{**body, "stop": stop}])

    (text,) = texts(cut)
    assert text == texts(whole)[0].split(stop)[0]
    assert "".join(logprobs_of(cut)["tokens"]) == text
    assert cut["usage"]["completion_tokens"] > len(text)


def chat(**more: Any) -> Body:
    message = {"role": "user", "content": "Grüße"}
    return {"messages": [message], "max_tokens": 40, "logprobs": True, "seed": 2, **more}


def test_the_bytes_of_a_chats_tokens_are_its_text() -> None:
    model = speaking.model()
    (result,), _ = run(model, [chat(top_logprobs=20, ignore_eos=True)])
    content = logprobs_of(result)["content"]

    assert len(content) == 40
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    text = texts(result)[0]
    for special in model.tokenizer.all_special_tokens:
        spelled = spelled.replace(special.encode(), b"")
    assert spelled.decode(errors="replace").startswith(text)
    for entry in content:
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 20
        assert sum(map(math.exp, values)) <= 1 + 1e-5


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    model = speaking.model()
    token_bytes = TokenBytes(model.tokenizer)
    tokens = model.tokenizer.encode("\U0001f30d", add_special_tokens=False)
    assert len(tokens) > 1
    assert b"".join(map(token_bytes.spell, tokens)).decode() == "\U0001f30d"
    (result,), _ = run(
        model, [{"prompt": "\U0001f30d", "echo": True, "max_tokens": 0, "logprobs": 0}]
    )
    told = logprobs_of(result)
    assert told["tokens"][0].startswith("bytes:\\xf0")
    assert told["text_offset"] == [0] * len(tokens)


@settings(max_examples=60)
@given(text=st.text(max_size=30))
def test_tokens_spell_their_text_and_begin_where_it_says(text: str) -> None:
    tokenizer = speaking.tokenizer()
    token_bytes = TokenBytes(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)

    assert b"".join(map(token_bytes.spell, tokens)) == text.encode()
    for token, at in zip(tokens, token_bytes.offsets(tokens, text), strict=True):
        piece = token_bytes.spell(token).decode(errors="ignore")
        assert not piece or piece in text[max(0, at - 1) : at + len(piece) + 1]
