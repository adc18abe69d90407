"""Tokens are drawn from the distribution that the parameters say, by a reference in numpy.

The reference sorts, and cumulates in float64 over the whole vocabulary. The engine does neither.
"""

import runpy
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_rq.engine.sampling.draw import draw
from mlx_rq.engine.sampling.params import SamplingParams

BENCH = Path(__file__).parents[3] / "bench" / "shared_prefix.py"

VOCABULARY = 1000  # not a multiple of a block


def kept(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The probabilities of one row's tokens, filtered, not normalised again."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0
    if params.top_k:
        weights[weights < np.sort(weights)[-min(params.top_k, len(weights))]] = 0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order])
        enough = int(np.argmax(mass >= params.top_p * mass[-1]))
        weights[order[enough + 1 :]] = 0
    return weights


def some_logits(seed: int, rows: int, vocabulary: int = VOCABULARY) -> NDArray[np.float32]:
    """Logits whose weights are never so near to each other that float32 decides."""
    dice = np.random.default_rng(seed)
    ladder = np.linspace(-12, 6, vocabulary)
    return np.stack([dice.permutation(ladder) for _ in range(rows)]).astype(np.float32)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.98, 0.9, 0.5]),
    top_k=st.sampled_from([0, 2, 5, 50, 64, 249, 250, 900, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
)
RANDOMS = st.floats(0, 0.999, allow_subnormal=False)


@settings(max_examples=200)
@given(seed=st.integers(0, 1000), rows=st.lists(st.tuples(PARAMS, RANDOMS), min_size=1, max_size=6))
def test_draws_invert_the_distribution(seed: int, rows: list[tuple[SamplingParams, float]]) -> None:
    logits = some_logits(seed, len(rows))
    params, randoms = zip(*rows, strict=True)

    tokens = draw(mx.array(logits), params, randoms).tolist()

    for row, (one, at) in enumerate(rows):
        cumulated = np.cumsum(kept(logits[row], one)) / kept(logits[row], one).sum()
        token = tokens[row]
        slack = 1e-5
        assert cumulated[token] > at - slack
        assert token == 0 or cumulated[token - 1] <= at + slack


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), at=RANDOMS, params=PARAMS)
def test_draws_of_a_large_vocabulary_invert_the_distribution_nearly(
    seed: int, at: float, params: SamplingParams
) -> None:
    logits = some_logits(seed, 1, vocabulary=3000)

    (token,) = draw(mx.array(logits), [params], [at]).tolist()

    cumulated = np.cumsum(kept(logits[0], params)) / kept(logits[0], params).sum()
    # top_p's threshold tells weights apart that differ by 1/200: a token more or less there.
    assert cumulated[token] > at - 0.02
    assert token == 0 or cumulated[token - 1] <= at + 0.02


def test_top_p_takes_few_operations() -> None:
    operations = runpy.run_path(str(BENCH))["operations"]
    logits = mx.zeros((8, 50_000))

    def count(**params: float) -> int:
        return int(operations(draw(logits, [SamplingParams(**params)] * 8, [0.5] * 8)))  # type: ignore[arg-type]

    assert count(top_k=40, top_p=0.9) - count(top_k=40) <= 12
    assert count(top_p=0.9) - count() <= 48


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(st.tuples(PARAMS, RANDOMS), min_size=2, max_size=6),
    vocabulary=st.sampled_from([VOCABULARY, 3002]),  # sorted for top_p, and halved
)
def test_a_row_draws_the_same_alone(
    seed: int, rows: list[tuple[SamplingParams, float]], vocabulary: int
) -> None:
    logits = mx.array(some_logits(seed, len(rows), vocabulary))
    params, randoms = zip(*rows, strict=True)

    together = draw(logits, params, randoms).tolist()

    alone = [draw(logits[row : row + 1], [one], [at]).item() for row, (one, at) in enumerate(rows)]
    assert together == alone


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), top_k=st.integers(2, 2100), at=st.sampled_from([0.0, 0.3, 0.9]))
def test_top_k_of_a_large_vocabulary(seed: int, top_k: int, at: float) -> None:
    logits = some_logits(seed, 2, vocabulary=20_011)
    params = SamplingParams(temperature=3, top_k=top_k)

    tokens = draw(mx.array(logits), [params, params], [at, at]).tolist()

    for row, token in zip(logits, tokens, strict=True):
        cumulated = np.cumsum(kept(row, params)) / kept(row, params).sum()
        assert token == 0 or cumulated[token - 1] - 1e-5 <= at
        assert at < cumulated[token] + 1e-5
        assert kept(row, params)[token] > 0


@settings(max_examples=100)
@given(seed=st.integers(0, 1000), params=PARAMS, at=st.sampled_from([0.0, 0.5, 1 - 2**-22]))
def test_what_is_filtered_out_is_never_drawn(seed: int, params: SamplingParams, at: float) -> None:
    assume(params.top_p == 1)
    logits = some_logits(seed, 1)

    (token,) = draw(mx.array(logits), [params], [at]).tolist()

    assert kept(logits[0], params)[token] > 0


@pytest.mark.parametrize("top_k", [0, 3])
def test_forbidden_tokens_are_never_drawn(top_k: int) -> None:
    logits = np.full((1, VOCABULARY), -np.inf, np.float32)
    allowed = [5, 400, 999]
    logits[0, allowed] = [1.0, 1.1, 0.9]
    params = SamplingParams(top_k=top_k)

    drawn = {
        draw(mx.array(logits), [params], [at]).item() for at in [0.0, 0.2, 0.5, 0.9, 1 - 2**-22]
    }

    assert drawn == set(allowed)


@pytest.mark.parametrize("vocabulary", [32_002, 49_155])
def test_tokens_behind_the_last_whole_block_are_of_the_vocabulary(vocabulary: int) -> None:
    logits = np.full((2, vocabulary), -np.inf, np.float32)
    allowed = [5, vocabulary - 1]
    logits[:, allowed] = 1.0
    params = [SamplingParams(top_k=20)] * 2

    drawn = {
        token
        for at in [0.0, 0.3, 0.6, 1 - 2**-22]
        for token in draw(mx.array(logits), params, [at, at]).tolist()
    }

    assert drawn == set(allowed)


def test_a_temperature_near_zero_takes_the_likeliest() -> None:
    logits = mx.array(some_logits(3, 1))
    likeliest = mx.argmax(logits).item()

    for temperature in (0, 1e-40, 1e-9, 1e-4):
        assert draw(logits, [SamplingParams(temperature=temperature)], [0.5]).item() == likeliest


def test_equally_likely_tokens_at_the_end_of_top_k_stay_together() -> None:
    logits = np.full((1, VOCABULARY), -50, np.float32)
    logits[0, [10, 20, 30, 40]] = [3, 2, 2, 2]

    drawn = {
        draw(mx.array(logits), [SamplingParams(top_k=2)], [at / 100]).item() for at in range(100)
    }

    assert drawn == {10, 20, 30, 40}


def test_a_vocabulary_smaller_than_a_block() -> None:
    logits = mx.array([[0.0, 5.0, -mx.inf, 0.0]])
    params = [replace(SamplingParams(), top_k=top_k) for top_k in (0, 2, 100)]

    assert [draw(logits, [one], [0.5]).item() for one in params] == [1, 1, 1]
    assert draw(logits, [SamplingParams()], [0.0]).item() == 0
    assert draw(logits, [SamplingParams()], [1 - 2**-22]).item() == 3
