"""How likely tokens were: by the model's own distribution, before anything is done to it.

Penalties, biases, temperature, filters and constraints do not show in these numbers: they say what
the model thinks, as OpenAI's and vLLM's do. Computed for the rows that ask, and for no others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.models.device import refuse_not_finite
from mlx_rq.engine.sampling.draw import likeliest
from mlx_rq.engine.sampling.sampler import SequenceSampler

_MOST = 20
"""The most likeliest tokens that anybody may ask for."""

_CHUNK = 64
"""Prompt tokens that are scored at once: each has logits as wide as the vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's logprob, and the likeliest tokens in its place with theirs, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Measured:
    """Logprobs of tokens [n] and of the `most` likeliest there, by logits [n, vocabulary].

    Nothing is computed before it is read (MLX is lazy); `arrays` are what there is to compute.
    """

    def __init__(self, logits: mx.array, tokens: mx.array, most: int) -> None:
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self.arrays = [mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]]
        if most > 0:
            self.arrays += likeliest(logprobs, most)

    @cached_property
    def _lists(self) -> list[Any]:
        return [array.tolist() for array in self.arrays]

    def read(self, place: int, top: int) -> TokenLogprobs:
        """Gives one token's logprob and the `top` likeliest in its place."""
        chosen, *likeliest = (values[place] for values in self._lists)
        pairs = sorted(zip(*likeliest, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(chosen, tuple(pairs[:top]))


@dataclass(frozen=True, slots=True)
class Pending:
    """One row's share of what was measured in a step."""

    measured: Measured
    place: int
    top: int

    def read(self) -> TokenLogprobs:
        return self.measured.read(self.place, self.top)


def measure(
    logits: mx.array, tokens: mx.array, rows: Sequence[SequenceSampler]
) -> list[Pending | None]:
    """Measures the tokens that rows chose by their logits [rows, vocabulary]; launches it.

    None for the rows that do not ask.
    """
    asking = [index for index, row in enumerate(rows) if row.top_logprobs is not None]
    pending: list[Pending | None] = [None] * len(rows)
    if asking:
        tops = [rows[index].top_logprobs or 0 for index in asking]
        which = mx.array(asking)
        # As many whatever the others ask for: which of equally likely tokens come first, must not
        # depend on them.
        measured = Measured(logits[which], tokens[which], _MOST if any(tops) else 0)
        mx.async_eval(measured.arrays)
        for place, (index, top) in enumerate(zip(asking, tops, strict=True)):
            pending[index] = Pending(measured, place, top)
    return pending


def read(pending: Iterable[Pending | None]) -> list[TokenLogprobs | None]:
    """Reads what was measured in a step."""
    return [None if one is None else one.read() for one in pending]


@dataclass(eq=False, slots=True)
class PromptScore:
    """The logprobs of a prompt's own tokens, computed a chunk at a time; the first has none.

    The prefixes and the batch keep no logits of prompts, so the prompt is gone through once more.
    """

    model: Module
    tokens: list[int]
    top: int
    scores: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    _caches: list[Any] | None = None

    @property
    def done(self) -> bool:
        return len(self.scores) >= len(self.tokens)

    def rewind(self) -> None:
        """Begins again: an error may have left its KV half written."""
        self.scores[1:] = []
        self._caches = None

    def advance(self, tokens: int = _CHUNK) -> int:
        """Scores up to so many more tokens, and no more than a chunk; returns how many."""
        if self._caches is None:
            self._caches = make_prompt_cache(self.model)
        begin = len(self.scores) - 1
        targets = self.tokens[begin + 1 : begin + 1 + min(tokens, _CHUNK)]
        inputs = self.tokens[begin : begin + len(targets)]
        logits = self.model(mx.array([inputs]), cache=self._caches)[0]
        refuse_not_finite(logits)
        measured = Measured(logits, mx.array(targets), self.top)
        self.scores += [measured.read(place, self.top) for place in range(len(targets))]
        if self.done:
            self._caches = None
        return len(inputs)
