"""Penalties, biases and the least length change the logits that they should, and no others."""

from collections import Counter

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_rq.engine.sampling.params import SamplingParams
from mlx_rq.engine.sampling.penalties import Adjustment, adjust

VOCABULARY = 40
ENDS = frozenset({2, 7})

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=4
    ).map(lambda biases: tuple(biases.items())),
    min_tokens=st.integers(0, 8),
)


def expected(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], written: list[int]
) -> list[float]:
    """Token by token, as the API's documentation and vLLM's say."""
    counts, biases, result = Counter(written), dict(params.logit_bias), []
    for token, logit in enumerate(logits.tolist()):
        if token in counts or token in prompt:
            by = params.repetition_penalty
            logit = logit / by if logit > 0 else logit * by
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty * (token in counts)
        logit += biases.get(token, 0)
        if len(written) < params.min_tokens and token in ENDS:
            logit = -np.inf
        result.append(logit)
    return result


@settings(max_examples=200)
@given(
    rows=st.lists(st.tuples(st.none() | PARAMS, TOKENS, TOKENS), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_every_row_has_its_own_changes(
    rows: list[tuple[SamplingParams | None, list[int], list[int]]], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), VOCABULARY)).astype(np.float32)
    adjustments = []
    for params, prompt, written in rows:
        adjustment = None if params is None else Adjustment(params, prompt, ENDS)
        for token in written:
            if adjustment is not None:
                adjustment.count(token)
        adjustments.append(adjustment)
    given_logits = mx.array(logits)

    changed = np.array(adjust(given_logits, adjustments))

    assert np.array_equal(np.array(given_logits), logits)  # logprobs are read from these
    for row, (params, prompt, written) in enumerate(rows):
        if params is None:
            assert np.array_equal(changed[row], logits[row])
        else:
            wanted = expected(logits[row], params, prompt, written)
            np.testing.assert_allclose(changed[row], wanted, rtol=1e-5, atol=1e-5)


def test_what_a_constraint_forbids_stays_forbidden() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=-2, logit_bias=((3, 100.0),), min_tokens=1
    )
    logits = mx.full((1, VOCABULARY), -mx.inf)

    assert mx.all(adjust(logits, [Adjustment(params, [3, 4], ENDS)]) == -mx.inf).item()
