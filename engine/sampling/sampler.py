"""Chooses the next token of every row of a batch in one call.

Each row brings its own parameters, its own random stream and what it has written so far; the
arithmetic runs over all rows at once, because one sampler call a row costs more than the rest of a
step. The order is vLLM's: constraints, then penalties and biases (`adjust`), then temperature and
the filters (`draw`).
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_rq.engine.sampling.draw import LARGEST_DRAW, draw
from mlx_rq.engine.sampling.params import SamplingParams
from mlx_rq.engine.sampling.penalties import Adjustment, adjust
from mlx_rq.engine.structured.constraint import Constraint, mask


@dataclass(eq=False, slots=True)
class SequenceSampler:
    """One row's parameters with what changes as it goes: random stream, history, constraint.

    It stands in a batch where mlx-lm keeps a row's sampler, so that it moves with the row.
    """

    params: SamplingParams
    seed: str
    prompt: Sequence[int] = ()
    end_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    """How many of the likeliest tokens are told beside each chosen one; None for no logprobs."""
    adapter: int = 0
    """The number of the adapter that the row's logits are computed with; 0 for none."""
    drawn: int = 0
    adjustment: Adjustment | None = field(init=False, default=None)
    _random: random.Random = field(init=False)
    _upcoming: deque[float] = field(init=False)
    """Random numbers that were looked at, and not taken yet."""

    def __post_init__(self) -> None:
        self.rewind(())

    def rewind(self, tokens: Sequence[int]) -> None:
        """Goes back to where these tokens were generated: a row that was preempted goes on there.

        The batch computes one token ahead; that one's draw is undone.
        """
        self._random, self._upcoming = random.Random(self.seed), deque()
        self.drawn = len(tokens)
        if not self.params.greedy:
            for _ in tokens:
                self.draw()
        if self.params.adjusts:
            self.adjustment = Adjustment(self.params, self.prompt, self.end_tokens)
            for token in tokens[:-1]:  # the last one is taken in by the next step, as ever
                self.adjustment.count(token)

    def draw(self) -> float:
        """Takes the row's next random number, below 1."""
        if self._upcoming:
            return self._upcoming.popleft()
        return min(self._random.random(), LARGEST_DRAW)

    def upcoming(self, count: int) -> list[float]:
        """Looks at the random numbers by which the next tokens will be chosen."""
        if self.params.greedy:
            return [0.0] * count
        while len(self._upcoming) < count:
            self._upcoming.append(min(self._random.random(), LARGEST_DRAW))
        return list(self._upcoming)[:count]

    def skip(self, count: int) -> None:
        """Goes on behind so many tokens, which were chosen by `choose_ahead`."""
        self.drawn += count
        if not self.params.greedy:
            for _ in range(count):
                self.draw()

    def take_ahead(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that nobody chose; each uses up the random number of its place."""
        for token in tokens:
            self.skip(1)
            self.take(token)

    def ahead(self, most: int) -> Sequence[int]:
        """Gives the tokens that have to follow the next one, at most so many.

        None where logprobs are asked for: they would not be known.
        """
        if self.constraint is None or self.top_logprobs is not None or most <= 0:
            return ()
        return self.constraint.ahead(most)

    @property
    def remembers(self) -> bool:
        """Whether the next token depends on which ones were chosen, beside the logits."""
        return self.constraint is not None or self.adjustment is not None

    def take(self, token: int) -> None:
        """Takes in the last token, where the row chose it and has not taken it in yet.

        Else it is the last token of the prompt, or one from before the row was preempted.
        """
        if self.constraint is not None and self.constraint.taken < self.drawn:
            self.constraint.accept(token)
        if self.adjustment is not None and self.adjustment.counted < self.drawn:
            self.adjustment.count(token)


def choose(
    logits: mx.array,
    rows: Sequence[SequenceSampler],
    last_tokens: mx.array,
    ahead: Sequence[Sequence[int]] | None = None,
) -> mx.array:
    """Chooses the next token of each row: logits [rows, vocabulary] to token ids [rows].

    `last_tokens` [rows] are what the rows chose last, and `ahead` what had to follow that. Nothing
    is computed yet when it returns (MLX is lazy), but where rows remember what they chose the
    forward pass was launched, and while it runs, the last tokens (which were computed before it)
    are read and masks and penalties made. The rows' random streams have moved on.
    """
    if any(row.remembers for row in rows):
        mx.async_eval(logits)
        tokens: list[int] = last_tokens.tolist()  # type: ignore[assignment]
        for row, token, forced in zip(rows, tokens, ahead or [()] * len(rows), strict=True):
            row.take(token)
            row.take_ahead(forced)
    logits = mask(logits, [row.constraint for row in rows]).astype(mx.float32)
    logits = adjust(logits, [row.adjustment for row in rows])
    randoms = [0.0 if row.params.greedy else row.draw() for row in rows]
    chosen = draw(logits, [row.params for row in rows], randoms)
    for row in rows:
        row.drawn += 1
    return chosen.astype(mx.uint32)


def choose_ahead(logits: mx.array, row: SequenceSampler) -> mx.array:
    """Chooses tokens of one row, which remembers nothing, by logits [positions, vocabulary].

    Each is the one that `choose` would choose there. The row does not go on: who keeps some of them
    says so by `skip`.
    """
    assert not row.remembers, "the next token would depend on the one before"
    count = len(logits)
    randoms = row.upcoming(count)
    return draw(logits.astype(mx.float32), [row.params] * count, randoms).astype(mx.uint32)
