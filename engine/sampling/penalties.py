"""Changes logits before tokens are chosen by them: penalties, biases, no end before min_tokens.

Only the tokens that a row has seen, or that its job names, change. So a row keeps a short list on
the host, and all rows' lists are applied by one operation, instead of a few over a whole vocabulary
for each row.
"""

from array import array
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.sampling.params import SamplingParams


class Adjustment:
    """What one row changes, with the tokens that it has generated so far."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_tokens: frozenset[int]
    ) -> None:
        self.counted = 0
        """How many generated tokens were counted."""
        self._params = params
        self._places: dict[int, int] = {}
        # By place, of every token whose logit may change.
        self._tokens = array("i")
        self._biases = array("f")
        self._in_prompt = array("f")
        self._counts = array("f")
        for token, bias in params.logit_bias:
            self._biases[self._place(token)] += bias
        if params.repetition_penalty != 1:
            for token in prompt:
                self._in_prompt[self._place(token)] = 1
        self._ends = [self._place(token) for token in end_tokens] if params.min_tokens else []

    def _place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self._tokens)
            self._tokens.append(token)
            for values in (self._biases, self._in_prompt, self._counts):
                values.append(0)
        return self._places[token]

    def count(self, token: int) -> None:
        """Takes in a token that the row has generated."""
        self.counted += 1
        if self._params.penalised:
            self._counts[self._place(token)] += 1

    def now(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Gives tokens, by what to weaken their logits, and what to take off them after that."""
        params, counts = self._params, np.array(self._counts)
        generated = counts > 0
        weaker = np.where(generated | (np.array(self._in_prompt) > 0), params.repetition_penalty, 1)
        less = params.frequency_penalty * counts + params.presence_penalty * generated
        less -= np.array(self._biases)
        if self.counted < params.min_tokens:
            less[self._ends] = np.inf
        return np.array(self._tokens), weaker.astype(np.float32), less.astype(np.float32)


def adjust(logits: mx.array, rows: Sequence[Adjustment | None]) -> mx.array:
    """Gives the logits [rows, vocabulary] with the changes of the rows that have any."""
    changes = [
        (index * logits.shape[1] + tokens, weaker, less)
        for index, row in enumerate(rows)
        if row is not None
        for tokens, weaker, less in [row.now()]
    ]
    if not changes:
        return logits
    places, weaker, less = (mx.array(np.concatenate(part)) for part in zip(*changes, strict=True))
    flat = logits.reshape(-1)
    before = flat[places]
    # The repetition penalty as in its paper (CTRL, arXiv:1909.05858) and in vLLM.
    after = mx.where(before > 0, before / weaker, before * weaker) - less
    after = mx.minimum(after, mx.finfo(mx.float32).max)  # a penalty of nearly 0 is no infinity
    return mx.put_along_axis(flat, places, after, axis=0).reshape(logits.shape)
