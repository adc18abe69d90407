"""Chooses the next token of every row of a batch in one call.

Each row brings its own parameters and its own random stream; the arithmetic runs over all rows at
once, because one sampler call a row costs more than the rest of a step. The order is vLLM's: biases
and penalties on the logits, then temperature, then min_p and top_k, then top_p over what is left.
Each of the three filters is a threshold on the weights, so no full sort is needed. A draw
inverts the cumulated distribution at one random number, so a seeded row draws the same tokens
whatever stands beside it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_rq.engine.constrain import Constraint, mask

_TOP_P_HALVINGS = 12
"""Halvings of the top_p threshold's logarithm: weights that differ by 1/200 are told apart."""

_LARGEST_DRAW = 1.0 - 2.0**-22
"""A draw stays below 1 in float32, or the last token would be chosen whatever its probability."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row chooses its tokens. Temperature 0 (or top_k 1) takes the likeliest.

    Presence and frequency penalties count the tokens that the row has generated; the repetition
    penalty looks at the prompt as well (both as vLLM does; OpenAI has no repetition penalty).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def filtered(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(eq=False, slots=True)
class RowSampler:
    """One row's parameters with what changes as it goes: random stream, history, constraint.

    It stands in a batch where mlx-lm keeps a row's sampler, so that it moves with the row.
    """

    params: SamplingParams
    seed: str
    vocabulary: int
    prompt: Sequence[int] = ()
    end_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    """How many of the likeliest tokens are told beside each chosen one; None for no logprobs."""
    drawn: int = 0
    _random: random.Random = field(init=False)
    _bias: mx.array | None = field(init=False, default=None)
    _counts: mx.array | None = field(init=False, default=None)
    _in_prompt: mx.array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        if self.params.logit_bias:
            ids, values = zip(*self.params.logit_bias, strict=True)
            self._bias = mx.zeros(self.vocabulary).at[mx.array(ids)].add(mx.array(values))
        if self.params.penalised:
            self._counts = mx.zeros(self.vocabulary)
            self._in_prompt = mx.zeros(self.vocabulary).at[mx.array(list(self.prompt))].maximum(1)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Goes back to where these tokens were generated: a row that was put back goes on there.

        The batch computes one token ahead; that one's draw is undone.
        """
        self._random = random.Random(self.seed)
        self.drawn = len(tokens)
        if not self.params.greedy:
            for _ in tokens:
                self.draw()
        if self._counts is not None:
            self._counts = mx.zeros(self.vocabulary)
            if len(tokens) > 1:  # `adjust` adds the last one, as after every step
                self._counts = self._counts.at[mx.array(list(tokens[:-1]))].add(1)

    def draw(self) -> float:
        """Takes the row's next random number, below 1."""
        return min(self._random.random(), _LARGEST_DRAW)

    def adjust(self, logits: mx.array, last_token: mx.array) -> mx.array:
        """Applies penalties, biases and the least length to one row's logits [vocabulary].

        `last_token`, a scalar, is what the row chose last; it may not have been computed yet.
        """
        params = self.params
        if self._counts is not None and self._in_prompt is not None:
            if self.drawn > 0:  # before the first draw it is the prompt's last token
                self._counts = self._counts.at[last_token].add(1)
            penalties = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            logits = _penalised(logits, self._counts, self._in_prompt, mx.array(penalties))
        if self._bias is not None:
            logits = logits + self._bias
        if self.drawn < params.min_tokens and self.end_tokens:
            logits[mx.array(sorted(self.end_tokens))] = -mx.inf
        return logits

    @property
    def adjusts(self) -> bool:
        """Whether this step needs `adjust`."""
        return (
            self._counts is not None
            or self._bias is not None
            or self.drawn < self.params.min_tokens
        )


@mx.compile
def _penalised(
    logits: mx.array, counts: mx.array, in_prompt: mx.array, penalties: mx.array
) -> mx.array:
    """Applies the repetition, frequency and presence penalties to one row's logits."""
    repetition, frequency, presence = penalties[0], penalties[1], penalties[2]
    generated = counts > 0
    weaker = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(mx.logical_or(generated, in_prompt > 0), weaker, logits)
    return logits - frequency * counts - presence * generated


