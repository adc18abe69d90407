"""Compares two ways to compute the same logits: some models are wrong in one without a word."""

from collections.abc import Callable
from itertools import count, islice
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

_TOLERANCE = 0.25
_TOLERANCE_FLOAT32 = 0.001
"""How far a row's logits may be, on average, from what they should be, as a part of their spread.
The rounding of bfloat16 makes up to 0.06; a prefix that is not seen, or seen elsewhere, 1 and more.
"""


def probe_tokens(model: Module) -> Callable[[int, int], mx.array]:
    """Gives what makes token ids [rows, length] to try a model with, others at each call.

    They come from all over the vocabulary: on control tokens alone some models round wildly.
    """
    vocabulary = model(mx.array([[0]])).shape[-1]
    tokens = iter(number * 7919 % vocabulary for number in count(1))

    def some(rows: int, length: int) -> mx.array:
        return mx.array([list(islice(tokens, length)) for _ in range(rows)])

    return some


def disagreement(logits: mx.array, expected: mx.array) -> float:
    """Says how far logits [rows, …, vocabulary] are from what they should be.

    Above 1 it is more than rounding may do.
    """
    exact = expected.dtype == mx.float32
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    allowed = (_TOLERANCE_FLOAT32 if exact else _TOLERANCE) * mx.std(expected)
    by_row = mx.abs(logits - expected).reshape(len(expected), -1).mean(axis=1)
    difference: Any = (by_row.max() / allowed).item()
    return float(difference)