def constrain(logits: mx.array, rows: Sequence[RowSampler], last_tokens: mx.array) -> mx.array:
    """Sets to -inf what the rows' constraints forbid; gives logits back as they are without any.

    Launches the forward pass first: while it runs, the constraints take in the last tokens (which
    were computed before) and the masks are made.
    """
    if all(row.constraint is None for row in rows):
        return logits
    mx.async_eval(logits)
    tokens: list[int] = last_tokens.tolist()  # type: ignore[assignment]
    for row, token in zip(rows, tokens, strict=True):
        # Not the last token of the prompt, nor one from before the row was put back.
        if row.constraint is not None and row.constraint.taken < row.drawn:
            row.constraint.accept(token)
    return mask(logits, [row.constraint for row in rows])


def sample(logits: mx.array, rows: Sequence[RowSampler], last_tokens: mx.array) -> mx.array:
    """Chooses the next token of each row: logits [rows, vocabulary] to token ids [rows].

    Nothing is computed yet when it returns (MLX is lazy); the rows' random streams have moved on.
    """
    logits = logits.astype(mx.float32)
    if any(row.adjusts for row in rows):
        # One copy for all of them: setting row after row would copy the whole every time.
        logits = mx.stack(
            [
                row.adjust(logits[index], last_tokens[index]) if row.adjusts else logits[index]
                for index, row in enumerate(rows)
            ]
        )
    greedy = [index for index, row in enumerate(rows) if row.params.greedy]
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        tokens = mx.argmax(logits, axis=-1)
    elif not greedy:
        tokens = _draw(logits, rows)
    else:
        chosen = [
            mx.argmax(logits[mx.array(greedy)], axis=-1),
            _draw(logits[mx.array(drawn)], [rows[index] for index in drawn]),
        ]
        tokens = mx.concatenate(chosen)[mx.argsort(mx.array(greedy + drawn))]
    for row in rows:
        row.drawn += 1
    return tokens.astype(mx.uint32)


def _draw(logits: mx.array, rows: Sequence[RowSampler]) -> mx.array:
    """Draws one token a row from the filtered distributions of logits [rows, vocabulary]."""
    temperatures = mx.array([[row.params.temperature] for row in rows])
    weights = _weights(logits, logits.max(axis=-1, keepdims=True), temperatures)
    if any(row.params.filtered for row in rows):
        weights = _filter(weights, [row.params for row in rows])
    cumulated = mx.cumsum(weights, axis=-1)
    draws = mx.array([[row.draw()] for row in rows]) * cumulated[:, -1:]
    return mx.argmax(cumulated > draws, axis=-1)


@mx.compile
def _weights(logits: mx.array, highest: mx.array, temperatures: mx.array) -> mx.array:
    """The probabilities, as multiples of each row's highest: nothing here needs their sum to be 1.

    As powers of 2, not of e: on the CPU, MLX computes those in less than half of the time.
    """
    return mx.power(2.0, (logits - highest) * (math.log2(math.e) / temperatures))


def _filter(weights: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Sets to zero what min_p, top_k and top_p leave out of [rows, vocabulary]; keeps the rest."""
    floor = mx.array([[wanted.min_p] for wanted in params])  # the highest weight is 1
    by_top_k: dict[int, list[int]] = {}
    for index, wanted in enumerate(params):
        if wanted.top_k > 0 or wanted.top_p < 1:
            by_top_k.setdefault(min(wanted.top_k, weights.shape[-1]), []).append(index)
    for top_k, rows in by_top_k.items():
        which = mx.array(rows)
        # Rows of one top_k at a time: sums over fewer or more others would round differently.
        candidates = weights[which]
        if top_k > 0:
            candidates = mx.topk(candidates, top_k, axis=-1)
            floor[which] = mx.maximum(floor[which], candidates.min(axis=-1, keepdims=True))
        if any(params[index].top_p < 1 for index in rows):
            kept = mx.where(candidates >= floor[which], candidates, 0.0)
            top_ps = mx.array([[params[index].top_p] for index in rows])
            floor[which] = mx.maximum(floor[which], _nucleus(kept, top_ps))
    return mx.where(weights >= floor, weights, 0.0)


@mx.compile
def _nucleus(kept: mx.array, top_ps: mx.array) -> mx.array:
    """The weight from which on the likeliest tokens of each row have its top_p of the mass."""
    total = kept.sum(axis=-1, keepdims=True)
    high = mx.ones_like(total)  # the highest weight
    # Even if all tokens lay below this, they would not have the mass that may be left out.
    low = 0.5 * (1 - top_ps) * total / kept.shape[-1]
    for _ in range(_TOP_P_HALVINGS):
        middle = mx.sqrt(low * high)
        enough = mx.where(kept >= middle, kept, 0.0).sum(axis=-1, keepdims=True) >= top_ps * total
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return low
